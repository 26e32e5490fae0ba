"""``vllm_thunder demo``: the same agents against stock vLLM and against vllm_thunder."""

import argparse
import json
from pathlib import Path

from rich.console import Console

from vllm_thunder.program.errors import ConfigError
from vllm_thunder.replay.arguments import (
    DEMO_TRACE,
    add_client_arguments,
    add_workload_arguments,
    client_options,
    load_workload,
)
from vllm_thunder.replay.measure import measure
from vllm_thunder.replay.plot import plot_replays
from vllm_thunder.replay.records import Replay
from vllm_thunder.replay.report import ratios, summarize, summary_table, to_json
from vllm_thunder.replay.server import KINDS, ServerSpec
from vllm_thunder.replay.tiny_model import TinyModel, build_tiny_model, default_cache

__all__ = ["add_parser", "run"]


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "demo",
        help="replay agent traces against stock vLLM and against vllm_thunder",
        description="Starts a real engine with a small KV cache, replays agents against it in a "
        "closed loop, once with stock vLLM and once with vllm_thunder, and compares.",
    )
    parser.add_argument(
        "--model",
        metavar="DIR|NAME",
        help="model to serve (default: a tiny random one, built here in a second)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("results/demo"),
        metavar="DIR",
        help="where JSON, PNG and the servers' logs go (default: results/demo)",
    )
    parser.add_argument("--only", choices=KINDS, help="run only this one")
    parser.add_argument(
        "--server-arg",
        action="append",
        default=[],
        metavar="ARG",
        help="a further argument for both servers, as --server-arg=--max-num-batched-tokens=1024",
    )
    parser.add_argument(
        "--thunder-arg",
        action="append",
        default=[],
        metavar="ARG",
        help="a further argument for vllm_thunder alone, as --thunder-arg=--thunder-max-wait=30",
    )
    add_workload_arguments(parser, default=DEMO_TRACE)
    add_client_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """The exit code is 1 when a program did not finish."""
    console = Console()
    workload = load_workload(args)
    client = client_options(args, "http://to-be-started")
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out: {error}") from error
    tiny = TinyModel()
    model = args.model or build_tiny_model(default_cache(), tiny)
    console.print(
        f"{workload.name}: {len(workload.programs)} programs, {workload.steps} steps; "
        f"KV cache {workload.blocks} x {workload.block_size} tokens, "
        f"{workload.pressure:.1f} times that when all contexts are at their ends",
        markup=False,
    )
    replays: list[Replay] = []
    for kind in KINDS if args.only is None else (args.only,):
        spec = ServerSpec(
            kind=kind,
            model=model,
            usable_blocks=workload.blocks,
            block_size=workload.block_size,
            kv_bytes_per_token=None if args.model else tiny.kv_bytes_per_token,
            max_model_len=None if args.model else tiny.max_position_embeddings,
            extra=(*args.server_arg, *(args.thunder_arg if kind == "thunder" else ())),
        )
        log = args.out / f"server-{kind}.log"
        result = measure(spec, workload, client, log=log, console=console)
        result.save(args.out / f"replay-{kind}.json")
        console.print(f"{kind}: {len(result.steps)} steps in {result.seconds:.0f} s")
        replays.append(result)
    return _report(args.out, workload.name, replays, console)


def _report(out: Path, name: str, replays: list[Replay], console: Console) -> int:
    summaries = [summarize(replay.kind, [replay]) for replay in replays]
    console.print(summary_table(summaries, f"{name}, seed {replays[0].about['workload']['seed']}"))
    if len(summaries) == 2:
        gains = ratios(summaries[1], summaries[0])
        texts = [
            f"{label} x {value:.2f}"
            for label, value in zip(
                ("steps per minute", "p99 step latency", "time per program"),
                gains.values(),
                strict=True,
            )
            if value is not None
        ]
        console.print(f"{summaries[1].kind} against {summaries[0].kind}: {', '.join(texts)}")
    report = out / "report.json"
    report.write_text(
        json.dumps(to_json(summaries, replays, "stock"), indent=1) + "\n", encoding="utf-8"
    )
    picture = out / "report.png"
    plot_replays(replays, picture, f"{name}: agents in a closed loop on one engine")
    console.print(f"written: {report}, {picture}")
    errors = [(replay.kind, text) for replay in replays for text in replay.errors]
    for kind, text in errors[:10]:
        console.print(f"{kind}: {text}", style="red", markup=False, highlight=False)
    return 1 if errors else 0
