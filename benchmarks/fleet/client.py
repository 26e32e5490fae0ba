"""Carries a replay's calls to several servers."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks.fleet.routers import Router
from vllm_thunder.replay.client import ChatClient, ClientOptions
from vllm_thunder.replay.records import StepRecord

__all__ = ["FleetClient"]


class FleetClient:
    """Sends each call to the server that ``router`` chooses of ``targets``, and a release to all
    that its program has called. Counters and summaries are sums over ``engines``.

    The targets are the engines themselves, or one coordinator in front of them. Use as an async
    context manager.
    """

    def __init__(
        self,
        options: ClientOptions,
        targets: Sequence[str],
        engines: Sequence[str],
        router: Router,
    ):
        self.options = options
        self.model = ""
        #: Times that a program called another target than the time before.
        self.moves = 0
        #: Calls of each target that ended.
        self.calls = [0] * len(targets)
        self._router = router
        self._loads = [0] * len(targets)
        self._last: dict[str, int] = {}
        self._called: dict[str, set[int]] = {}
        self._targets = [ChatClient(replace(options, base_url=url)) for url in targets]
        self._engines = [ChatClient(replace(options, base_url=url)) for url in engines]
        self._open = contextlib.AsyncExitStack()

    async def __aenter__(self) -> "FleetClient":
        async with contextlib.AsyncExitStack() as opening:
            for client in (*self._targets, *self._engines):
                await opening.enter_async_context(client)
            self._open = opening.pop_all()
        self.model = self._targets[0].model
        return self

    async def __aexit__(self, *_exception: object) -> None:
        await self._open.aclose()

    async def step(
        self,
        record: StepRecord,
        messages: list[dict[str, str]],
        output_tokens: int,
        *,
        final: bool,
    ) -> str:
        """See :meth:`ChatClient.step`."""
        program_id = record.program_id
        index = self._router.choose(program_id, messages, self._loads)
        self.moves += self._last.get(program_id, index) != index
        self._last[program_id] = index
        self._called.setdefault(program_id, set()).add(index)
        self._loads[index] += 1
        try:
            return await self._targets[index].step(record, messages, output_tokens, final=final)
        finally:
            self._loads[index] -= 1
            self.calls[index] += 1

    async def release(self, program_id: str) -> str | None:
        """See :meth:`ChatClient.release`."""
        called = sorted(self._called.get(program_id, ()))
        answers = await asyncio.gather(*(self._targets[i].release(program_id) for i in called))
        return "; ".join(answer for answer in answers if answer is not None) or None

    async def counters(self) -> dict[str, float]:
        """See :meth:`ChatClient.counters`."""
        total: Counter[str] = Counter()
        for found in await asyncio.gather(*(engine.counters() for engine in self._engines)):
            total.update(found)
        return dict(total)

    async def summary(self) -> dict[str, Any] | None:
        """The sums of the engines' numbers; None if one has no summary."""
        found = await asyncio.gather(*(engine.summary() for engine in self._engines))
        total: Counter[str] = Counter()
        for summary in found:
            if summary is None:
                return None
            total.update(
                {
                    name: value
                    for name, value in summary.items()
                    if isinstance(value, int | float) and not isinstance(value, bool)
                }
            )
        return dict(total)
