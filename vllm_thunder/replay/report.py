"""From records to numbers: one summary a kind, as a table and as JSON.

Several runs of one kind (seeds) are pooled: steps and programs are put together, so that a
mean or a quantile is over all of them, and rates are sums over sums.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from rich.table import Table

from vllm_thunder.replay.records import Replay, StepRecord

__all__ = [
    "Summary",
    "ratios",
    "recomputed_tokens",
    "run_table",
    "summarize",
    "summary_table",
    "to_json",
]


@dataclass(frozen=True, slots=True)
class Summary:
    """What one kind of server made of a workload. Times are seconds.

    - ``steps_per_minute``: finished steps over the time from the first call's start to the last
      call's end.
    - ``step_latency_*``: finished steps only; see StepRecord for what is in a step latency.
    - ``program_seconds_mean``: over complete programs, from the start of the run (all programs
      are offered then) to the end of the last call.
    - ``hit_rate``: vLLM's ``prefix_cache_hits`` over ``prefix_cache_queries``, in tokens;
      ``cached_share``: the same as the answers tell it, cached over all prompt tokens.
    - ``prompt_tokens`` of finished steps; of them ``new_tokens`` were in no earlier call of their
      program, and ``uncached_tokens`` did not come from the cache.
    - ``recomputed_tokens``: see :func:`recomputed_tokens`.
    - ``worst_wait``: the longest time to a first token, and for calls that got none, failed or cut
      short, the time for which they had waited.
    - ``small_quarter_wait``, ``large_quarter_wait``: mean time to the first token over the steps of
      the quarter of the programs with the shortest and with the longest first prompts, of each run.

    A value is None where the server does not tell what it takes.
    """

    kind: str
    runs: int
    seconds: float
    programs: int
    failed_programs: int
    steps: int
    errors: int
    steps_per_minute: float
    step_latency_mean: float | None
    step_latency_p50: float | None
    step_latency_p99: float | None
    first_token_mean: float | None
    worst_wait: float | None
    small_quarter_wait: float | None
    large_quarter_wait: float | None
    program_seconds_mean: float | None
    hit_rate: float | None
    cached_share: float | None
    prompt_tokens: int | None
    new_tokens: int | None
    uncached_tokens: int | None
    recomputed_tokens: int | None
    preemptions: int | None
    pauses: int | None
    restores: int | None
    free_restores: int | None


def summarize(kind: str, replays: Sequence[Replay]) -> Summary:
    """The pooled numbers of one kind's runs; raises ValueError without a run."""
    if not replays:
        raise ValueError(f"{kind}: no run to summarize")
    programs = [program for replay in replays for program in replay.programs]
    finished = [step for replay in replays for step in replay.steps if step.error is None]
    latencies = [step.latency_seconds for step in finished]
    waits = [s.first_token_seconds for s in finished if s.first_token_seconds is not None]
    longest = max(
        (
            s.latency_seconds if s.first_token_seconds is None else s.first_token_seconds
            for replay in replays
            for s in replay.steps
        ),
        default=None,
    )
    quarters = [_quarter_waits(replay.steps) for replay in replays]
    seconds = sum(replay.seconds for replay in replays)
    told = [s for s in finished if s.cached_tokens is not None and s.prompt_tokens is not None]
    recomputed = [recomputed_tokens(replay.steps) for replay in replays]
    return Summary(
        kind=kind,
        runs=len(replays),
        seconds=seconds,
        programs=len(programs),
        failed_programs=sum(program.error is not None for program in programs),
        steps=len(finished),
        errors=sum(len(replay.errors) for replay in replays),
        steps_per_minute=60.0 * len(finished) / seconds if seconds > 0 else 0.0,
        step_latency_mean=_mean(latencies),
        step_latency_p50=_quantile(latencies, 0.5),
        step_latency_p99=_quantile(latencies, 0.99),
        first_token_mean=_mean(waits),
        worst_wait=longest,
        small_quarter_wait=_mean([wait for small, _ in quarters for wait in small]),
        large_quarter_wait=_mean([wait for _, large in quarters for wait in large]),
        program_seconds_mean=_mean([p.ended_at for p in programs if p.complete]),
        hit_rate=_over(
            _total(replays, "vllm:prefix_cache_hits_total"),
            _total(replays, "vllm:prefix_cache_queries_total"),
        ),
        cached_share=_over(
            float(sum(s.cached_tokens or 0 for s in told)),
            float(sum(s.prompt_tokens or 0 for s in told)),
        ),
        prompt_tokens=sum(s.prompt_tokens or 0 for s in told) if told else None,
        new_tokens=_sum_known([_new_tokens(replay.steps) for replay in replays]),
        uncached_tokens=sum((s.prompt_tokens or 0) - (s.cached_tokens or 0) for s in told)
        if told
        else None,
        recomputed_tokens=_sum_known(recomputed),
        preemptions=_whole(_total(replays, "vllm:num_preemptions_total")),
        pauses=_sum_known([replay.decisions.get("pauses") for replay in replays]),
        restores=_sum_known([replay.decisions.get("restores") for replay in replays]),
        free_restores=_sum_known([replay.decisions.get("free_restores") for replay in replays]),
    )


def recomputed_tokens(steps: Sequence[StepRecord]) -> int | None:
    """Tokens that were computed once more than they had to be; None where answers don't tell.

    For each step after a program's first, what the server had already computed for it is the
    step before: that prompt and its answer. Whatever of that did not come from the cache was
    computed again: ``max(0, prompt[i-1] + completion[i-1] - cached[i])``. This counts up to one
    block and one token a step that no cache of full blocks can serve.
    """
    total, told = 0, False
    for calls in _finished_by_program(steps):
        for before, after in pairwise(calls):
            if before.prompt_tokens is None or after.cached_tokens is None:
                continue
            told = True
            context = before.prompt_tokens + (before.completion_tokens or 0)
            total += max(0, context - after.cached_tokens)
    return total if told else None


