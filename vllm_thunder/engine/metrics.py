"""Our Prometheus families, built from what the engine cores answer when they are asked."""

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

__all__ = ["HELP", "PREFIX", "ProgramCollector", "Registries"]

#: vLLM's own families start with ``vllm:``.
PREFIX = "vllm_thunder:"

#: Every value that the engine reports, by its name there. A counter's family gets ``_total``.
HELP = {
    "up": "1 if every engine core answered this scrape in time, else 0.",
    "programs": "Programs tracked, by phase and status.",
    "held_turns": "Engine requests held until their program is restored.",
    "unique_blocks": "KV blocks held by exactly one program, resident or not.",
    "shared_blocks": "Resident KV blocks held by several programs, each counted once.",
    "total_blocks": "KV blocks of the GPU pool.",
    "free_blocks": "KV blocks that no running request uses; cached ones included.",
    "longest_wait_seconds": "Longest time that a turn was held since start-up, or is held now.",
    "prefill_tokens_per_second": "Measured rate of prompt computation; 0 before the first one.",
    "turns": "Turns that ended, in whatever way.",
    "pauses": "Times that a program lost its claim on KV-cache memory.",
    "restores": "Times that a waiting program was given memory, its first admission included.",
    "free_restores": "Restores of a paused program whose whole context was still in memory.",
    "programs_created": "Programs that sent their first turn.",
    "programs_released": "Programs that were released by a client.",
    "programs_expired": "Programs that were released after their retention time without a turn.",
    "programs_evicted": "Programs that were released to track a new one.",
    "program_hit_rate_collapses": (
        "Turns that used less than a tenth of their program's context again: something at its head "
        "changes, and the prefix cache cannot help."
    ),
    "evicted_blocks": "Cached KV blocks that were reused for other content, by class.",
    "wait_seconds": "Time for which turns were held.",
}


class _Collector(Protocol):
    def collect(self) -> Iterable[Metric]: ...


class Registries:
    """Several collectors and registries rendered as one, so that one exposition has them all."""

    def __init__(self, *parts: _Collector):
        self._parts = parts

    def collect(self) -> Iterator[Metric]:
        for part in self._parts:
            yield from part.collect()

    def restricted_registry(self, names: Iterable[str]) -> "Registries":
        """Only the samples called ``names``: the ``name[]`` of a scrape's query."""
        return Registries(_Restricted(self, frozenset(names)))


class _Restricted:
    def __init__(self, families: _Collector, names: frozenset[str]):
        self._families = families
        self._names = names

    def collect(self) -> Iterator[Metric]:
        for family in self._families.collect():
            samples = [sample for sample in family.samples if sample.name in self._names]
            if samples:
                restricted = Metric(family.name, family.documentation, family.type, family.unit)
                restricted.samples = samples
                yield restricted


class ProgramCollector:
    """One scrape: ``metrics`` as :func:`vllm_thunder.engine.client.merge_metrics` returns them,
    or None when the engines did not answer, which leaves ``up 0`` alone."""

    def __init__(self, metrics: dict[str, Any] | None):
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        metrics = self._metrics
        up = 0.0 if metrics is None else 1.0
        yield GaugeMetricFamily(PREFIX + "up", HELP["up"], value=up)
        if metrics is None:
            return
        for name, value in metrics["gauges"].items():
            yield GaugeMetricFamily(*_head(name), value=value)
        for name, value in metrics["counters"].items():
            yield CounterMetricFamily(*_head(name), value=value)
        for name, series in metrics["labelled_gauges"].items():
            yield _labelled(GaugeMetricFamily, name, series)
        for name, series in metrics["labelled_counters"].items():
            yield _labelled(CounterMetricFamily, name, series)
        for name, histogram in metrics["histograms"].items():
            yield HistogramMetricFamily(
                *_head(name), buckets=_buckets(histogram), sum_value=histogram["sum"]
            )


def _head(name: str) -> tuple[str, str]:
    return PREFIX + name, HELP[name]


def _labelled(
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
    name: str,
    series: list[tuple[dict[str, str], float]],
) -> Metric:
    labels = list(series[0][0]) if series else []
    family = kind(*_head(name), labels=labels)
    for values, value in series:
        family.add_metric([values[label] for label in labels], value)
    return family


def _buckets(histogram: dict[str, Any]) -> list[tuple[str, float]]:
    """Counts per interval to Prometheus' cumulative buckets."""
    bounds = [*(repr(float(bound)) for bound in histogram["bounds"]), "+Inf"]
    total, buckets = 0.0, []
    for bound, count in zip(bounds, histogram["counts"], strict=True):
        total += count
        buckets.append((bound, total))
    return buckets
