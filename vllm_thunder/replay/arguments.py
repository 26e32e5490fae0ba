"""Command-line flags that the demo and the benchmarks share."""

import argparse
import math
from pathlib import Path

from vllm_thunder.program.errors import ConfigError
from vllm_thunder.replay.client import ClientOptions
from vllm_thunder.replay.presets import PRESETS, preset
from vllm_thunder.replay.traces import TraceOptions, read_trace
from vllm_thunder.replay.workload import Workload

__all__ = [
    "DEMO_TRACE",
    "TRACES",
    "add_client_arguments",
    "add_workload_arguments",
    "client_options",
    "load_workload",
    "trace_directory",
]

DEMO_TRACE = "agents_small"
#: The traces that come with this project.
TRACES = (DEMO_TRACE, "tau_airline", "sweagent")
_BLOCK_SIZE = 32
_TRACE_FLAGS = {
    "scale": (float, "multiply every token count by this"),
    "tool_scale": (float, "multiply tool times by this, a user's turns left out"),
    "max_tool_seconds": (float, "cap tool times, in seconds"),
    "user_seconds": (float, "seconds that a turn of a (simulated) user takes"),
    "max_context": (int, "cut a program before its context exceeds this many tokens"),
    "max_steps": (int, "keep only the first steps of each program"),
}


def trace_directory() -> Path:
    """Where the traces of this project lie: in the installed package, or in its checkout."""
    package = Path(__file__).resolve().parents[1]
    for place in (package / "traces", package.parent / "benchmarks" / "traces"):
        if (place / f"{DEMO_TRACE}.jsonl").is_file():
            return place
    raise ConfigError(f"{DEMO_TRACE}.jsonl is missing from this installation: use --workload FILE")


def add_workload_arguments(parser: argparse.ArgumentParser, default: str) -> None:
    group = parser.add_argument_group("workload")
    group.add_argument(
        "--workload",
        default=default,
        metavar="NAME|FILE",
        help=f"a preset ({', '.join(PRESETS)}), a trace ({', '.join(TRACES)}), or a trace file "
        f"(default: {default})",
    )
    group.add_argument("--programs", type=int, metavar="N", help="how many programs")
    group.add_argument(
        "--blocks",
        type=int,
        metavar="N",
        help=f"KV cache in blocks of {_BLOCK_SIZE} tokens (default: the preset's; for a trace, "
        "room for a quarter of all contexts)",
    )
    group.add_argument(
        "--seed", type=int, default=0, help="fixes shapes, tool times and text (default: 0)"
    )
    defaults = TraceOptions()
    for name, (kind, text) in _TRACE_FLAGS.items():
        value = getattr(defaults, name)
        group.add_argument(
            "--trace-" + name.replace("_", "-"),
            type=kind,
            metavar="X",
            help=f"for a trace: {text} (default: {'no limit' if value is None else value})",
        )


def load_workload(args: argparse.Namespace, *, seed: int | None = None) -> Workload:
    """The workload that the flags name; ``seed`` replaces ``--seed``. Raises ConfigError."""
    seed = args.seed if seed is None else seed
    given = {
        name: getattr(args, f"trace_{name}")
        for name in _TRACE_FLAGS
        if getattr(args, f"trace_{name}") is not None
    }
    if args.workload in PRESETS:
        if given:
            flag = "--trace-" + next(iter(given)).replace("_", "-")
            raise ConfigError(f"{flag}: {args.workload} is a preset, not a trace")
        load = preset(args.workload, seed=seed, programs=args.programs)
        return load.resized(args.blocks)
    if args.workload in TRACES:
        path = trace_directory() / f"{args.workload}.jsonl"
    else:
        path = Path(args.workload)
        if not path.is_file():
            raise ConfigError(
                f"--workload: {args.workload!r} is neither a file nor one of "
                f"{', '.join([*PRESETS, *TRACES])}"
            )
    options = TraceOptions(programs=args.programs, **given)
    load = read_trace(path, options, seed=seed, blocks=1, block_size=_BLOCK_SIZE)
    return load.resized(args.blocks or _tight_blocks(load))


def _tight_blocks(load: Workload) -> int:
    """Room for a quarter of all contexts at their ends, and one and a half times the longest."""
    tokens = max(load.distinct_tokens / 4, 1.5 * load.longest_context)
    return math.ceil(tokens / load.block_size)


def add_client_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("client")
    group.add_argument(
        "--program-id-field",
        default="program_id",
        metavar="FIELD",
        help="body field for the program's id (dots nest), header:NAME, or none "
        "(default: program_id)",
    )
    group.add_argument(
        "--final-field",
        default="none",
        metavar="FIELD",
        help="field set to true in a program's last call, written likewise (default: none)",
    )
    group.add_argument(
        "--release-path",
        default="/programs/release",
        metavar="PATH",
        help="where a program's end is posted; none: programs are never released "
        "(default: /programs/release)",
    )
    group.add_argument(
        "--max-concurrent-programs",
        type=int,
        metavar="N",
        help="start no further program while N run (default: no limit)",
    )
    group.add_argument(
        "--unlabelled-share",
        type=float,
        default=0.0,
        metavar="X",
        help="share of the programs that send no id (default: 0)",
    )
    group.add_argument(
        "--no-exact-output",
        dest="exact_output",
        action="store_false",
        help="do not send ignore_eos and min_tokens, which only vLLM knows",
    )
    group.add_argument(
        "--words-per-token",
        type=float,
        default=1.0,
        metavar="X",
        help="words written for each token of the workload (default: 1, right for the tiny model)",
    )
    group.add_argument(
        "--step-timeout",
        type=float,
        default=900.0,
        metavar="S",
        help="seconds after which a call has failed (default: 900)",
    )
    group.add_argument(
        "--run-timeout",
        type=float,
        metavar="S",
        help="seconds after which the run is stopped (default: no limit)",
    )
    group.add_argument(
        "--window",
        type=float,
        metavar="S",
        help="end the run after so many seconds, which is no failure (default: when all programs "
        "have ended)",
    )


def client_options(
    args: argparse.Namespace,
    base_url: str,
    *,
    model: str | None = None,
    api_key: str | None = None,
) -> ClientOptions:
    """The client that the flags describe; raises ConfigError."""

    def named(text: str) -> str | None:
        return None if text == "none" else text

    return ClientOptions(
        base_url=base_url,
        model=model,
        program_id_field=named(args.program_id_field),
        final_field=named(args.final_field),
        release_path=named(args.release_path),
        max_concurrent_programs=args.max_concurrent_programs,
        unlabelled_share=args.unlabelled_share,
        exact_output=args.exact_output,
        words_per_token=args.words_per_token,
        step_timeout=args.step_timeout,
        run_timeout=args.run_timeout,
        window_seconds=args.window,
        api_key=api_key,
    )
