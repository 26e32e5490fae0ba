"""What the fleet has to show, and the bars.

- ``real``: three engines with the tiny model on the CPU, one thread each. They share the cores, so
  throughput is not judged: what is computed again is, and how evenly memory is used.
- ``paced``: three engines with :mod:`benchmarks.fleet.paced_executor` in place of the model. Steps
  take the time that they take an engine alone, so throughput can be judged.
"""

from dataclasses import dataclass
from operator import attrgetter

from benchmarks.fleet.routers import One, PrefixHash, Router, Sticky
from benchmarks.suite.bars import Bar, FactBar, Limit, ReplayBar

__all__ = ["PACED", "REAL", "ROWS", "Contender", "Row", "Setup"]


@dataclass(frozen=True, slots=True)
class Setup:
    """How all engines of a row, and the coordinator, are started: further arguments, and
    variables for the engines."""

    name: str
    engine_arguments: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    coordinator_arguments: tuple[str, ...] = ()


#: Three engines that share the cores of one take three times as long for everything; so the bound
#: on waits is three times its default, in the engines and in the coordinator.
_SHARED_MAX_WAIT = "180"

REAL = Setup(
    "real",
    engine_arguments=(
        *("--thunder-max-wait", _SHARED_MAX_WAIT),
        # vLLM's default for CPUs has an engine core spin while its worker computes.
        "--distributed-executor-backend",
        "vllm.v1.executor.uniproc_executor.UniProcExecutor",
    ),
    # vLLM would give each engine a thread for every core, and they spin while they wait for each
    # other.
    environment=(("VLLM_CPU_OMP_THREADS_BIND", "nobind"), ("OMP_NUM_THREADS", "1")),
    # A step with a full chunk of a long prompt takes up to ten seconds when all three compute.
    coordinator_arguments=("--engine-timeout", "60", "--max-wait", _SHARED_MAX_WAIT),
)
PACED = Setup(
    "paced",
    engine_arguments=(
        "--distributed-executor-backend",
        "benchmarks.fleet.paced_executor.PacedExecutor",
    ),
)


@dataclass(frozen=True, slots=True)
class Contender:
    """Who chooses the engine. ``kind`` of the engines: ``thunder`` or ``stock``; ``seconds`` is
    about what one run takes on two CPU cores, for the plan alone."""

    label: str
    seconds: float
    kind: str = "thunder"

    @property
    def router(self) -> Router:
        match self.label.removeprefix("stock-"):
            case "coordinator":
                return One()
            case "prefix-hash":
                return PrefixHash()
            case "sticky":
                return Sticky()
            case label:
                raise ValueError(f"{label!r} chooses no engine")

    @property
    def coordinated(self) -> bool:
        return self.label == "coordinator"


@dataclass(frozen=True, slots=True)
class Row:
    """``contenders`` over ``seeds``, pooled."""

    name: str
    title: str
    setup: Setup
    contenders: tuple[Contender, ...]
    bars: tuple[Bar, ...]
    seeds: tuple[int, ...] = (0, 1)


_IMBALANCE = FactBar(
    "coordinator: mean memory imbalance while turns wait, percentage points",
    "imbalance_points",
    Limit(at_most=10.0),
)


def _faster(at_least: float, over: str) -> ReplayBar:
    return ReplayBar(
        "steps per minute",
        attrgetter("steps_per_minute"),
        Limit(at_least=at_least),
        "coordinator",
        over,
    )


ROWS: tuple[Row, ...] = (
    Row(
        "paced",
        "72 programs with skewed lengths on three engines without a model",
        PACED,
        (
            Contender("coordinator", seconds=140),
            Contender("sticky", seconds=185),
            Contender("prefix-hash", seconds=140),
            Contender("stock-sticky", seconds=270, kind="stock"),
            Contender("stock-prefix-hash", seconds=240, kind="stock"),
        ),
        (_faster(1.3, "sticky"), _faster(1.5, "prefix-hash"), _IMBALANCE),
    ),
    Row(
        "real",
        "72 programs with skewed lengths on three engines that share the cores",
        REAL,
        (Contender("coordinator", seconds=330), Contender("sticky", seconds=420)),
        (
            ReplayBar(
                "recomputed tokens",
                attrgetter("recomputed_tokens"),
                Limit(at_most=0.6),
                "coordinator",
                "sticky",
            ),
            _IMBALANCE,
        ),
    ),
)
