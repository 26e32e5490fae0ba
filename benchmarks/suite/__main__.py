"""Measure every claim of the project, stock vLLM beside vllm_thunder.

    python -m benchmarks.suite             all rows, within an hour on two CPU cores
    python -m benchmarks.suite --plan      what that takes, minute by minute
    python -m benchmarks.suite heavy mixed --fresh

Contenders alternate, seeds are pooled. A run is kept when it ends, so an interrupted suite goes on
where it stopped. Each row's numbers, bars and hardware go to ``benchmarks/results/ROW.json`` with a
picture beside them; a bar that is missed is printed as MISSED with its figure. Runs and server logs
go to ``results/bench``.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.compare import alternate
from benchmarks.suite.bars import Measured, Verdict, verdict_table
from benchmarks.suite.rows import ROWS, Row
from benchmarks.suite.session import Measurement, Session
from vllm_thunder.program.errors import ConfigError, ThunderError
from vllm_thunder.replay.machine import describe_machine
from vllm_thunder.replay.plot import plot_replays
from vllm_thunder.replay.records import Replay
from vllm_thunder.replay.report import run_table, summarize, summary_table, to_json

RESULTS = Path(__file__).resolve().parents[1] / "results"
#: Two servers starting at once, and one stopping; and what stands between two runs.
_START_SECONDS = 60.0
_BETWEEN_SECONDS = 0.5


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code is 0 when all rows ran without an error, their bars met or missed; 1 when one
    did not, and then the others ran all the same; 2 for a bad flag."""
    args = _parser().parse_args(argv)
    console = Console(width=None if sys.stdout.isatty() else 120)
    rows = [row for row in ROWS if not args.rows or row.name in args.rows]
    if args.plan:
        console.print(_plan_table(rows, args))
        return 0
    if args.fresh:
        _forget(rows, args)
    verdicts: dict[str, list[Verdict]] = {}
    failed: list[str] = []
    began = time.monotonic()
    try:
        with Session(args.work, _planned(rows, args), console, args.thunder_arg) as session:
            for row in rows:
                try:
                    runs = [session.run(m) for m in _measurements(row, args)]
                    verdicts[row.name] = _report(row, runs, args, console)
                except ConfigError:
                    raise
                except ThunderError as error:
                    session.stop_servers()
                    failed.append(f"{row.name}: {error}")
                    console.print(failed[-1], style="red", markup=False, highlight=False)
                else:
                    failed += [f"{row.name}: {run.kind}: {e}" for run in runs for e in run.errors]
                minutes = (time.monotonic() - began) / 60
                console.print(f"{minutes:.1f} minutes since the start\n", style="dim")
    except ConfigError as error:
        print(f"suite: error: {error}", file=sys.stderr)
        return 2
    finally:
        if verdicts:
            console.print(verdict_table(verdicts))
    for text in failed[:20]:
        console.print(text, style="red", markup=False, highlight=False)
    return 1 if failed else 0


def _seeds(row: Row, args: argparse.Namespace) -> Sequence[int]:
    return row.seeds if args.seeds is None or not row.contenders else args.seeds


def _measurements(row: Row, args: argparse.Namespace) -> list[Measurement]:
    return [Measurement(c, seed) for c, seed in alternate(row.contenders, _seeds(row, args))]


def _planned(rows: Sequence[Row], args: argparse.Namespace) -> list[Measurement]:
    return list(dict.fromkeys(m for row in rows for m in _measurements(row, args)))


def _forget(rows: Sequence[Row], args: argparse.Namespace) -> None:
    for measurement in _planned(rows, args):
        measurement.path(args.work).unlink(missing_ok=True)
    for row in rows:
        if row.script is not None:
            row.script.path(args.work).unlink(missing_ok=True)


def _report(
    row: Row, runs: Sequence[Replay], args: argparse.Namespace, console: Console
) -> list[Verdict]:
    by_label: dict[str, list[Replay]] = {contender.label: [] for contender in row.contenders}
    for run in runs:
        by_label[run.kind].append(run)
    for found in by_label.values():
        found.sort(key=lambda run: run.about["workload"]["seed"])
    facts = {} if row.script is None else row.script.run(by_label, args.work)
    judged = row.judged(by_label)
    verdicts = [bar.judge(Measured(judged, facts)) for bar in row.bars]
    args.out.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {
        "row": row.name,
        "title": row.title,
        "bars": [asdict(verdict) for verdict in verdicts],
        "facts": facts,
        "machine": describe_machine(),
    }
    if runs:
        summaries = [summarize(label, found) for label, found in judged.items()]
        console.print(summary_table(summaries, f"{row.name}: {row.title}"))
        console.print(run_table([run for found in judged.values() for run in found]))
        report |= to_json(summaries, runs, row.contenders[0].label)
        plot_replays(runs, args.out / f"{row.name}.png", row.title)
    console.print(verdict_table({row.name: verdicts}))
    path = args.out / f"{row.name}.json"
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return verdicts


def _plan_table(rows: Sequence[Row], args: argparse.Namespace) -> Table:
    """What is still to be measured; runs that lie in the work directory take no time."""
    table = Table(title="plan", title_justify="left")
    for heading in ("row", "runs", "of them new", "minutes", "at its end"):
        table.add_column(heading, justify="left" if heading == "row" else "right")
    done = {m for m in _planned(rows, args) if m.path(args.work).is_file()}
    blocks: int | None = None
    total = 0.0
    for row in rows:
        measurements = _measurements(row, args)
        new = [m for m in dict.fromkeys(measurements) if m not in done]
        done.update(new)
        seconds = sum(m.contender.seconds + _BETWEEN_SECONDS for m in new)
        for measurement in new:
            if measurement.workload.blocks != blocks:
                blocks = measurement.workload.blocks
                seconds += _START_SECONDS
        if row.script is not None and not row.script.path(args.work).is_file():
            seconds += row.script.seconds
        total += seconds
        table.add_row(
            row.name,
            str(len(measurements)),
            str(len(new)),
            f"{seconds / 60:.1f}",
            f"{total / 60:.1f}",
        )
    return table


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.suite",
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
        "--work", type=Path, default=Path("results/bench"), metavar="DIR", help="runs and logs"
    )
    parser.add_argument(
        "--out", type=Path, default=RESULTS, metavar="DIR", help="numbers and pictures of the rows"
    )
    parser.add_argument(
        "--thunder-arg",
        action="append",
        default=[],
        metavar="ARG",
        help="a further argument for vllm_thunder, as --thunder-arg=--thunder-policy=fcfs",
    )
    return parser


def _row_name(text: str) -> str:
    if text not in {row.name for row in ROWS}:
        raise argparse.ArgumentTypeError(f"{text!r} is not a row")
    return text


if __name__ == "__main__":
    sys.exit(main())
