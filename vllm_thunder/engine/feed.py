"""What the engine core tells those who follow it: a log of changes, and who waits for the next.

The answer to a question may be a future: vLLM's engine core sends it when that is done, and works
on meanwhile. All who wait have been told everything so far, so one report serves them all.
"""

import re
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from math import inf
from typing import NamedTuple
from uuid import uuid4

import msgspec

from vllm_thunder.program.decisions import Memory
from vllm_thunder.program.fcfs import FcfsPolicy
from vllm_thunder.program.ledger import BlockLedger
from vllm_thunder.program.program import Program, Status
from vllm_thunder.program.report import EngineReport, MemoryReport, ProgramReport
from vllm_thunder.program.table import ProgramTable

__all__ = ["ProgramFeed"]

#: Programs in one report.
_PAGE = 2000
#: Who waits beyond that many is a client that went away: the one that has waited longest is
#: answered.
_MOST_WATCHERS = 64
#: Content that leaves memory, and what requests without a program use, has no event of its own: it
#: is looked at this often (seconds) while somebody waits.
_LOOK_SECONDS = 1.0
#: Room that differs by this share of memory from what was told last is told again.
_ROOM_SHARE = 0.01

#: The engine core that wrote it, the last change that was told, and, until a report that began at
#: the beginning is complete, the last change before it began.
_CURSOR = re.compile(r"([0-9a-f]{16})-(\d{1,18})(?:-(\d{1,18}))?", re.ASCII)


class _Cursor(NamedTuple):
    after: int = 0
    began: int = 0


