"""Asks the engine cores about programs, and makes one answer of what all ranks say."""

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

__all__ = [
    "EnginePrograms",
    "FreshAnswer",
    "merge_metrics",
    "merge_programs",
    "merge_releases",
    "merge_summaries",
    "merge_tools",
]

#: How the fields of a program known to several ranks become one; names that are missing here are
#: the same on every rank.
_ADDED = (
    "unique_blocks",
    "shared_blocks",
    "resident_blocks",
    "turns_in_flight",
    "held_turns",
    "turns",
    "pauses",
    "restores",
)
_LARGEST = ("context_tokens", "waited_seconds", "longest_wait_seconds")
_SMALLEST = ("idle_seconds", "priority")

#: Programs that one engine call describes when all are wanted: a rank does not step meanwhile.
_ALL_BY = 1000

#: While a question is open it is looked this often (seconds) whether its engine core is alive.
_ALIVE_SECONDS = 1.0

#: Summary and metric values that do not add up over ranks.
_NOT_ADDED = {"longest_wait_seconds": max}


#: Values of one metric by their labels.
_Series = list[list[Any]]


class EnginePrograms:
    """The programs inside the engine cores of one ``EngineClient`` (vLLM's ``AsyncLLM``).

    Every call is answered between two engine steps. Nothing is cached here, so that every API
    server tells the same.
    """

    def __init__(self, engine_client: Any):
        self._core = engine_client.engine_core

    async def call(self, op: str, *args: Any) -> list[Any]:
        """The answers of ``EngineCore.programs(op, *args)``, one per data-parallel rank.

        Raises vLLM's EngineDeadError when an engine core is gone.
        """
        answers: list[Any] = await self._while_alive(
            self._core.call_utility_all_async("programs", op, *args)
        )
        return answers

    async def release(self, program_id: str) -> dict[str, Any]:
        """End a program: at once, or when its turns in flight have ended."""
        return merge_releases(await self.call("release", program_id))

    async def get(self, program_id: str) -> dict[str, Any] | None:
        """One program, or None when no rank knows it."""
        known = [found for found in await self.call("get", program_id) if found is not None]
        return _merge_program(known) if known else None

    async def tool(self, program_id: str, tool_name: str) -> dict[str, Any]:
        """The program has begun to run a tool after its turn."""
        return merge_tools(await self.call("tool", program_id, tool_name))

    async def page(self, after: str, limit: int) -> tuple[list[dict[str, Any]], str | None]:
        """At most ``limit`` programs whose ids come after ``after`` (as Python compares text; ""
        comes before all), in the order of their ids, and the ``after`` of the next page, or None.

        The order of ids is the one that all ranks agree on, and a page is right whichever
        programs have come and gone since the page before. Each rank is asked for the first
        programs of that order, one more than wanted: it tells whether there are more.
        """
        known = merge_programs(await self.call("list", after, str(limit + 1)))
        programs = sorted(known, key=lambda program: program["program_id"])
        if len(programs) <= limit:
            return programs, None
        return programs[:limit], programs[limit - 1]["program_id"]

    async def summary(self) -> dict[str, Any]:
        """Totals over all programs and ranks, and how many ``ranks`` there are."""
        summaries = await self.call("summary")
        if len(summaries) == 1:
            return {**summaries[0], "ranks": 1}
        merged = merge_summaries(summaries, await self._all())
        return {**merged, "ranks": len(summaries)}

    async def _all(self) -> list[dict[str, Any]]:
        programs, after = await self.page("", _ALL_BY)
        while after is not None:
            page, after = await self.page(after, _ALL_BY)
            programs += page
        return programs

    @property
    def ranks(self) -> int:
        """Data-parallel ranks that this server sends requests to."""
        return len(self._core.core_engines)

    async def changes(self, rank: int, after: str, wait: float) -> bytes:
        """What has changed on one rank: an :class:`~vllm_thunder.program.report.EngineReport` in
        JSON. The rank answers when there is something, after ``wait`` seconds at the latest.

        Raises vLLM's EngineDeadError when an engine core is gone, also while this waits.
        """
        core = self._core
        report: bytes = await self._while_alive(
            core._call_utility_async(
                "programs", "changes", after, str(wait), engine=core.core_engines[rank]
            )
        )
        return report

    async def metrics(self) -> dict[str, Any]:
        """What :class:`vllm_thunder.engine.metrics.ProgramCollector` renders."""
        return merge_metrics(await self.call("metrics"))

    async def end_turn(self, program_id: str, turn_id: str) -> None:
        """The HTTP request of a turn that fans out is over."""
        await self.call("turn_end", program_id, turn_id)

    async def _while_alive(self, question: Coroutine[Any, Any, Any]) -> Any:
        """vLLM leaves a call open whose engine core has died, and with it the client and a server
        that is shutting down."""
        asked = asyncio.ensure_future(question)
        try:
            while not (await asyncio.wait({asked}, timeout=_ALIVE_SECONDS))[0]:
                self._core.ensure_alive()
            return asked.result()
        finally:
            asked.cancel()


