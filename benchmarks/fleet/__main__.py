"""Measure three engines behind `vllm_thunder coordinate` beside other ways to choose the engine.

    python -m benchmarks.fleet             both rows
    python -m benchmarks.fleet --plan      what is still to be measured, minute by minute
    python -m benchmarks.fleet paced --fresh

Contenders alternate, seeds are pooled:

  coordinator        vllm_thunder coordinate in front of three vllm_thunder engines
  sticky             the client sends all calls of a program to the engine that a hash of its id
                     names; the engines are the same three
  prefix-hash        the client chooses by a hash of the prompt's first 256 tokens, with bounded
                     loads; the same three
  stock-sticky       as sticky, on three stock vLLM engines
  stock-prefix-hash  as prefix-hash, on these

A run is kept when it ends, so an interrupted measurement goes on where it stopped. Each row's
numbers, bars and hardware go to ``benchmarks/results/fleet_ROW.json`` with a picture beside them;
runs, logs and samples of memory to ``results/fleet``.
"""

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.compare import alternate
from benchmarks.fleet.rows import ROWS, Row
from benchmarks.fleet.session import Measurement, Session
from benchmarks.fleet.watch import pooled
from benchmarks.suite.bars import Measured, verdict_table
from vllm_thunder.program.errors import ConfigError, ThunderError
from vllm_thunder.replay.machine import describe_machine
from vllm_thunder.replay.plot import plot_replays
from vllm_thunder.replay.records import Replay
from vllm_thunder.replay.report import Summary, run_table, summarize, to_json

RESULTS = Path(__file__).resolve().parents[1] / "results"
_START_SECONDS = 120.0  # six engines at once on two cores

