"""Keeps the turns of a program on the data-parallel rank that has its KV."""

import asyncio
from typing import Any

import msgspec
from vllm.logger import init_logger

from vllm_thunder.engine.client import EnginePrograms
from vllm_thunder.program.cost import ContextBlocks
from vllm_thunder.program.report import EngineReport, MemoryReport

__all__ = ["RankBooks", "RankFollower"]

logger = init_logger(f"vllm.{__name__}")  # below vLLM's: its level and handlers

#: Seconds for which a rank may keep a question open while nothing happens.
_LONG_POLL = 10.0
#: Seconds between an answer and the next question.
_PAUSE = 0.02
#: Seconds before a rank is asked again that did not answer.
_RETRY = 1.0


class RankBooks:
    """Where programs are, by what the ranks report and by what was sent since."""

    def __init__(self, ranks: int):
        self._homes: dict[str, int] = {}
        self._at: list[dict[str, None]] = [{} for _ in range(ranks)]
        #: Of the programs of each rank, those that it has not told of again since it was reset.
        self._unconfirmed: list[dict[str, None]] = [{} for _ in range(ranks)]
        self._memory: list[MemoryReport | None] = [None] * ranks
        #: Blocks by program that were sent there and are not in what the rank reported last.
        self._sent: list[dict[str, int]] = [{} for _ in range(ranks)]

    def choose(self, program_id: str, prompt_tokens: int) -> int | None:
        """The rank for a turn: that of its program's KV, else the one with the most room; None
        until all have said how much that is."""
        home = self._homes.get(program_id)
        if home is not None:
            return home
        rooms = [self._room(rank) for rank in range(len(self._memory))]
        known = [room for room in rooms if room is not None]
        if len(known) < len(rooms):
            return None
        rank = max(range(len(rooms)), key=known.__getitem__)
        self._settle(program_id, rank)
        memory = self._memory[rank]
        assert memory is not None
        self._sent[rank][program_id] = ContextBlocks(memory.context_groups)(prompt_tokens)
        return rank

    def reported(self, rank: int, report: EngineReport) -> None:
        """What a rank says has changed there."""
        if report.reset:
            self._unconfirmed[rank] = dict(self._at[rank])
        for told in report.programs:
            program_id = told.program_id
            self._unconfirmed[rank].pop(program_id, None)
            if told.claimed or told.turns_in_flight or told.resident_blocks:
                self._sent[rank].pop(program_id, None)
                # A client may send its turns elsewhere: they are where they were last.
                if told.turns_in_flight or program_id not in self._homes:
                    self._settle(program_id, rank)
            elif program_id not in self._sent[rank]:
                self._forget(program_id, rank)  # nothing of it is left there
        for program_id in report.gone:
            self._forget(program_id, rank)
        if report.complete:
            for program_id in self._unconfirmed[rank]:
                if program_id not in self._sent[rank]:
                    self._forget(program_id, rank)
            self._unconfirmed[rank] = {}
        self._memory[rank] = report.memory

    def lost(self, rank: int) -> None:
        """The rank does not answer: it is not known any more how much room it has."""
        self._memory[rank] = None

    def _room(self, rank: int) -> float | None:
        memory = self._memory[rank]
        return None if memory is None else memory.room_blocks - sum(self._sent[rank].values())

    def _settle(self, program_id: str, rank: int) -> None:
        before = self._homes.get(program_id)
        if before is not None:
            self._forget(program_id, before)
        self._homes[program_id] = rank
        self._at[rank][program_id] = None

    def _forget(self, program_id: str, rank: int) -> None:
        self._sent[rank].pop(program_id, None)
        if self._homes.get(program_id) == rank:
            del self._homes[program_id]
            del self._at[rank][program_id]


class RankFollower:
    """Follows all ranks of a server, and tells vLLM's client which one a request belongs to."""

    def __init__(self, programs: EnginePrograms, core_client: Any):
        self._programs = programs
        self._books = RankBooks(programs.ranks)
        self._tasks = [asyncio.create_task(self._follow(rank)) for rank in range(programs.ranks)]
        core_client.choose_rank = self._choose

    def _choose(self, request: Any) -> int | None:
        tokens = request.prompt_token_ids
        return self._books.choose(request.program.program_id, len(tokens) if tokens else 0)

    async def _follow(self, rank: int) -> None:
        cursor = ""
        while True:
            try:
                body = await self._programs.changes(rank, cursor, _LONG_POLL)
                report = msgspec.json.decode(body, type=EngineReport)
                self._books.reported(rank, report)
            except Exception as error:  # a dead engine raises anything; the server ends then
                self._books.lost(rank)
                logger.warning("Rank %d cannot be followed: %r", rank, error)
                cursor = ""
                await asyncio.sleep(_RETRY)
                continue
            cursor = report.cursor
            if report.complete:
                await asyncio.sleep(_PAUSE)
