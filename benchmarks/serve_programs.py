"""Replay a workload against any OpenAI-compatible server: vllm_thunder, stock vLLM, a router.

    python benchmarks/serve_programs.py --url http://127.0.0.1:8000 --workload thrash
    python benchmarks/serve_programs.py --url ... --program-id-field none --release-path none
    python benchmarks/serve_programs.py --url ... --program-id-field header:X-Session-ID

The server's prefix cache keeps the text of a run: use another ``--seed`` for the next one, or
start the server again.
"""

import argparse
import asyncio
import os
import sys
from pathlib import Path

from rich.console import Console

from vllm_thunder.program.errors import ThunderError
from vllm_thunder.replay.arguments import (
    add_client_arguments,
    add_workload_arguments,
    client_options,
    load_workload,
)
from vllm_thunder.replay.driver import replay
from vllm_thunder.replay.machine import describe_machine
from vllm_thunder.replay.plot import plot_replays
from vllm_thunder.replay.progress import RunProgress
from vllm_thunder.replay.report import summarize, summary_table


def main(argv: list[str] | None = None) -> int:
    """The exit code is 0 when every program finished, 1 when one did not, 2 for a bad flag."""
    args = _parser().parse_args(argv)
    console = Console()
    try:
        workload = load_workload(args)
        options = client_options(
            args, args.url, model=args.model, api_key=os.environ.get("OPENAI_API_KEY")
        )
        with RunProgress(console, args.label, workload.steps) as progress:
            result = asyncio.run(replay(workload, options, kind=args.label, on_step=progress.step))
    except ThunderError as error:
        print(f"serve_programs.py: error: {error}", file=sys.stderr)
        return 2
    result.about["machine"] = describe_machine()
    console.print(summary_table([summarize(args.label, [result])], workload.name))
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        result.save(args.out)
        plot_replays([result], args.out.with_suffix(".png"), f"{workload.name}: {args.url}")
        console.print(f"written: {args.out}, {args.out.with_suffix('.png')}", markup=False)
    for text in result.errors[:10]:
        console.print(text, style="red", markup=False, highlight=False)
    return 1 if result.errors else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Replay agents in a closed loop against a server. An API key is read from "
        "OPENAI_API_KEY.",
    )
    parser.add_argument("--url", required=True, help="base URL, without /v1")
    parser.add_argument("--model", help="served model's name (default: the server's first)")
    parser.add_argument("--label", default="server", help="the server's name in table and JSON")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="write the run as JSON here, and a PNG beside it"
    )
    add_workload_arguments(parser, default="thrash")
    add_client_arguments(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
