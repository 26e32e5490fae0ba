"""Engines that know no programs: the coordinator keeps their books and asks for the rest."""

import asyncio
from collections.abc import Callable
from functools import partial

from vllm_thunder.coordinator.dispatcher import Dispatcher
from vllm_thunder.coordinator.engines.client import EngineClient, EngineError
from vllm_thunder.coordinator.engines.feed import LostAnswers
from vllm_thunder.coordinator.engines.stock_metrics import (
    EngineFacts,
    FactsError,
    sglang_facts,
    vllm_facts,
)
from vllm_thunder.coordinator.fleet.backend import Backend
from vllm_thunder.coordinator.logical.engine import LogicalEngine
from vllm_thunder.program.config import ThunderConfig
from vllm_thunder.program.turn import Turn

__all__ = ["StockEngines", "engine_facts"]

#: Seconds between two questions to an engine that says nothing on its own.
_ASK_SECONDS = 1.0


class StockEngines:
    """The books of every such engine, told of what is sent to it and of what comes back.

    ``host_cache_tokens``: what each keeps beside GPU memory, and may be claimed as well.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        config: ThunderConfig,
        host_cache_tokens: int,
        clock: Callable[[], float],
    ):
        self._host_cache_tokens = host_cache_tokens
        self._dispatcher = dispatcher
        self._config = config
        self._clock = clock
        self._books: dict[Backend, LogicalEngine] = {}
        self._timers: dict[Backend, asyncio.Handle] = {}

    async def follow(self, backend: Backend, client: EngineClient) -> None:
        """Until the engine cannot be followed any more: raises EngineError then."""
        answers = LostAnswers(client)
        try:
            while True:
                try:
                    facts = await _facts_of(backend, client)
                except EngineError as error:
                    await answers.lost(error)
                else:
                    answers.came()
                    if facts.capacity_blocks is not None:
                        self._books_of(backend, facts).queue_told(facts.waiting or 0)
                        self._report(backend)
                await asyncio.sleep(_ASK_SECONDS)
        finally:
            self._forget(backend)

    def sent(self, backend: Backend, turn: Turn | None, request_id: str, tokens: float) -> None:
        """A model call was sent to the engine; ``turn``: None for one without a program."""
        books = self._books.get(backend)
        if books is not None:
            if turn is None:
                books.request_sent(request_id, round(tokens), self._clock())
            else:
                books.turn_sent(turn, round(tokens), self._clock())
            self._report_soon(backend)

    def first_byte(self, backend: Backend, request_id: str) -> None:
        """The first byte of a streamed answer came."""
        books = self._books.get(backend)
        if books is not None:
            books.first_byte(request_id, self._clock())

    def ended(
        self, backend: Backend, request_id: str, context_tokens: int | None, output: int | None
    ) -> None:
        """A model call ended; tokens as of :meth:`LogicalEngine.turn_ended`."""
        books = self._books.get(backend)
        if books is not None:
            books.turn_ended(request_id, context_tokens, self._clock(), output)
            self._report_soon(backend)

    def released(self, backend: Backend, program_id: str) -> None:
        """A program has ended, or has moved away."""
        books = self._books.get(backend)
        if books is not None:
            books.release(program_id)
            self._report_soon(backend)

    def tool_began(self, backend: Backend, program_id: str, tool_name: str) -> None:
        """A program has begun to run a tool."""
        books = self._books.get(backend)
        if books is not None:
            books.tool_began(program_id, tool_name)
            self._report_soon(backend)

    def caches_reset(self) -> None:
        """The prefix caches of all of them were emptied: new weights, or somebody asked for it."""
        for backend, books in self._books.items():
            books.cache_reset()
            self._report_soon(backend)

    def check_integrity(self) -> None:
        """Raise IntegrityError where the books of an engine disagree."""
        for books in self._books.values():
            books.check_integrity()

    # -- inside ------------------------------------------------------------------------

    def _books_of(self, backend: Backend, facts: EngineFacts) -> LogicalEngine:
        books = self._books.get(backend)
        if books is None:
            assert facts.capacity_blocks is not None
            books = self._books[backend] = LogicalEngine(
                self._config,
                capacity_blocks=facts.capacity_blocks + self._host_cache_tokens // facts.block_size,
                block_size=facts.block_size,
                seats=facts.seats,
                keeps_prefixes=facts.keeps_prefixes,
            )
        return books

    def _report_soon(self, backend: Backend) -> None:
        """What happens at once is reported once."""
        self._cancel(backend)
        loop = asyncio.get_running_loop()
        self._timers[backend] = loop.call_soon(partial(self._report, backend))

    def _report(self, backend: Backend) -> None:
        books = self._books.get(backend)
        if books is None:
            return
        self._cancel(backend)
        now = self._clock()
        complete = False
        while not complete:
            report = books.report(now)
            complete = report.complete
            self._dispatcher.reported(backend, report)
        wait = books.deadline - now
        if wait < 3600:
            loop = asyncio.get_running_loop()
            self._timers[backend] = loop.call_later(wait, partial(self._report, backend))

    def _cancel(self, backend: Backend) -> None:
        timer = self._timers.pop(backend, None)
        if timer is not None:
            timer.cancel()

    def _forget(self, backend: Backend) -> None:
        self._cancel(backend)
        self._books.pop(backend, None)


async def _facts_of(backend: Backend, client: EngineClient) -> EngineFacts:
    facts = (await engine_facts(client)).get(backend.rank or 0)
    if facts is None:
        raise EngineError(f"{client.url}: does not tell of rank {backend.rank}")
    return facts


async def engine_facts(client: EngineClient) -> dict[int, EngineFacts]:
    """What the server says of its engines, by data-parallel rank. Raises EngineError."""
    try:
        info = await client.page("/get_server_info")
        if info is not None:
            return sglang_facts(info)
        text = await client.page("/metrics")
        if text is None:
            raise EngineError(
                f"{client.url}: has neither vLLM's /metrics nor SGLang's /get_server_info: how "
                "much memory it has cannot be known"
            )
        return vllm_facts(text.decode(errors="replace"))
    except (FactsError, ArithmeticError, ValueError) as error:
        raise EngineError(f"{client.url}: {error}") from error
