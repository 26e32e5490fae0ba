"""Compare kinds of servers over several seeds, in alternating order on one machine.

    python benchmarks/compare.py --name thrash --workload thrash --seeds 0 1 2

A row is one kind with one seed, on a server of its own with an empty cache. Rows run stock,
thunder, thunder, stock, ... so that a machine that gets slower over time favours nobody. A row's
JSON is written when it ends and a row that is there is not run again: an interrupted comparison
goes on where it stopped. After a row the vllm_thunder server must track no program and have all
its blocks free. Rows and logs go to ``results/NAME``, the pooled numbers to
``benchmarks/results/NAME.json`` and ``NAME.png``.

``stock@6`` is stock vLLM with at most 6 programs started at a time.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.table import Table

from vllm_thunder.program.errors import ConfigError, ThunderError
from vllm_thunder.replay.arguments import (
    add_client_arguments,
    add_workload_arguments,
    client_options,
    load_workload,
)
from vllm_thunder.replay.measure import measure
from vllm_thunder.replay.plot import plot_replays
from vllm_thunder.replay.records import Replay
from vllm_thunder.replay.report import (
    Summary,
    ratios,
    run_table,
    summarize,
    summary_table,
    to_json,
)
from vllm_thunder.replay.server import KINDS, ServerSpec
from vllm_thunder.replay.tiny_model import TinyModel, build_tiny_model, default_cache

RESULTS = Path(__file__).resolve().parent / "results"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Row:
    """One kind with one seed. ``kind`` is ``stock``, ``thunder``, or either with ``@N``."""

    kind: str
    seed: int

    @property
    def server_kind(self) -> str:
        return self.kind.partition("@")[0]

    @property
    def most_programs(self) -> int | None:
        number = self.kind.partition("@")[2]
        return int(number) if number else None

    def path(self, directory: Path) -> Path:
        return directory / f"{self.kind}-seed{self.seed}.json"


def alternate(contenders: Sequence[T], seeds: Sequence[int]) -> list[tuple[T, int]]:
    """All pairs in the order they run: the contenders forwards for one seed, backwards for the
    next."""
    pairs: list[tuple[T, int]] = []
    for index, seed in enumerate(seeds):
        order = contenders if index % 2 == 0 else list(reversed(contenders))
        pairs += [(contender, seed) for contender in order]
    return pairs


def plan(kinds: Sequence[str], seeds: Sequence[int]) -> list[Row]:
    return [Row(kind, seed) for kind, seed in alternate(kinds, seeds)]


def run_rows(
    rows: Sequence[Row], directory: Path, run: Callable[[Row], Replay], console: Console
) -> list[Replay]:
    """All rows' results in order; ``run`` is called for the rows that ``directory`` has not.

    Raises ConfigError when a stored row is of another workload than the one just run or read
    before it: rows that are pooled have to be of one load.
    """
    directory.mkdir(parents=True, exist_ok=True)
    results: list[Replay] = []
    for number, row in enumerate(rows, start=1):
        path = row.path(directory)
        name = f"row {number} of {len(rows)}: {row.kind}, seed {row.seed}"
        if path.is_file():
            result = Replay.load(path)
            console.print(f"{name}: there already", markup=False)
        else:
            console.print(name, markup=False)
            result = run(row)
            result.save(path)
        if results and _load_of(result) != _load_of(results[0]):
            raise ConfigError(
                f"{path} is of another workload ({_load_of(result)}) than the rows before it "
                f"({_load_of(results[0])}): use another --name or remove it"
            )
        results.append(result)
    return results


def _load_of(result: Replay) -> dict[str, object]:
    """What has to be equal in all rows that are pooled."""
    workload = result.about["workload"]
    return {name: workload[name] for name in ("name", "programs", "blocks", "block_size")}


def pool(results: Sequence[Replay]) -> list[Summary]:
    """One summary a kind, kinds in order of their first row."""
    by_kind: dict[str, list[Replay]] = {}
    for result in results:
        by_kind.setdefault(result.kind, []).append(result)
    return [summarize(kind, runs) for kind, runs in by_kind.items()]


def main(argv: list[str] | None = None) -> int:
    """The exit code is 0 when all rows ran without an error, 1 otherwise, 2 for a bad flag."""
    args = _parser().parse_args(argv)
    args.work = args.work or Path("results") / args.name
    console = Console()
    try:
        results = run_rows(
            plan(_kinds(args.kinds), args.seeds),
            args.work,
            _runner(args, console),
            console,
        )
    except ThunderError as error:
        print(f"compare.py: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    summaries = pool(results)
    base = args.kinds[0]
    console.print(summary_table(summaries, f"{args.name}: {len(args.seeds)} seeds pooled"))
    console.print(_ratio_table(summaries, base))
    console.print(run_table(results))
    RESULTS.mkdir(exist_ok=True)
    report = RESULTS / f"{args.name}.json"
    text = json.dumps(to_json(summaries, results, base), indent=1)
    report.write_text(text + "\n", encoding="utf-8")
    plot_replays(results, report.with_suffix(".png"), f"{args.name}: agents in a closed loop")
    console.print(f"written: {report}, {report.with_suffix('.png')}", markup=False)
    return 1 if any(result.errors for result in results) else 0


def _runner(args: argparse.Namespace, console: Console) -> Callable[[Row], Replay]:
    client = client_options(args, "http://to-be-started")
    tiny = TinyModel()

    def run(row: Row) -> Replay:
        workload = load_workload(args, seed=row.seed)
        thunder = row.server_kind == "thunder"
        spec = ServerSpec(
            kind=row.server_kind,
            model=args.model or build_tiny_model(default_cache(), tiny),
            usable_blocks=workload.blocks,
            block_size=workload.block_size,
            kv_bytes_per_token=None if args.model else tiny.kv_bytes_per_token,
            max_model_len=None if args.model else tiny.max_position_embeddings,
            extra=(*args.server_arg, *(args.thunder_arg if thunder else ())),
        )
        limit = row.most_programs or client.max_concurrent_programs
        return measure(
            spec,
            workload,
            replace(client, max_concurrent_programs=limit),
            log=row.path(args.work).with_suffix(".log"),
            console=console,
            label=row.kind,
        )

    return run


def _kinds(texts: Sequence[str]) -> list[str]:
    for text in texts:
        kind, at, number = text.partition("@")
        if kind not in KINDS or (at and (not number.isdecimal() or int(number) < 1)):
            raise ConfigError(f"--kinds: {text!r} is not one of {', '.join(KINDS)}, or KIND@N")
    return list(dict.fromkeys(texts))


def _ratio_table(summaries: Sequence[Summary], base_kind: str) -> Table:
    table = Table(title=f"as a multiple of {base_kind}", title_justify="left")
    for heading in ("", "steps per minute", "p99 step latency", "time per program"):
        table.add_column(heading, justify="right")
    base = next(summary for summary in summaries if summary.kind == base_kind)
    for summary in summaries:
        if summary is not base:
            values = ratios(summary, base).values()
            table.add_row(
                summary.kind, *("–" if value is None else f"{value:.2f}" for value in values)
            )
    return table


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Measure kinds of servers with the same loads, in alternating order."
    )
    parser.add_argument("--name", required=True, help="names the results")
    parser.add_argument(
        "--kinds",
        nargs="+",
        default=["stock", "thunder"],
        metavar="KIND",
        help="stock, thunder, or KIND@N for at most N programs at a time; the first one is what "
        "the others are compared with (default: stock thunder)",
    )
    parser.add_argument(
        "--seeds",
        nargs="+",
        type=int,
        default=[0, 1, 2],
        metavar="N",
        help="one run of every kind for each (default: 0 1 2); they take the place of --seed",
    )
    parser.add_argument(
        "--work", type=Path, metavar="DIR", help="rows and logs (default: results/NAME)"
    )
    parser.add_argument("--model", metavar="DIR|NAME", help="model (default: the tiny one)")
    for flag, whom in (("--server-arg", "all servers"), ("--thunder-arg", "vllm_thunder alone")):
        parser.add_argument(
            flag, action="append", default=[], metavar="ARG", help=f"a further argument for {whom}"
        )
    add_workload_arguments(parser, default="thrash")
    add_client_arguments(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