class FreshAnswer:
    """Asks with a time limit, since an engine may be deep in a long step.

    A question that timed out stays open and is not asked again; callers that overlap share one.
    """

    def __init__(self, ask: Callable[[], Coroutine[Any, Any, Any]], limit: float):
        self._ask = ask
        self._limit = limit
        self._pending: asyncio.Task[Any] | None = None

    async def get(self) -> Any:
        """The answer. Raises TimeoutError after ``limit`` seconds, or what the question raised."""
        if self._pending is None or self._pending.done():
            self._pending = asyncio.create_task(self._ask())
            self._pending.add_done_callback(_retrieve)
        return await asyncio.wait_for(asyncio.shield(self._pending), self._limit)


def _retrieve(task: asyncio.Task[Any]) -> None:
    """Mark the exception as seen: everybody may have stopped waiting."""
    if not task.cancelled():
        task.exception()


def merge_releases(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Released, or waiting for turns to end, where any rank says so."""
    return {
        "program_id": answers[0]["program_id"],
        "released": any(answer["released"] for answer in answers),
        "pending": any(answer["pending"] for answer in answers),
    }


def merge_tools(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Known where any rank knows the program."""
    return {
        "program_id": answers[0]["program_id"],
        "known": any(answer["known"] for answer in answers),
    }


def merge_programs(lists: Sequence[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """One record per program id."""
    if len(lists) == 1:
        return lists[0]
    by_id: dict[str, list[dict[str, Any]]] = {}
    for programs in lists:
        for program in programs:
            by_id.setdefault(program["program_id"], []).append(program)
    return [_merge_program(records) for records in by_id.values()]


def _merge_program(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Blocks and turns add up; it is REASONING where any rank is, and its status is that of the
    rank that has its turns, PAUSED before ACTIVE where several have. What tells of its last turns
    is of the rank that had one last."""
    if len(records) == 1:
        return records[0]
    reasoning = [record for record in records if record["phase"] == "REASONING"]
    states = {record["status"] for record in reasoning or records}
    waiting = max(records, key=lambda r: (r["wait"] is not None, r["waited_seconds"]))
    latest_first = sorted(records, key=lambda record: record["idle_seconds"])
    deadlines = [r["deadline_seconds"] for r in records if r["deadline_seconds"] is not None]
    merged = dict(records[0])
    merged.update({name: sum(record[name] for record in records) for name in _ADDED})
    merged.update({name: max(record[name] for record in records) for name in _LARGEST})
    merged.update({name: min(record[name] for record in records) for name in _SMALLEST})
    for name in ("parent_id", "group"):
        merged[name] = next((r[name] for r in records if r[name] is not None), None)
    merged["phase"] = "REASONING" if reasoning else "ACTING"
    merged["status"] = next(s for s in ("PAUSED", "ACTIVE", "TERMINATED") if s in states)
    merged["wait"] = waiting["wait"]
    merged["deadline_seconds"] = min(deadlines, default=None)
    merged["children"] = sorted({child for record in records for child in record["children"]})
    merged["tool"] = latest_first[0]["tool"]
    rates = (record["hit_rate"] for record in latest_first)
    merged["hit_rate"] = next((rate for rate in rates if rate is not None), None)
    return merged


def merge_summaries(
    summaries: Sequence[dict[str, Any]], programs: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Numbers add up; programs are counted from ``programs``, where each stands once."""
    merged: dict[str, Any] = {}
    for name, value in summaries[0].items():
        values = [summary[name] for summary in summaries]
        if isinstance(value, bool):
            merged[name] = all(values)
        elif isinstance(value, int | float):
            merged[name] = _NOT_ADDED.get(name, sum)(values)
        elif isinstance(value, dict):
            merged[name] = {key: sum(each[key] for each in values) for key in value}
        else:
            merged[name] = value
    merged["programs"] = len(programs)
    for name, field in (("by_phase", "phase"), ("by_status", "status")):
        counts = Counter(program[field] for program in programs)
        merged[name] = {key: counts[key] for key in summaries[0][name]}
    return merged


def merge_metrics(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Sums over ranks, except waits, where the longest counts."""
    if len(answers) == 1:
        return answers[0]
    merged: dict[str, Any] = {}
    for kind in ("gauges", "counters"):
        merged[kind] = {
            name: _NOT_ADDED.get(name, sum)([answer[kind][name] for answer in answers])
            for name in answers[0][kind]
        }
    for kind in ("labelled_gauges", "labelled_counters"):
        merged[kind] = {
            name: _add_labelled([answer[kind][name] for answer in answers])
            for name in answers[0][kind]
        }
    merged["histograms"] = {
        name: _add_histograms([answer["histograms"][name] for answer in answers])
        for name in answers[0]["histograms"]
    }
    return merged


def _add_labelled(families: Sequence[_Series]) -> _Series:
    totals: dict[tuple[tuple[str, str], ...], float] = {}
    for family in families:
        for labels, value in family:
            key = tuple(sorted(labels.items()))
            totals[key] = totals.get(key, 0) + value
    return [[dict(key), value] for key, value in totals.items()]


def _add_histograms(histograms: Sequence[dict[str, Any]]) -> dict[str, Any]:
    bounds = histograms[0]["bounds"]
    if any(histogram["bounds"] != bounds for histogram in histograms):
        raise ValueError("ranks report different histogram bounds")
    return {
        "bounds": bounds,
        "counts": [sum(counts) for counts in zip(*(h["counts"] for h in histograms), strict=True)],
        "sum": sum(histogram["sum"] for histogram in histograms),
    }
