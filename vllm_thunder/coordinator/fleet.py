"""The global waiting queue over engines: every change is one synchronous method.

It knows no clock and no sockets. Who calls it sends what it says, and tells it what happened.
"""

from collections.abc import Iterator
from itertools import chain
from math import inf
from typing import NamedTuple

from vllm_thunder.coordinator.backend import Backend, Health, MemoryReport
from vllm_thunder.coordinator.config import CoordinatorConfig
from vllm_thunder.coordinator.placement import Rooms, choose, head_of
from vllm_thunder.coordinator.tracked import Tracked
from vllm_thunder.program.cost import Ewma
from vllm_thunder.program.errors import IntegrityError, ThunderError
from vllm_thunder.program.ranked import Ranked
from vllm_thunder.program.turn import Turn

__all__ = ["Dispatch", "Fleet", "Overloaded", "ProgramReport"]

#: A turn that has waited this share of the maximum wait is due: as in an engine.
_DUE_SHARE = 0.5


class Overloaded(ThunderError):
    """A limit on tracked programs or held turns is reached (HTTP 429)."""


class Dispatch(NamedTuple):
    """Send the turn to the backend now; ``waited`` seconds it has been held."""

    program: Tracked
    turn_id: str
    backend: Backend
    waited: float
    reason: str


class ProgramReport(NamedTuple):
    """What an engine says of one program that changed."""

    program_id: str
    context_tokens: int
    resident_blocks: int
    claimed: bool