Runs = Mapping[str, Sequence[Replay]]


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code is 0 when all runs ended without an error, their bars met or missed; 1 when one
    did not; 2 for a bad flag."""
    args = _parser().parse_args(argv)
    console = Console(width=None if sys.stdout.isatty() else 120)
    rows = [row for row in ROWS if not args.rows or row.name in args.rows]
    if args.plan:
        console.print(plan_table(rows, args))
        return 0
    planned = [m for row in rows for m in _measurements(row, args)]
    if args.fresh:
        for measurement in planned:
            measurement.path(args.work).unlink(missing_ok=True)
    failed: list[str] = []
    began = time.monotonic()
    try:
        with Session(
            args.work,
            planned,
            console,
            engine_arguments=args.thunder_arg,
            coordinator_arguments=args.coordinator_arg,
        ) as session:
            for row in rows:
                runs = [session.run(m) for m in _measurements(row, args)]
                failed += [f"{row.name}: {run.kind}: {e}" for run in runs for e in run.errors]
                _report(row, runs, args, console)
                minutes = (time.monotonic() - began) / 60
                console.print(f"{minutes:.1f} minutes since the start\n", style="dim")
    except ThunderError as error:
        print(f"fleet: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    for text in failed[:20]:
        console.print(text, style="red", markup=False, highlight=False)
    return 1 if failed else 0


def _measurements(row: Row, args: argparse.Namespace) -> list[Measurement]:
    seeds = row.seeds if args.seeds is None else args.seeds
    return [
        Measurement(row.setup, contender, seed, args.steps)
        for contender, seed in alternate(row.contenders, seeds)
    ]


def _report(row: Row, runs: Sequence[Replay], args: argparse.Namespace, console: Console) -> None:
    by_label: dict[str, list[Replay]] = {contender.label: [] for contender in row.contenders}
    for run in runs:
        by_label[run.kind].append(run)
    facts = facts_of(by_label)
    verdicts = [bar.judge(Measured(by_label, facts)) for bar in row.bars]
    summaries = [summarize(label, found) for label, found in by_label.items()]
    console.print(fleet_table(summaries, by_label, f"{row.name}: {row.title}"))
    console.print(run_table(runs))
    console.print(verdict_table({row.name: verdicts}))
    report: dict[str, Any] = {
        "row": row.name,
        "title": row.title,
        "bars": [asdict(verdict) for verdict in verdicts],
        "facts": facts,
        "machine": describe_machine(),
        **to_json(summaries, runs, "sticky"),
    }
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"fleet_{row.name}.json"
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    plot_replays(runs, path.with_suffix(".png"), row.title)
    console.print(f"written: {path}, {path.with_suffix('.png')}", markup=False)


def facts_of(runs: Runs) -> dict[str, float]:
    """What no replay tells: the coordinator's mean imbalance, and by label the engines' own."""
    facts: dict[str, float] = {}
    for label, found in runs.items():
        told = [
            run.about["fleet"]["imbalance"] for run in found if "imbalance" in run.about["fleet"]
        ]
        points = pooled(told)
        if points is not None:
            name = "imbalance_points" if label == "coordinator" else f"imbalance_points_{label}"
            facts[name] = points
    return facts


def fleet_table(summaries: Sequence[Summary], runs: Runs, title: str) -> Table:
    """One column a contender, one row a number."""
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for summary in summaries:
        table.add_column(summary.kind, justify="right", style="bold")
    for label, name, digits in _ROWS:
        table.add_row(label, *(_text(getattr(summary, name), digits) for summary in summaries))
    table.add_row("moves of programs", *(_text(_moves(runs[s.kind]), 0) for s in summaries))
    told = facts_of(runs)
    points = (
        told.get("imbalance_points" if s.kind == "coordinator" else f"imbalance_points_{s.kind}")
        for s in summaries
    )
    table.add_row("mean memory imbalance while turns wait (points)", *(_text(p, 1) for p in points))
    return table


_ROWS = (
    ("runs", "runs", 0),
    ("steps finished", "steps", 0),
    ("steps per minute", "steps_per_minute", 1),
    ("step latency, p50 (s)", "step_latency_p50", 2),
    ("step latency, p99 (s)", "step_latency_p99", 2),
    ("longest wait for a first token (s)", "worst_wait", 1),
    ("time per program, mean (s)", "program_seconds_mean", 1),
    ("prompt tokens", "prompt_tokens", 0),
    ("  of them new", "new_tokens", 0),
    ("  not served from cache", "uncached_tokens", 0),
    ("recomputed tokens", "recomputed_tokens", 0),
    ("preemptions", "preemptions", 0),
    ("pauses by engines", "pauses", 0),
    ("errors", "errors", 0),
)


def _moves(runs: Sequence[Replay]) -> int:
    return sum(run.about["fleet"]["moves"] for run in runs)


def plan_table(rows: Sequence[Row], args: argparse.Namespace) -> Table:
    """What is still to be measured; runs that lie in the work directory take no time."""
    table = Table(title="plan", title_justify="left")
    for heading in ("row", "runs", "of them new", "minutes", "at its end"):
        table.add_column(heading, justify="left" if heading == "row" else "right")
    total = 0.0
    for row in rows:
        measurements = _measurements(row, args)
        new = [m for m in measurements if not m.path(args.work).is_file()]
        seconds = sum(m.contender.seconds for m in new) + (_START_SECONDS if new else 0.0)
        total += seconds
        figures = (len(measurements), len(new), f"{seconds / 60:.1f}", f"{total / 60:.1f}")
        table.add_row(row.name, *map(str, figures))
    return table


def _text(value: float | int | None, digits: int) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fleet",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "rows",
        nargs="*",
        metavar="ROW",
        type=_row_name,
        help=f"of {', '.join(row.name for row in ROWS)} (default: all)",
    )
    parser.add_argument("--plan", action="store_true", help="print what would run, and how long")
    parser.add_argument("--fresh", action="store_true", help="take runs again that are there")
    parser.add_argument(
        "--seeds", nargs="+", type=int, metavar="N", help="others than the rows' own"
    )
    parser.add_argument(
        "--steps", type=int, metavar="N", help="only the first steps of each program, for a look"
    )
    parser.add_argument(
        "--work", type=Path, default=Path("results/fleet"), metavar="DIR", help="runs and logs"
    )
    parser.add_argument(
        "--out", type=Path, default=RESULTS, metavar="DIR", help="numbers and pictures of the rows"
    )
    for flag, whom in (
        ("--thunder-arg", "the vllm_thunder engines"),
        ("--coordinator-arg", "the coordinator"),
    ):
        parser.add_argument(
            flag, action="append", default=[], metavar="ARG", help=f"a further argument for {whom}"
        )
    return parser


def _row_name(text: str) -> str:
    if text not in {row.name for row in ROWS}:
        raise argparse.ArgumentTypeError(f"{text!r} is not a row")
    return text


if __name__ == "__main__":
    sys.exit(main())
