"""Bars: what a row has to show, and whether it does."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from rich.table import Table
from rich.text import Text

from vllm_thunder.replay.records import Replay
from vllm_thunder.replay.report import Summary, summarize

__all__ = ["Bar", "FactBar", "Limit", "Measured", "ReplayBar", "Verdict", "verdict_table"]

#: A number of a summary; None where the server does not tell what it takes.
Metric = Callable[[Summary], float | None]


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured for a row: the runs by contender, one a seed, and other figures by name."""

    runs: Mapping[str, Sequence[Replay]]
    facts: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Verdict:
    """``figure`` is None when there was nothing to judge: then the bar is missed."""

    bar: str
    limit: str
    figure: float | None
    met: bool


@dataclass(frozen=True, slots=True)
class Limit:
    at_least: float | None = None
    at_most: float | None = None

    def __post_init__(self) -> None:
        if (self.at_least is None) == (self.at_most is None):
            raise ValueError("a limit has one side")

    def holds(self, figure: float | None) -> bool:
        if figure is None:
            return False
        if self.at_least is not None:
            return figure >= self.at_least
        assert self.at_most is not None
        return figure <= self.at_most

    def worst(self, figures: Sequence[float | None]) -> float | None:
        """The figure that is hardest to accept; None if there is none, or one is not known."""
        known = [figure for figure in figures if figure is not None]
        if not known or len(known) < len(figures):
            return None
        return min(known) if self.at_least is not None else max(known)

    def __str__(self) -> str:
        if self.at_least is not None:
            return f"≥ {self.at_least:,g}"
        return f"≤ {self.at_most:,g}"


class Bar(Protocol):
    def judge(self, measured: Measured) -> Verdict: ...


@dataclass(frozen=True, slots=True)
class ReplayBar:
    """``metric`` of the pooled runs of ``of``, as a multiple of the one of ``over`` if that is
    named. With ``every_run`` each seed is judged by itself and the worst one counts."""

    text: str
    metric: Metric
    limit: Limit
    of: str = "thunder"
    over: str | None = None
    every_run: bool = False

    def judge(self, measured: Measured) -> Verdict:
        runs = measured.runs[self.of]
        others = measured.runs[self.over] if self.over is not None else None
        if self.every_run:
            figure = self.limit.worst(
                [
                    self._figure([run], None if others is None else [others[index]])
                    for index, run in enumerate(runs)
                ]
            )
        else:
            figure = self._figure(runs, others)
        return Verdict(self._name(), str(self.limit), figure, self.limit.holds(figure))

    def _figure(self, runs: Sequence[Replay], others: Sequence[Replay] | None) -> float | None:
        value = self.metric(summarize(self.of, runs))
        if others is None:
            return value
        base = self.metric(summarize(str(self.over), others))
        return value / base if value is not None and base else None

    def _name(self) -> str:
        name = f"{self.of}: {self.text}"
        if self.over is not None:
            name += f", as a multiple of {self.over}'s"
        return name + (", worst run" if self.every_run else "")


@dataclass(frozen=True, slots=True)
class FactBar:
    """A figure that no replay tells."""

    text: str
    fact: str
    limit: Limit

    def judge(self, measured: Measured) -> Verdict:
        figure = measured.facts.get(self.fact)
        return Verdict(self.text, str(self.limit), figure, self.limit.holds(figure))


def verdict_table(verdicts: dict[str, list[Verdict]]) -> Table:
    """Bars by the row that they are of, as they were met or missed."""
    table = Table(title="bars", title_justify="left")
    for heading in ("row", "bar"):
        table.add_column(heading, overflow="fold")
    for heading in ("asked", "measured", ""):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, found in verdicts.items():
        for verdict in found:
            table.add_row(
                name,
                verdict.bar,
                verdict.limit,
                "nothing" if verdict.figure is None else f"{verdict.figure:,.4g}",
                Text("met", "green") if verdict.met else Text("MISSED", "bold red"),
            )
    return table