class Fleet:
    """Programs, the engines that they run on, and the queue of those that wait."""

    def __init__(self, config: CoordinatorConfig):
        self.config = config
        self.backends: dict[str, Backend] = {}
        self.rooms = Rooms()
        self._programs: dict[str, Tracked] = {}
        #: Without a turn in flight; whose last turn ended the longest ago comes first.
        self._idle: dict[Tracked, None] = {}
        #: Programs with waiting turns in the order in which they are placed.
        self._order: Ranked[Tracked] = Ranked()
        #: The same by the time at which they are due.
        self._due: Ranked[Tracked] = Ranked()
        #: Those of them that wait for their home, by the time until when.
        self._settled: Ranked[Tracked] = Ranked()
        self._groups: dict[str, dict[Tracked, None]] = {}
        self._held_turns = 0
        self.growth = Ewma(prior=0.0, weight=0.2)
        #: When :meth:`reconcile` has to be called although nothing happens; inf: never.
        self.deadline = inf
        self.moves = 0
        self.placements = 0

    def __len__(self) -> int:
        return len(self._programs)

    def __iter__(self) -> Iterator[Tracked]:
        return iter(self._programs.values())

    def get(self, program_id: str) -> Tracked | None:
        return self._programs.get(program_id)

    @property
    def held_turns(self) -> int:
        return self._held_turns

    # -- turns -------------------------------------------------------------------------

    def arrived(self, turn: Turn, prompt_tokens: int, now: float) -> Dispatch | None:
        """A turn arrived; None: it waits until :meth:`reconcile` places it.

        ``prompt_tokens`` may be an estimate. Raises Overloaded, and then nothing has changed.
        """
        program = self._programs.get(turn.program_id)
        if self._held_turns >= self.config.max_held_turns:
            raise Overloaded(f"{self._held_turns} turns wait already, the limit; try again later")
        if program is None:
            program = self._track(turn.program_id, now)
        self._idle.pop(program, None)
        if program.waiting_since is None:
            program.group = turn.group or program.group
            program.priority = turn.priority
            program.deadline_seconds = turn.deadline_seconds
        program.parent_id = turn.parent_id or program.parent_id
        program.prompt_tokens = max(prompt_tokens, program.context_tokens)
        home = program.home
        if home is not None and home.usable and (program.claimed or program.running):
            return self._send(program, turn.turn_id, home, now, 0.0, "has a claim there")
        self._hold(program, turn.turn_id, now)
        return None

    def ended(self, program: Tracked, turn_id: str, now: float) -> None:
        """A turn that was sent ended, in whatever way, or its client went away."""
        if turn_id in program.waiting:
            self._unhold(program, turn_id, now)
        else:
            self._no_longer_runs(program, turn_id)
        if not program.in_flight:
            program.idle_since = now
            self._idle[program] = None

    def unsent(self, program: Tracked, turn_id: str, now: float) -> None:
        """The engine did not take the turn, no byte of an answer came: it waits again."""
        self._no_longer_runs(program, turn_id)
        self._hold(program, turn_id, now)

    def release(self, program_id: str) -> Tracked | None:
        """Forget a program whose turns have all ended; returns it, None if it is not tracked."""
        program = self._programs.get(program_id)
        if program is None:
            return None
        if program.in_flight:
            raise IntegrityError(f"{program!r} has turns in flight and cannot be released")
        del self._programs[program_id]
        self._idle.pop(program, None)
        self._leave(program)
        return program

    # -- engines -----------------------------------------------------------------------

    def joined(self, backend: Backend) -> None:
        """An engine was added; nothing is placed there before its first report."""
        self.backends[backend.backend_id] = backend

    def reported(self, backend: Backend, report: MemoryReport) -> None:
        """What the engine says of its memory: all turns that had reached it are in."""
        backend.report = report
        if backend.health is Health.UNKNOWN:
            backend.health = Health.UP
        self.rooms.update(backend)

    def program_reported(self, backend: Backend, told: ProgramReport, now: float) -> None:
        """What the engine says of a program; of one that nobody here knows it is the home."""
        program = self._programs.get(told.program_id)
        if program is None:
            program = self._track(told.program_id, now)
            self._idle[program] = None
        if program.home is not backend:
            if program.home is not None:
                return  # it has moved: what the old home still says is of no use
            self._settle(program, backend)
        if told.claimed:
            self._forget_placed(backend, program)
        grown = told.context_tokens - program.context_tokens
        if program.context_tokens and grown > 0:
            self.growth.add(grown)
        program.context_tokens = told.context_tokens or program.context_tokens
        program.resident_blocks = told.resident_blocks
        program.claimed = told.claimed

    def went_down(self, backend: Backend) -> list[tuple[Tracked, str]]:
        """The engine cannot be reached. Its programs have no home any more; returns their turns
        in flight: those of which no byte came are to be :meth:`unsent`, the others ended."""
        backend.health = Health.DOWN
        backend.report = None
        self.rooms.update(backend)
        for program in list(backend.residents):
            self._leave(program)
        return list(backend.running)

    def came_up(self, backend: Backend) -> None:
        """The engine answers again: it is used from its next report on."""
        backend.health = Health.UNKNOWN

    def left(self, backend: Backend) -> None:
        """The engine is taken out: its turns end, and no further one is placed there."""
        backend.health = Health.LEAVING
        self.rooms.update(backend)
        for program in backend.residents:
            program.claimed = False

    # -- decisions ---------------------------------------------------------------------

    def reconcile(self, now: float) -> list[Dispatch]:
        """Place what waits; sets ``deadline``."""
        sent: list[Dispatch] = []
        for program in list(self._due.until(now)):
            sent += self._place(program, self._need(program), now, due=True)
        for program, blocks in head_of(self._waiting_in_order(), self.rooms):
            sent += self._place(program, blocks, now, due=False)
        self._set_deadline(now)
        return sent

    def why(self, program: Tracked, now: float) -> str:
        """Why a program waits, for people."""
        if not len(self.rooms):
            return "no engine can be used: none has said how much memory it has"
        due = self._due.rank_of(program) <= now
        return choose(program, self._need(program), self.rooms, now, due=due).reason

    def position(self, program: Tracked) -> int:
        """How many programs wait in front of it."""
        return self._order.position(program)

    def check_integrity(self) -> None:
        """Raise IntegrityError where the indexes and the records disagree."""
        problems = []
        programs = set(self)
        waiting = {p for p in programs if p.waiting}
        if set(self._order) != waiting or set(self._due) != waiting:
            problems.append(f"{waiting} wait, {self._order} and {self._due} are in order")
        if self._held_turns != sum(len(p.waiting) for p in programs):
            problems.append(f"{self._held_turns} held turns counted")
        if set(self._idle) != {p for p in programs if not p.in_flight}:
            problems.append("the idle programs are not those without a turn in flight")
        for program in programs:
            if program in self._settled and not program.waiting:
                problems.append(f"{program!r} is settled and does not wait")
            if (program.waiting_since is None) == bool(program.waiting):
                problems.append(f"{program!r} has no start of its wait, or one too many")
            if program.waiting.keys() & program.running.keys():
                problems.append(f"{program!r} has a turn that waits and runs")
            if program.home is not None and program not in program.home.residents:
                problems.append(f"{program!r} is not among its home's residents")
        for backend in self.backends.values():
            runs = {(p, t) for p in programs for t, at in p.running.items() if at is backend}
            if set(backend.running) != runs:
                problems.append(f"{backend!r} runs {backend.running}, {runs} counted")
            if not set(backend.residents) <= programs:
                problems.append(f"{backend!r} has residents that nobody tracks")
            counted = sum(backend.placed.values())
            if abs(counted - backend.placed_blocks) > 1e-6 * max(counted, 1.0):
                problems.append(f"{backend!r}: {backend.placed_blocks} placed, {counted} counted")
            if (backend in self.rooms) != backend.usable:
                problems.append(f"{backend!r} is among the rooms, or should be")
        if problems:
            raise IntegrityError("; ".join(problems))

    # -- inside ------------------------------------------------------------------------

    def _track(self, program_id: str, now: float) -> Tracked:
        if len(self._programs) >= self.config.max_programs:
            oldest = next(iter(self._idle), None)
            if oldest is None:
                raise Overloaded(
                    f"{len(self._programs)} programs have turns in flight, the limit of what is "
                    "tracked; try again later"
                )
            self.release(oldest.program_id)
        program = self._programs[program_id] = Tracked(program_id, created_at=now)
        return program

    def _hold(self, program: Tracked, turn_id: str, now: float) -> None:
        program.waiting[turn_id] = None
        self._held_turns += 1
        if program.waiting_since is None:
            program.waiting_since = now
            stays = self._stay_seconds(program)
            program.settled_until = now + stays
            if stays:
                self._settled.put(program, program.settled_until)
            self._order.put(program, (program.priority, now))
            limit = min(self.config.max_wait, program.deadline_seconds or inf)
            self._due.put(program, now + _DUE_SHARE * limit)
            if program.group is not None:
                self._groups.setdefault(program.group, {})[program] = None

    def _unhold(self, program: Tracked, turn_id: str, now: float) -> None:
        del program.waiting[turn_id]
        self._held_turns -= 1
        if program.waiting:
            return
        assert program.waiting_since is not None
        program.longest_wait = max(program.longest_wait, now - program.waiting_since)
        program.waiting_since = None
        self._order.discard(program)
        self._due.discard(program)
        self._settled.discard(program)
        if program.group is not None:
            members = self._groups[program.group]
            del members[program]
            if not members:
                del self._groups[program.group]

    def _stay_seconds(self, program: Tracked) -> float:
        """For how long to wait for room at home: as long as it takes to compute again there what
        is still in its memory, at most ``stickiness``."""
        home = program.home
        if home is None or not home.usable:
            return 0.0
        resident_tokens = program.resident_blocks * home.block_size
        return min(home.prefill_seconds(resident_tokens), self.config.stickiness)

    def _need(self, program: Tracked) -> float:
        """Blocks that its next turn takes, on any engine: they have one block size."""
        backend = self.rooms.largest()
        if backend is None:
            return inf
        return max(backend.blocks(program.prompt_tokens + self.growth.value), 1)

    def _waiting_in_order(self) -> Iterator[tuple[Tracked, float]]:
        """Those that wait, the members of a prompt group one after the other."""
        seen: set[Tracked] = set()
        for first in self._order:
            for program in chain((first,), self._groups.get(first.group or "", ())):
                if program not in seen:
                    seen.add(program)
                    yield program, self._need(program)

    def _place(self, program: Tracked, blocks: float, now: float, *, due: bool) -> list[Dispatch]:
        chosen, reason = choose(program, blocks, self.rooms, now, due=due)
        if chosen is None:
            return []
        assert program.waiting_since is not None
        waited = now - program.waiting_since
        turns = list(program.waiting)
        for turn_id in turns:
            self._unhold(program, turn_id, now)
        return [self._send(program, turn_id, chosen, now, waited, reason) for turn_id in turns]

    def _send(
        self,
        program: Tracked,
        turn_id: str,
        backend: Backend,
        now: float,
        waited: float,
        reason: str,
    ) -> Dispatch:
        program.running[turn_id] = backend
        backend.running[program, turn_id] = None
        if program.home is not backend:
            if program.home is not None:
                program.moves += 1
                self.moves += 1
            self._settle(program, backend)
        if not program.claimed and program not in backend.placed:
            self.placements += 1
            blocks = max(backend.blocks(program.prompt_tokens + self.growth.value), 1)
            backend.placed[program] = blocks
            backend.placed_blocks += blocks
            self.rooms.update(backend)
        return Dispatch(program, turn_id, backend, waited, reason)

    def _no_longer_runs(self, program: Tracked, turn_id: str) -> None:
        backend = program.running.pop(turn_id)
        del backend.running[program, turn_id]
        if backend not in program.running.values():
            self._forget_placed(backend, program)

    def _settle(self, program: Tracked, backend: Backend) -> None:
        self._leave(program)
        program.home = backend
        backend.residents[program] = None

    def _leave(self, program: Tracked) -> None:
        """It has no home any more."""
        home = program.home
        if home is None:
            return
        self._forget_placed(home, program)
        home.residents.pop(program, None)
        program.home = None
        program.resident_blocks = 0
        program.claimed = False

    def _forget_placed(self, backend: Backend, program: Tracked) -> None:
        blocks = backend.placed.pop(program, None)
        if blocks is not None:
            backend.placed_blocks = backend.placed_blocks - blocks if backend.placed else 0.0
            self.rooms.update(backend)

    def _set_deadline(self, now: float) -> None:
        """When does a program become due, or stop waiting for its home?"""
        due = self._due.next_rank(now, inf)
        self.deadline = min(due, self._settled.next_rank(now, inf))