class ProgramFeed:
    """Answers ``GET /programs/changes`` with :class:`EngineReport` as JSON.

    ``memory`` is what the policy is told; ``held`` counts the turns that are held back;
    ``groups`` are block size and kept tokens of the model's KV-cache groups.
    """

    def __init__(
        self,
        table: ProgramTable,
        ledger: BlockLedger,
        policy: FcfsPolicy,
        *,
        memory: Callable[[], Memory],
        held: Callable[[], int],
        groups: Sequence[tuple[int, int | None]],
    ):
        self._table = table
        self._changes = table.changes
        self._ledger = ledger
        self._policy = policy
        self._memory = memory
        self._held = held
        self._groups = list(groups)
        self._boot = uuid4().hex[:16]
        #: Who waits for a change, the longest first, and until when.
        self.watchers: dict[Future[bytes], float] = {}
        #: The last change that those who wait know of.
        self._told = 0
        self._told_room = inf
        #: When one of them has waited for long enough, or something has to be looked at.
        self._wake_at = inf
        self._look_at = inf
        self._room_moves_at = inf

    def changes(self, cursor: str, wait: float, now: float) -> bytes | Future[bytes]:
        """What has changed since ``cursor``, an EngineReport in JSON; at once if there is anything,
        else when there is, after ``wait`` seconds at the latest."""
        known = self._read(cursor)
        if known is None:
            return self._report(_Cursor(began=self._changes.sequence), now, reset=True)
        if known.after == self._changes.sequence and wait > 0:
            self.answer(now)
            if len(self.watchers) >= _MOST_WATCHERS:
                self._complete([next(iter(self.watchers))], now)
        if known.after != self._changes.sequence or wait <= 0:
            return self._report(known, now)
        watcher: Future[bytes] = Future()
        self.watchers[watcher] = now + wait
        self._told = self._changes.sequence
        self._look_at = min(self._look_at, now + _LOOK_SECONDS)
        self._room_moves_at = self._policy.newcomer_room_changes_at(now)
        self._set_wake()
        return watcher

    def due_at(self) -> float:
        """When :meth:`answer` will have something to do; inf: nobody waits."""
        if not self.watchers:
            return inf
        return self._wake_at if self._changes.sequence == self._told else -inf

    def answer(self, now: float) -> None:
        """Complete the answers to those for whom there is news, or who have waited long enough."""
        if now < self.due_at():
            return
        if self._changes.sequence == self._told and now >= min(self._look_at, self._room_moves_at):
            self._look(now)
        if self._changes.sequence == self._told:
            self._complete([each for each, until in self.watchers.items() if until <= now], now)
        if self._changes.sequence != self._told:
            self._complete(list(self.watchers), now)
        self._set_wake()

    def close(self, now: float) -> None:
        """The engine ends: nobody waits any longer."""
        self._complete(list(self.watchers), now)

    # -- inside ------------------------------------------------------------------------

    def _complete(self, watchers: list[Future[bytes]], now: float) -> None:
        if not watchers:
            return
        report = self._report(_Cursor(self._told), now)
        for watcher in watchers:
            del self.watchers[watcher]
            watcher.set_result(report)

    def _look(self, now: float) -> None:
        """Note what has changed without an event."""
        self._note(self._room(now))
        if now >= self._room_moves_at:
            self._changes.touched()
            self._room_moves_at = self._policy.newcomer_room_changes_at(now)
        self._look_at = now + _LOOK_SECONDS

    def _room(self, now: float) -> tuple[Memory, float]:
        memory = self._memory()
        return memory, self._policy.newcomer_room(now, memory)

    def _note(self, found: tuple[Memory, float]) -> None:
        for program in self._ledger.take_moved():
            if program.status is not Status.TERMINATED:
                self._changes.changed(program.program_id)
        memory, room = found
        if abs(room - self._told_room) > _ROOM_SHARE * memory.capacity_blocks:
            self._changes.touched()
            self._told_room = room

    def _set_wake(self) -> None:
        if not self.watchers:
            self._look_at = self._wake_at = inf
        else:
            self._wake_at = min(*self.watchers.values(), self._look_at, self._room_moves_at)

    def _read(self, cursor: str) -> _Cursor | None:
        """None: what happened since then cannot be told."""
        found = _CURSOR.fullmatch(cursor)
        if found is None or found[1] != self._boot:
            return None
        known = _Cursor(int(found[2]), int(found[3] or 0))
        if known.after > self._changes.sequence or known.began > self._changes.sequence:
            return None
        # Who is told from the beginning need not hear of what had gone before.
        return known if self._changes.reaches_back_to(max(known)) else None

    def _report(self, known: _Cursor, now: float, *, reset: bool = False) -> bytes:
        found = memory, room = self._room(now)
        self._note(found)
        self._told_room = room
        page = self._changes.page(known.after, _PAGE, known.began)
        cursor = f"{self._boot}-{page.reached}"
        if not page.complete and known.began:
            cursor += f"-{known.began}"
        report = EngineReport(
            cursor=cursor,
            reset=reset,
            complete=page.complete,
            memory=self._memory_report(memory, room),
            programs=[self._describe(program_id) for program_id in page.changed],
            gone=page.gone,
        )
        return msgspec.json.encode(report)

    def _memory_report(self, memory: Memory, room: float) -> MemoryReport:
        per_token, per_position = self._policy.prefill.fitted or (None, 0.0)
        return MemoryReport(
            capacity_blocks=memory.capacity_blocks,
            room_blocks=room,
            free_seats=memory.free_slots - self._held(),
            context_groups=self._groups,
            prefill_seconds_per_token=per_token,
            prefill_seconds_per_position=per_position,
            claimed_blocks=memory.unlabelled_blocks + memory.shared_blocks + self._table.claimed,
        )

    def _describe(self, program_id: str) -> ProgramReport:
        program: Program | None = self._table.get(program_id)
        assert program is not None
        return ProgramReport(
            program_id=program_id,
            context_tokens=program.context_tokens,
            resident_blocks=program.resident_blocks,
            claimed=program.status is Status.ACTIVE,
            turns_in_flight=len(program.turns),
            prompt_tokens=program.context_prompt_tokens,
        )
