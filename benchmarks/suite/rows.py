"""What ``make bench`` measures, and the bars.

A *contender* is a kind of server with a load and a client; a *row* puts contenders side by side.
Contenders that several rows name are measured once. Loads of one KV size share a pair of
servers, so rows stand together by size here.

What had to be chosen so that all of it ends within an hour on two CPU cores:

- ``heavy`` runs for a window of 60 seconds instead of to its end, which one program with three
  tool calls of a minute would decide.
- ``tau_airline`` and ``sweagent`` are the first 12 and 10 steps of 24 programs that have as many
  (sweagent_demo has 14 of at least 9 steps, ten of them come twice). Tokens are multiplied by 0.5,
  so that a third of the working sets is 368 and 750 blocks, and so are the tool times, drawn for
  every seed from the table of classes of tools and then capped at 5 s. A simulated user's turn
  takes 1 s.
- ``mixed`` is ``sweagent`` with ids for half of the programs.
- ``norelease`` and ``mixed`` take two seeds.
- ``roomy`` takes 12 programs and 3 steps from the preset, since it is run thirty times.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from benchmarks.suite.bars import Bar, FactBar, Limit, ReplayBar
from benchmarks.suite.facts import ROOMY_COST, SCHEDULER_COST, Script
from vllm_thunder.replay.arguments import trace_directory
from vllm_thunder.replay.presets import preset
from vllm_thunder.replay.records import Replay
from vllm_thunder.replay.report import Summary
from vllm_thunder.replay.traces import TraceOptions, read_trace
from vllm_thunder.replay.workload import Workload

__all__ = ["LOADS", "ROWS", "Contender", "Row", "only_unlabelled"]

Runs = Mapping[str, Sequence[Replay]]

#: A third of the working set, in blocks.
THIRD_OF_TAU_AIRLINE = 368
THIRD_OF_SWEAGENT = 750
#: The trace file of ``sweagent`` has a quarter of the tokens.
_SWEAGENT_SCALE = 2.032
_MAX_WAIT = 60.0


def _trace(name: str, blocks: int, scale: float = 1.0) -> Callable[[int], Workload]:
    options = TraceOptions(scale=scale, tool_scale=0.5, max_tool_seconds=5.0, user_seconds=1.0)

    def load(seed: int) -> Workload:
        path = trace_directory() / f"{name}.jsonl"
        return read_trace(path, options, seed=seed, blocks=blocks)

    return load


#: Loads by name, for a seed.
LOADS: dict[str, Callable[[int], Workload]] = {
    "thrash": lambda seed: preset("thrash", seed=seed),
    "heavy": lambda seed: preset("heavy", seed=seed),
    "tau_airline": _trace("tau_airline", THIRD_OF_TAU_AIRLINE),
    "sweagent": _trace("sweagent", THIRD_OF_SWEAGENT, _SWEAGENT_SCALE),
    "roomy": lambda seed: preset("roomy", seed=seed, programs=12).first_steps(3),
    "shared": lambda seed: preset("shared", seed=seed),
}


@dataclass(frozen=True, slots=True)
class Contender:
    """A kind of server and how its client behaves; the kind is how the label starts.

    ``seconds`` is about what one run takes on two CPU cores, for the plan alone. ``window`` ends a
    run after so many seconds. The other fields are those of
    :class:`vllm_thunder.replay.client.ClientOptions`.
    """

    label: str
    load: str
    seconds: float
    most_programs: int | None = None
    unlabelled_share: float = 0.0
    ids: bool = True
    release: bool = True
    window: float | None = None

    @property
    def kind(self) -> str:
        return "stock" if self.label.startswith("stock") else "thunder"


@dataclass(frozen=True, slots=True)
class Row:
    """``contenders`` over ``seeds``, pooled. ``judged`` picks the part of the runs that table and
    bars are about. ``script`` tells figures that no replay does."""

    name: str
    title: str
    contenders: tuple[Contender, ...]
    bars: tuple[Bar, ...]
    seeds: tuple[int, ...] = (0, 1, 2)
    judged: Callable[[Runs], Runs] = lambda runs: runs
    script: Script | None = None


def only_unlabelled(runs: Runs) -> Runs:
    """Of every run the programs without an id in the run of the last contender with its seed: the
    same programs for all contenders. Counters of the whole server are left out."""
    *_, mixed = runs.values()
    chosen = [{p.program_id for p in run.programs if not p.labelled} for run in mixed]
    return {
        label: [
            replace(
                run,
                programs=[p for p in run.programs if p.program_id in ids],
                steps=[s for s in run.steps if s.program_id in ids],
                engine={},
                decisions={},
            )
            for run, ids in zip(found, chosen, strict=True)
        ]
        for label, found in runs.items()
    }


def _uncached_in_a_run(summary: Summary) -> float | None:
    return None if summary.uncached_tokens is None else summary.uncached_tokens / summary.runs


def _large_over_small(summary: Summary) -> float | None:
    small, large = summary.small_quarter_wait, summary.large_quarter_wait
    return large / small if small and large is not None else None


def _speed_of_p99(summary: Summary) -> float | None:
    return 1.0 / summary.step_latency_p99 if summary.step_latency_p99 else None


_steps_per_minute = attrgetter("steps_per_minute")
_p99 = attrgetter("step_latency_p99")


def _throughput(
    at_least: float, of: str = "thunder", over: str = "stock", *, every_run: bool = False
) -> ReplayBar:
    return ReplayBar(
        "steps per minute", _steps_per_minute, Limit(at_least=at_least), of, over, every_run
    )


def _tail(at_most: float) -> ReplayBar:
    return ReplayBar("p99 step latency", _p99, Limit(at_most=at_most), over="stock")


def _longest_wait(at_most: float) -> ReplayBar:
    return ReplayBar("longest wait, s", attrgetter("worst_wait"), Limit(at_most=at_most))


_THRASH = (
    Contender("stock", "thrash", seconds=182),
    Contender("thunder", "thrash", seconds=97),
    Contender("stock@6", "thrash", seconds=152, most_programs=6),
)
_NEVER_RELEASES = Contender("thunder-never-releases", "thrash", seconds=105, release=False)
_HEAVY = (
    Contender("stock", "heavy", seconds=61, window=60.0),
    Contender("thunder", "heavy", seconds=61, window=60.0),
)
_TAU = (
    Contender("stock", "tau_airline", seconds=46),
    Contender("thunder", "tau_airline", seconds=30),
)
_SWE = (
    Contender("stock", "sweagent", seconds=97),
    Contender("thunder", "sweagent", seconds=66),
)
_HALF = Contender("thunder-half", "sweagent", seconds=80, unlabelled_share=0.5)
_ROOMY = (
    Contender("stock", "roomy", seconds=8),
    Contender("thunder", "roomy", seconds=8),
    Contender("thunder-no-ids", "roomy", seconds=8, ids=False),
)
_SHARED = (
    Contender("stock", "shared", seconds=13),
    Contender("thunder", "shared", seconds=13),
)

ROWS: tuple[Row, ...] = (
    Row(
        "thrash",
        "24 programs, four times the contexts that fit",
        _THRASH,
        (
            _throughput(1.75),
            _tail(1.1),
            _longest_wait(45.0),
            ReplayBar(
                "mean wait of the programs with the longest quarter of first prompts, over the "
                "shortest quarter's",
                _large_over_small,
                Limit(at_most=1.5),
            ),
            ReplayBar(
                "time per program",
                attrgetter("program_seconds_mean"),
                Limit(at_most=0.5),
                over="stock",
            ),
            ReplayBar(
                "prompt tokens not served from cache, a run",
                _uncached_in_a_run,
                Limit(at_most=275_000),
            ),
            _throughput(1.25, over="stock@6"),
        ),
    ),
    Row(
        "norelease",
        "thrash with clients that never release a program",
        (_THRASH[1], _NEVER_RELEASES),
        (_throughput(0.9, of=_NEVER_RELEASES.label, over="thunder"),),
        seeds=(0, 1),
    ),
    Row(
        "heavy",
        "thrash with tools of up to a minute, its first minute",
        _HEAVY,
        (_throughput(1.0, every_run=True), _longest_wait(_MAX_WAIT)),
    ),
    Row(
        "sweagent",
        "24 SWE-agent runs, KV for a third of them",
        _SWE,
        (_throughput(1.5), _tail(1.0)),
    ),
    Row(
        "mixed",
        "sweagent, ids for half of the programs: the other half",
        (_SWE[0], _HALF),
        (
            ReplayBar(
                "1 / p99 step latency",
                _speed_of_p99,
                Limit(at_least=0.95),
                _HALF.label,
                "stock",
            ),
            ReplayBar(
                "share of prompt tokens from cache",
                attrgetter("cached_share"),
                Limit(at_least=0.95),
                _HALF.label,
                "stock",
            ),
        ),
        seeds=(0, 1),
        judged=only_unlabelled,
    ),
    Row(
        "tau_airline",
        "24 tau-bench airline runs, KV for a third of them",
        _TAU,
        (_throughput(1.5), _tail(1.0)),
    ),
    Row(
        "roomy",
        "12 programs that fit, with ids and without",
        _ROOMY,
        (
            _throughput(0.97),
            _throughput(0.97, of="thunder-no-ids"),
            FactBar("scheduler CPU over step time, with ids", "ids_share", Limit(at_most=0.01)),
            FactBar(
                "scheduler CPU over step time, without ids", "no_ids_share", Limit(at_most=0.01)
            ),
        ),
        seeds=tuple(range(10)),
        script=ROOMY_COST,
    ),
    Row(
        "shared",
        "100 programs that fit because 90 % of each first prompt is shared",
        _SHARED,
        (ReplayBar("pauses", attrgetter("pauses"), Limit(at_most=0)),),
    ),
    Row(
        "scheduler",
        "cost of the scheduler itself: 1,000 programs, 256 running, no model",
        (),
        (FactBar("instructions over AsyncScheduler's", "overhead", Limit(at_most=0.05)),),
        seeds=(),
        script=SCHEDULER_COST,
    ),
)
