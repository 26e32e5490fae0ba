"""How evenly the engines' memory is used while turns wait."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, Self

import aiohttp

from vllm_thunder.replay.client import CallFailed

__all__ = [
    "Imbalance",
    "Reader",
    "Sample",
    "Watch",
    "coordinator_reader",
    "engine_reader",
    "pooled",
]

_SECONDS_FOR_AN_ANSWER = 30.0


@dataclass(frozen=True, slots=True)
class Sample:
    """``seconds`` from the start of the watch. ``imbalance``: the greatest difference between two
    engines' shares of claimed memory, acting programs counted. ``taken``: of each engine the share
    of its memory that a program that comes now cannot have; above 1 where turns wait for memory
    there. ``waiting``: turns that wait for memory."""

    seconds: float
    taken: tuple[float, ...]
    imbalance: float
    waiting: int


@dataclass(frozen=True, slots=True)
class Imbalance:
    """Of the samples in which a turn waited: the mean imbalance in percentage points, the worst,
    and how many there were; and of how many samples."""

    points: float | None
    worst_points: float | None
    while_waiting: int
    samples: int

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> "Imbalance":
        found = [100 * sample.imbalance for sample in samples if sample.waiting > 0]
        return cls(
            points=sum(found) / len(found) if found else None,
            worst_points=max(found, default=None),
            while_waiting=len(found),
            samples=len(samples),
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def pooled(runs: Sequence[Mapping[str, Any]]) -> float | None:
    """Mean points of several runs' :meth:`Imbalance.to_json`, every sample with the same weight."""
    told = [run for run in runs if run["points"] is not None]
    count = sum(run["while_waiting"] for run in told)
    return sum(run["points"] * run["while_waiting"] for run in told) / count if count else None


Reader = Callable[[aiohttp.ClientSession], Awaitable[tuple[tuple[float, ...], float, int]]]


class Watch:
    """Takes a sample every ``interval`` seconds for as long as the block runs. What went wrong with
    reading is raised at its end, as CallFailed."""

    def __init__(self, read: Reader, interval: float):
        self.samples: list[Sample] = []
        self._read = read
        self._interval = interval
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._task is not None
        self._task.cancel()
        (outcome,) = await asyncio.gather(self._task, return_exceptions=True)
        if error is None and isinstance(outcome, Exception):
            raise CallFailed(f"the fleet could not be watched: {outcome}") from outcome

    async def _watch(self) -> None:
        limit = aiohttp.ClientTimeout(total=_SECONDS_FOR_AN_ANSWER)
        began = time.perf_counter()
        async with aiohttp.ClientSession(timeout=limit, raise_for_status=True) as session:
            while True:
                taken, imbalance, waiting = await self._read(session)
                now = time.perf_counter() - began
                self.samples.append(Sample(now, taken, imbalance, waiting))
                await asyncio.sleep(self._interval - now % self._interval)


def coordinator_reader(url: str) -> Reader:
    """What the coordinator says: its own figure, and the turns that it holds."""

    async def read(session: aiohttp.ClientSession) -> tuple[tuple[float, ...], float, int]:
        page = await _json(session, f"{url}/status")
        taken = tuple(
            1 - engine["room_blocks"] / engine["capacity_blocks"]
            for engine in page["engines"]
            if engine["capacity_blocks"] is not None
        )
        return taken, float(page["memory_imbalance"]), int(page["held_turns"])

    return read


def engine_reader(urls: Sequence[str]) -> Reader:
    """The same without a coordinator, from what each engine says of itself; what waits are the
    turns that the engines hold."""
    cursors = dict.fromkeys(urls, "")

    async def one(session: aiohttp.ClientSession, url: str) -> tuple[float, float, int]:
        changes, summary = await asyncio.gather(
            _json(session, f"{url}/programs/changes", after=cursors[url]),
            _json(session, f"{url}/programs/summary"),
        )
        cursors[url] = changes["cursor"]
        memory = changes["memory"]
        capacity = memory["capacity_blocks"]
        taken, claimed = 1 - memory["room_blocks"] / capacity, memory["claimed_blocks"] / capacity
        return taken, claimed, summary["held_turns"]

    async def read(session: aiohttp.ClientSession) -> tuple[tuple[float, ...], float, int]:
        found = await asyncio.gather(*(one(session, url) for url in urls))
        claimed = [share for _, share, _ in found]
        taken = tuple(share for share, _, _ in found)
        return taken, max(claimed) - min(claimed), sum(held for _, _, held in found)

    return read


async def _json(session: aiohttp.ClientSession, url: str, **query: str) -> dict[str, Any]:
    async with session.get(url, params={k: v for k, v in query.items() if v}) as answer:
        found: dict[str, Any] = await answer.json()
    return found
