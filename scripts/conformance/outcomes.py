"""What the tests of two runs say of each other."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Comparison", "Outcome", "compare", "read_outcomes", "report"]

#: Lines of a failure's message that the report shows.
_SHOWN_LINES = 4


@dataclass(frozen=True)
class Outcome:
    """How one test ended.

    ``built``: the classes of ours that it made instances of. ``problems``: what the books of
    those said against themselves when the test was over.
    """

    outcome: str
    message: str = ""
    built: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        return self.outcome == "passed"


@dataclass(frozen=True)
class Comparison:
    """A run with ours against the same tests with vLLM's.

    ``failing`` has, by the name of a test that passes with vLLM's, how it ended with ours.
    """

    total: int
    passed_theirs: int
    passed_ours: int
    reached_ours: int
    failing: dict[str, Outcome] = field(default_factory=dict)
    broken_books: dict[str, Outcome] = field(default_factory=dict)

    @property
    def conforms(self) -> bool:
        return not self.failing and not self.broken_books


def read_outcomes(file: Path) -> dict[str, Outcome]:
    """The outcomes in a file of the plugin's, by test.

    Raises:
        ValueError: there is none, so the run did not come to its first test.
    """
    outcomes = {}
    for line in file.read_text().splitlines() if file.exists() else ():
        record = json.loads(line)
        outcomes[record["id"]] = Outcome(
            record["outcome"], record["message"], tuple(record["built"]), tuple(record["problems"])
        )
    if not outcomes:
        raise ValueError(f"no test ran: {file.name} is empty")
    return outcomes


def compare(theirs: dict[str, Outcome], ours: dict[str, Outcome]) -> Comparison:
    """Ours against theirs; a test that did not run with ours failed."""
    missing = Outcome("not run", "the run ended before this test")
    return Comparison(
        total=len(theirs),
        passed_theirs=sum(outcome.passed for outcome in theirs.values()),
        passed_ours=sum(outcome.passed for outcome in ours.values()),
        reached_ours=sum(bool(outcome.built) for outcome in ours.values()),
        failing={
            name: ours.get(name, missing)
            for name, outcome in theirs.items()
            if outcome.passed and not ours.get(name, missing).passed
        },
        broken_books={name: outcome for name, outcome in ours.items() if outcome.problems},
    )


def report(title: str, result: Comparison, *, required: bool) -> list[str]:
    """Lines for a reader: both counts, and every test that passes with vLLM's only."""
    lines = [
        title,
        f"  vLLM's   {result.passed_theirs} of {result.total} pass",
        f"  ours     {result.passed_ours} of {result.total} pass; "
        f"{result.reached_ours} build our scheduler, manager or pool",
    ]
    if result.failing:
        kind = "fail with ours" if required else "differ with ours (reported, not required)"
        lines += [f"  {len(result.failing)} pass with vLLM's and {kind}:"]
        lines += _named((name, each.message) for name, each in result.failing.items())
    if result.broken_books:
        lines += [f"  {len(result.broken_books)} leave books that do not agree:"]
        lines += _named((name, "\n".join(o.problems)) for name, o in result.broken_books.items())
    return lines


def _named(tests: Iterable[tuple[str, str]]) -> list[str]:
    lines = []
    for name, message in sorted(tests):
        lines.append(f"    {name}")
        lines += [f"        {line}" for line in message.splitlines()[:_SHOWN_LINES]]
    return lines
