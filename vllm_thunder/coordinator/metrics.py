"""The coordinator's Prometheus families."""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client import Counter as CounterFamily
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from vllm_thunder.coordinator.describe import (
    capacity_known,
    describe_engine,
    fleet_imbalance,
    phase_counts,
)
from vllm_thunder.coordinator.dispatcher import Dispatcher
from vllm_thunder.coordinator.engines.engines import Engines
from vllm_thunder.coordinator.fleet.backend import Backend, Health
from vllm_thunder.coordinator.fleet.counts import meaning_of
from vllm_thunder.coordinator.proxy.exchange import Exchange

__all__ = ["PREFIX", "Metrics"]

PREFIX = "vllm_thunder_coordinator:"

_SECONDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0)


class Metrics:
    """``registry`` renders all of them; what is a state is read when it is scraped."""

    def __init__(self, dispatcher: Dispatcher, engines: Engines, clock: Callable[[], float]):
        self._dispatcher = dispatcher
        self._fleet = dispatcher.fleet
        self._engines = engines
        self._clock = clock
        self.registry = registry = CollectorRegistry()
        self._turns = CounterFamily(
            PREFIX + "requests",
            "Model calls that ended, by how; without_program: those that named none.",
            ["outcome", "without_program"],
            registry=registry,
        )
        self._queue = Histogram(
            PREFIX + "queue_seconds",
            "Time for which a turn was held here.",
            buckets=_SECONDS,
            registry=registry,
        )
        self._first_byte = Histogram(
            PREFIX + "first_byte_seconds",
            "Time from sending a model call to an engine to the first byte of its answer.",
            buckets=_SECONDS,
            registry=registry,
        )
        self._total = Histogram(
            PREFIX + "request_seconds",
            "Time from the arrival of a model call to its end.",
            buckets=_SECONDS,
            registry=registry,
        )
        self._again = CounterFamily(
            PREFIX + "requests_sent_again",
            "Times that a model call was sent to another engine because one did not answer it.",
            registry=registry,
        )
        self._passed_on = CounterFamily(
            PREFIX + "requests_passed_on",
            "Requests that another replica answered, by how they ended; nothing else counts them.",
            ["outcome"],
            registry=registry,
        )
        registry.register(self)

    def ended(self, exchange: Exchange) -> None:
        """A request ended; only what is about model calls is counted."""
        if exchange.replica is not None:
            self._passed_on.labels(str(exchange.outcome)).inc()
            return
        if not exchange.model_call:
            return
        labelled = exchange.program_id is not None
        self._turns.labels(str(exchange.outcome), "false" if labelled else "true").inc()
        if labelled:
            self._queue.observe(exchange.queue_seconds)
        if exchange.first_byte_seconds is not None:
            self._first_byte.observe(exchange.first_byte_seconds)
        self._total.observe(exchange.total_seconds)
        if exchange.attempts > 1:
            self._again.inc(exchange.attempts - 1)

    def collect(self) -> Iterator[Metric]:
        """What is read at a scrape."""
        fleet, now = self._fleet, self._clock()
        yield _gauge(
            "capacity_known",
            "1 if every engine has said how much memory it has, else 0.",
            float(capacity_known(fleet, self._engines)),
        )
        health = Counter(backend.health for backend in fleet.backends.values())
        by_health = GaugeMetricFamily(
            PREFIX + "engines", "Engines (data-parallel ranks), by health.", labels=["health"]
        )
        for state in Health:
            by_health.add_metric([str(state)], health[state])
        by_health.add_metric(["unreachable"], len(self._engines.unreachable))
        yield by_health
        programs = GaugeMetricFamily(
            PREFIX + "programs",
            "Programs tracked: with a turn at an engine, with none, with one that waits here.",
            labels=["phase"],
        )
        for phase, count in phase_counts(fleet).items():
            programs.add_metric([phase], count)
        yield programs
        yield _gauge("held_turns", "Model calls that wait here.", fleet.queue.held_turns)
        yield _gauge("held_bytes", "Bytes of the bodies of these.", fleet.queue.held_bytes)
        yield _gauge(
            "longest_wait_seconds",
            "How long the turn has waited that waits the longest.",
            fleet.queue.longest_wait(now),
        )
        yield _gauge(
            "memory_imbalance",
            "Greatest difference between two engines' shares of claimed memory.",
            fleet_imbalance(fleet),
        )
        yield _gauge(
            "decision_seconds",
            "Time that the last decision took.",
            self._dispatcher.decision_seconds,
        )
        for name, meaning in meaning_of.items():
            yield CounterMetricFamily(PREFIX + name, meaning, value=getattr(fleet.counts, name))
        yield from _per_engine(list(fleet.backends.values()))


def _gauge(name: str, help: str, value: float) -> Metric:
    return GaugeMetricFamily(PREFIX + name, help, value=value)


def _per_engine(backends: list[Backend]) -> Iterator[Metric]:
    described: list[dict[str, Any]] = [describe_engine(backend) for backend in backends]
    for name, help in (
        ("capacity_blocks", "KV blocks of an engine; absent while they are not known."),
        ("room_blocks", "KV blocks of an engine that nobody claims."),
        ("turns_in_flight", "Turns at an engine."),
    ):
        family = GaugeMetricFamily(PREFIX + "engine_" + name, help, labels=["engine"])
        for engine in described:
            if engine[name] is not None:
                family.add_metric([engine["id"]], engine[name])
        yield family