def _finished_by_program(steps: Sequence[StepRecord]) -> list[list[StepRecord]]:
    """The finished steps of each program in their order."""
    by_program: dict[str, list[StepRecord]] = {}
    for step in sorted(steps, key=lambda step: step.step):
        if step.error is None:
            by_program.setdefault(step.program_id, []).append(step)
    return list(by_program.values())


def _new_tokens(steps: Sequence[StepRecord]) -> int | None:
    total, told = 0, False
    for calls in _finished_by_program(steps):
        known = 0
        for call in calls:
            if call.prompt_tokens is None:
                continue
            told = True
            total += max(0, call.prompt_tokens - known)
            known = call.prompt_tokens + (call.completion_tokens or 0)
    return total if told else None


def _quarter_waits(steps: Sequence[StepRecord]) -> tuple[list[float], list[float]]:
    """Times to first tokens of the programs with the shortest and the longest first prompts."""
    programs = [
        calls
        for calls in _finished_by_program(steps)
        if calls[0].step == 0 and calls[0].prompt_tokens is not None
    ]
    programs.sort(key=lambda calls: calls[0].prompt_tokens or 0)
    count = len(programs) // 4

    def waits(chosen: Sequence[list[StepRecord]]) -> list[float]:
        found = [call.first_token_seconds for calls in chosen for call in calls]
        return [seconds for seconds in found if seconds is not None]

    return waits(programs[:count]), waits(programs[len(programs) - count :])


def ratios(summary: Summary, base: Summary) -> dict[str, float | None]:
    """``summary`` over ``base`` for the three numbers that the project's claims are about."""
    return {
        name: _over(getattr(summary, name), getattr(base, name))
        for name in ("steps_per_minute", "step_latency_p99", "program_seconds_mean")
    }


def summary_table(summaries: Sequence[Summary], title: str) -> Table:
    """One column a kind, one row a number."""
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for summary in summaries:
        table.add_column(summary.kind, justify="right", style="bold")
    for label, name, digits in _ROWS:
        values = [getattr(summary, name) for summary in summaries]
        if any(value is not None for value in values):
            table.add_row(label, *(_text(value, digits) for value in values))
    return table


def run_table(replays: Sequence[Replay]) -> Table:
    """One row a run."""
    table = Table(title="runs", title_justify="left")
    for heading in ("", "seed", "steps/min", "p99 (s)", "longest wait (s)", "pauses", "errors"):
        table.add_column(heading, justify="right")
    for replay in replays:
        summary = summarize(replay.kind, [replay])
        table.add_row(
            replay.kind,
            str(replay.about["workload"]["seed"]),
            f"{summary.steps_per_minute:.1f}",
            _text(summary.step_latency_p99, 1),
            _text(summary.worst_wait, 1),
            _text(summary.pauses, 0),
            str(summary.errors),
        )
    return table


def to_json(
    summaries: Sequence[Summary], replays: Sequence[Replay], base_kind: str | None
) -> dict[str, Any]:
    """Everything a report says, with the machine of each run; ``base_kind`` gives the ratios."""
    base = next((s for s in summaries if s.kind == base_kind), None)
    return {
        "summaries": [asdict(summary) for summary in summaries],
        "ratios": {}
        if base is None
        else {s.kind: ratios(s, base) for s in summaries if s.kind != base_kind},
        "runs": [
            {
                "kind": replay.kind,
                "seconds": replay.seconds,
                "worst_wait": summarize(replay.kind, [replay]).worst_wait,
                "errors": replay.errors,
                **replay.about,
            }
            for replay in replays
        ],
    }


_ROWS = (
    ("runs", "runs", 0),
    ("steps finished", "steps", 0),
    ("steps per minute", "steps_per_minute", 1),
    ("step latency, mean (s)", "step_latency_mean", 2),
    ("step latency, p99 (s)", "step_latency_p99", 2),
    ("time to first token, mean (s)", "first_token_mean", 2),
    ("worst wait for a first token (s)", "worst_wait", 2),
    ("  mean wait, shortest prompts (s)", "small_quarter_wait", 2),
    ("  mean wait, longest prompts (s)", "large_quarter_wait", 2),
    ("time per program, mean (s)", "program_seconds_mean", 1),
    ("prefix cache hit rate", "hit_rate", 3),
    ("prompt tokens", "prompt_tokens", 0),
    ("  of them new", "new_tokens", 0),
    ("  not served from cache", "uncached_tokens", 0),
    ("recomputed tokens", "recomputed_tokens", 0),
    ("preemptions", "preemptions", 0),
    ("pauses", "pauses", 0),
    ("restores", "restores", 0),
    ("  of them without recompute", "free_restores", 0),
    ("programs not finished", "failed_programs", 0),
    ("errors", "errors", 0),
)


def _text(value: float | int | None, digits: int) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None


def _quantile(values: Sequence[float], q: float) -> float | None:
    """Linear between the two nearest values, numpy's default."""
    return float(np.quantile(values, q)) if values else None


def _total(replays: Sequence[Replay], counter: str) -> float | None:
    if any(counter not in replay.engine for replay in replays):
        return None
    return sum(replay.engine[counter] for replay in replays)


def _sum_known(values: Sequence[float | None]) -> int | None:
    known = [value for value in values if value is not None]
    return int(sum(known)) if len(known) == len(values) else None


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


def _over(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None
