"""Programs, engines, and who runs where: every change is one synchronous method.

It knows no clock and no sockets. Who calls it sends what it says, and tells it what happened.
"""

from collections.abc import Container, Iterator, Mapping
from math import inf

from vllm_thunder.coordinator.config import CoordinatorConfig
from vllm_thunder.coordinator.fleet import audit
from vllm_thunder.coordinator.fleet.backend import Backend, Health
from vllm_thunder.coordinator.fleet.counts import Counts
from vllm_thunder.coordinator.fleet.dispatch import Dispatch, Overloaded
from vllm_thunder.coordinator.fleet.placement import (
    Placement,
    Rooms,
    choose,
    nearby,
    plan,
    to_idle,
)
from vllm_thunder.coordinator.fleet.places import Places
from vllm_thunder.coordinator.fleet.queue import WaitingQueue
from vllm_thunder.coordinator.fleet.resting import Resting
from vllm_thunder.coordinator.fleet.tracked import Tracked
from vllm_thunder.program.cost import Ewma
from vllm_thunder.program.errors import IntegrityError
from vllm_thunder.program.report import EngineReport, ProgramReport
from vllm_thunder.program.turn import Turn

__all__ = ["Fleet"]


class Fleet:
    """Programs, the engines that they run on, and the queue of those that wait."""

    def __init__(self, config: CoordinatorConfig):
        self.config = config
        self.backends: dict[str, Backend] = {}
        self.rooms = Rooms()
        self._places = Places(self.rooms)
        self.queue = WaitingQueue(config)
        #: While true every model call waits: weights are being updated.
        self.frozen = False
        self._programs: dict[str, Tracked] = {}
        self._resting = Resting()
        #: Programs that wait, and have got a claim since they began to.
        self._may_go_on: dict[Tracked, None] = {}
        self.growth = Ewma(prior=0.0, weight=0.2)
        #: When :meth:`reconcile` has to be called although nothing happens; inf: never.
        self.deadline = inf
        self.counts = Counts()

    def __len__(self) -> int:
        return len(self._programs)

    def __iter__(self) -> Iterator[Tracked]:
        return iter(self._programs.values())

    def get(self, program_id: str) -> Tracked | None:
        return self._programs.get(program_id)

    # -- turns -------------------------------------------------------------------------

    def arrived(
        self,
        turn: Turn,
        prompt_tokens: float,
        cached: Mapping[str, float],
        now: float,
        body_bytes: int = 0,
    ) -> Dispatch | None:
        """A turn arrived; None: it waits until :meth:`reconcile` places it.

        ``prompt_tokens`` may be an estimate. ``cached``: by backend id, how many of them are likely
        to be in its prefix cache, of other programs. ``body_bytes``: what its request takes here
        while it waits. Raises Overloaded, and then nothing has changed.
        """
        program = self._programs.get(turn.program_id)
        at_once = None if self.frozen or program is None else program.goes_on_at()
        if at_once is None:
            self.queue.check_room(body_bytes)
        if program is None:
            program = self._track(turn.program_id)
        if program in self._resting:
            self._resting.discard(program)
            if program.profile.turns:
                program.profile.tool_ended(now - program.idle_since)
        program.takes(turn, prompt_tokens)
        if program.home is None and not program.waiting:
            program.near = nearby(cached, self.backends)
        if at_once is not None:
            return self._send(program, turn.turn_id, at_once, now, 0.0, "has a claim there")
        if program.goes_on_at() is not None:
            self._may_go_on[program] = None  # as soon as turns are not frozen any more
        self._hold(program, turn.turn_id, now, now, body_bytes)
        return None

    def ended(
        self,
        program: Tracked,
        turn_id: str,
        now: float,
        *,
        refused: bool = False,
        cancelled: bool = False,
    ) -> None:
        """A turn that was sent ended, in whatever way, or one that waits is not to be sent.

        ``refused``: the engine answered that the request is wrong: of a program that it has never
        told of nothing remains. ``cancelled``: its client went away.
        """
        held = turn_id in program.waiting
        if held:
            self.counts.turns_paused += not self.queue.unhold(program, turn_id, now)
        else:
            self._places.end(program, turn_id, now)
        self.counts.turns_cancelled += cancelled
        self.counts.turns_cancelled_held += held and cancelled
        self.counts.turns_given_up += held and not cancelled
        if (held or refused) and program.last_turn == turn_id:
            program.last_turn = None  # no engine knows that it was to be the last
        if program.in_flight:
            return
        program.idle_since = now
        if refused and not program.engine_knows:
            self.counts.programs_ended += 1
            self._forget(program)
        else:
            self._rests(program, now)

    def unsent(
        self, program: Tracked, turn_id: str, waited: float, now: float, body_bytes: int = 0
    ) -> None:
        """The engine did not take the turn, no byte of an answer came: it waits again, whatever
        the limits say, as one that had waited ``waited`` seconds."""
        self._places.end(program, turn_id, now)
        self._hold(program, turn_id, now - waited, now, body_bytes)

    def redirected(self, dispatch: Dispatch, backend: Backend, now: float) -> Dispatch:
        """A turn that was sent is at this engine instead, which has what the turn goes on from."""
        program, turn_id, waited = dispatch.program, dispatch.turn_id, dispatch.waited
        self._places.end(program, turn_id, now)
        return self._send(program, turn_id, backend, now, waited, "has what it goes on from")

    def release(self, program_id: str) -> Tracked | None:
        """Forget a program whose turns have all ended; returns it, None if it is not tracked."""
        program = self._programs.get(program_id)
        if program is None:
            return None
        if program.in_flight:
            raise IntegrityError(f"{program!r} has turns in flight and cannot be released")
        self.counts.programs_ended += 1
        self._forget(program)
        return program

    def least_busy(self, but: Container[Backend] = ()) -> Backend | None:
        """Where a request without a program goes: the usable engine that has the fewest requests
        in flight, of those the one with the most room; not to one of ``but``."""
        usable = (b for b in self.backends.values() if b.usable and b not in but)
        return min(usable, key=lambda b: (len(b.running) + b.unlabelled, -b.room), default=None)

    # -- engines -----------------------------------------------------------------------

    def joined(self, backend: Backend) -> None:
        """An engine was added; nothing is placed there before its first report."""
        if backend.backend_id in self.backends:
            raise IntegrityError(f"{self.backends[backend.backend_id]!r} has not been removed")
        self.backends[backend.backend_id] = backend

    def reported(self, backend: Backend, report: EngineReport, now: float) -> None:
        """What an engine says has changed there. Of one that is down it is too late."""
        if backend.health is Health.DOWN:
            return
        if report.reset:
            backend.unconfirmed = dict(backend.residents)
        for told in report.programs:
            self._program_reported(backend, told, now)
        doubtful: dict[Tracked, None] = {}
        for program_id in report.gone:
            program = self._programs.get(program_id)
            if program is None or program.home is not backend:
                continue
            if program.last_turn is None and program.idle_since > backend.reported_at:
                # A turn has ended since the report before: it may have come after this was said.
                doubtful[program] = None
            else:
                self._engine_forgot(program, now)
        if report.complete:
            unconfirmed, backend.unconfirmed = backend.unconfirmed, {}
            for program in unconfirmed:
                if program.home is backend and not program.running:
                    self._engine_forgot(program, now)
        backend.unconfirmed |= doubtful  # if it is still there the next report tells of it
        backend.reported(report.memory, now)
        self.rooms.update(backend)

    def went_down(self, backend: Backend, now: float) -> None:
        """The engine cannot be reached: its programs have no home any more. Its turns in flight
        are to be :meth:`unsent`, or :meth:`ended` where the client has had bytes of an answer."""
        backend.health = Health.DOWN
        backend.report = None
        backend.unconfirmed = {}
        self.rooms.update(backend)
        for program in list(backend.residents):
            self._places.leave(program)
            program.perhaps_at = backend
            if not program.in_flight:
                self._rests(program, now)

    def came_up(self, backend: Backend) -> None:
        """The engine answers (again): it is used from its next report on."""
        if backend.health is Health.DOWN:
            backend.health = Health.UNKNOWN

    def left(self, backend: Backend) -> None:
        """The engine is taken out: its turns end, and no further one is placed there."""
        backend.health = Health.LEAVING
        self.rooms.update(backend)
        for program in backend.residents:
            program.claimed = False

    def removed(self, backend: Backend, now: float) -> None:
        """The engine was taken out and has no turn in flight any more."""
        if backend.running:
            raise IntegrityError(f"{backend!r} has turns in flight and cannot be removed")
        self.went_down(backend, now)
        del self.backends[backend.backend_id]

    # -- decisions ---------------------------------------------------------------------

    def reconcile(self, now: float) -> list[Dispatch]:
        """Which turns go where now; sets ``deadline``. Those that are due go first, wherever they
        can; then all that fit without keeping anybody before them out."""
        for program in self._resting.to_forget(now):
            self.counts.programs_expired += 1
            self._forget(program)
        sent: list[Dispatch] = []
        self.deadline = self._resting.next_change(now, inf)
        if not self.frozen:
            self._place(now, sent)
        self.counts.turns_paused += self.queue.decided()
        return sent

    def _place(self, now: float, sent: list[Dispatch]) -> None:
        for program in self._may_go_on:
            home = program.goes_on_at() if program.waiting else None
            if home is not None:
                need = self._need(program)
                sent += self._dispatch(Placement(program, home, "has a claim there", need), now)
        self._may_go_on.clear()
        for program in self.queue.due(now):
            choice = choose(program, self._need(program), self.rooms, now, due=True)
            if choice.backend is not None:
                placement = Placement(program, choice.backend, choice.reason, choice.blocks)
                due = self._dispatch(placement, now)
                self.counts.forced += len(due)
                sent += due
        waiting = ((program, self._need(program)) for program in self.queue.in_order())
        for placement in plan(waiting, self.rooms, now):
            sent += self._dispatch(placement, now)
        if len(self.queue):
            waiting = ((program, self._need(program)) for program in self.queue.in_order())
            placements, next_idle = to_idle(waiting, self.backends.values(), now)
            for placement in placements:
                sent += self._dispatch(placement, now)
            self.deadline = min(self.deadline, next_idle)
        self.deadline = min(self.deadline, self.queue.next_change(now))
        if len(self.queue):
            # Events bring us here sooner; what changes without one must not be missed.
            self.deadline = min(self.deadline, now + self.config.interval)
        if not len(self.rooms):
            ends = ((p.waiting_since or now) + self.config.max_wait for p in self.queue.in_order())
            self.deadline = min([self.deadline, *(at for at in ends if at > now)])

    def given_up(self, now: float) -> list[Tracked]:
        """Programs that have waited for ``max_wait`` and more while no engine can be used."""
        if self.frozen or len(self.rooms):
            return []
        earliest = now - self.config.max_wait
        return [p for p in self.queue.in_order() if (p.waiting_since or now) <= earliest]

    def blocks_needed(self, program: Tracked) -> int | None:
        """Blocks that the next turn of a program takes; None while no engine has said how large
        its blocks are."""
        need = self._need(program)
        return None if need == inf else round(need)

    def why(self, program: Tracked, now: float) -> str:
        """Why a program waits, for people."""
        if self.frozen:
            return "weights are being updated"
        if not len(self.rooms):
            return "no engine can be used: none has said how much memory it has"
        due = self.queue.is_due(program, now)
        choice = choose(program, self._need(program), self.rooms, now, due=due)
        return choice.reason if choice.backend is None else "waits behind others that come first"

    def check_integrity(self) -> None:
        """Raise IntegrityError where the indexes and the records disagree."""
        programs = set(self)
        found = [
            *self.queue.problems(programs),
            *audit.programs(programs, set(self._resting), self._resting.forgotten_here),
            *audit.backends(programs, self.backends.values(), self.rooms),
        ]
        if found:
            raise IntegrityError("; ".join(found))

    # -- inside: programs --------------------------------------------------------------

    def _track(self, program_id: str) -> Tracked:
        if len(self._programs) >= self.config.max_programs:
            oldest = self._resting.longest()
            if oldest is None:
                raise Overloaded(
                    f"{len(self._programs)} programs have turns in flight, the limit of what is "
                    "tracked; try again later"
                )
            self.counts.programs_evicted += 1
            self._forget(oldest)
        self.counts.programs_created += 1
        program = self._programs[program_id] = Tracked(program_id)
        return program

    def _rests(self, program: Tracked, now: float) -> None:
        """It has no turn in flight."""
        if program.home is None and program.last_turn is not None:
            self.counts.programs_ended += 1
            self._forget(program)
            return
        told = program.home is not None and program.told
        self._resting.put(program, None if told else now + self.config.retention)

    def _forget(self, program: Tracked) -> None:
        del self._programs[program.program_id]
        self._may_go_on.pop(program, None)
        self._places.leave(program)
        self._resting.discard(program)

    def _program_reported(self, backend: Backend, told: ProgramReport, now: float) -> None:
        """What an engine says of a program; of one that nobody here knows it is the home."""
        program = self._programs.get(told.program_id)
        if program is None:
            try:
                program = self._track(told.program_id)
            except Overloaded:
                self.counts.programs_created += 1
                self.counts.programs_evicted += 1  # for itself: all others have turns in flight
                return
            program.idle_since = now
            self._resting.put(program)
        backend.unconfirmed.pop(program, None)
        if program.home is not backend:
            if program.home is not None:
                return  # it has moved: what the old home still says is of no use
            self._places.settle(program, backend)
        program.told = True
        self._resting.known(program)
        if told.claimed or told.turns_in_flight:
            self._places.told(program, backend)  # it is in what the engine says of its room
        grown = told.context_tokens - program.context_tokens
        if program.context_tokens and grown > 0:
            self.growth.add(grown)
        program.context_tokens = told.context_tokens or program.context_tokens
        program.resident_blocks = told.resident_blocks
        program.claimed = told.claimed and backend.health is not Health.LEAVING
        if program.claimed and program.waiting:
            self._may_go_on[program] = None

    def _engine_forgot(self, program: Tracked, now: float) -> None:
        """Its home does not know it any more: it was released, or its retention ended."""
        if program.in_flight:
            home = program.home
            self._places.leave(program)
            if home in program.running.values():
                program.perhaps_at = home  # the turn may come after that was said
            return
        self.counts.programs_ended += program.last_turn is not None
        self.counts.programs_expired += program.last_turn is None
        self._forget(program)

    # -- inside: places ----------------------------------------------------------------

    def _hold(self, program: Tracked, turn_id: str, since: float, now: float, size: int) -> None:
        if self.queue.hold(program, turn_id, since, size):
            self.queue.settle(program, now + program.stay_seconds(self.config.stickiness), now)

    def _need(self, program: Tracked) -> float:
        """Blocks that its next turn takes, on any engine."""
        return self.rooms.need(program.prompt_tokens + self.growth.value)

    def _dispatch(self, placement: Placement, now: float) -> list[Dispatch]:
        program, backend, reason, blocks = placement
        assert program.waiting_since is not None
        waited = now - program.waiting_since
        turns = list(program.waiting)
        resumed = sum(self.queue.unhold(program, turn_id, now) for turn_id in turns)
        self.counts.turns_resumed += resumed
        if program.home is None:
            for sibling in self.queue.siblings(program):
                sibling.near[backend] = program.prompt_tokens  # it is about to be there
        held = resumed > 0
        return [
            self._send(program, each, backend, now, waited, reason, blocks, held) for each in turns
        ]

    def _send(
        self,
        program: Tracked,
        turn_id: str,
        backend: Backend,
        now: float,
        waited: float,
        reason: str,
        blocks: float | None = None,
        held: bool = False,
    ) -> Dispatch:
        """``blocks``: what it takes of the engine's room; None: all of its context. ``held``: a
        decision had left it waiting."""
        self.counts.turns_admitted += 1
        self._places.begin(program, turn_id, backend)
        left = None
        if program.home is not backend:
            if program.home is not None:
                program.moves += 1
                self.counts.moves += 1
            at = program.home or program.perhaps_at
            left = None if at is backend else at
            self._places.settle(program, backend)
        credit = backend.credit(held, self.config)
        if not program.claimed and program not in backend.placed:
            self.counts.placements += 1
            if blocks is None:
                blocks = backend.blocks(program.prompt_tokens + self.growth.value)
            self._places.give(program, backend, blocks)
        return Dispatch(program, turn_id, backend, waited, reason, credit, left)
