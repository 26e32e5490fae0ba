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
from vllm_thunder.coordinator.fleet.placement import Rooms, choose, plan
from vllm_thunder.coordinator.fleet.queue import WaitingQueue
from vllm_thunder.coordinator.fleet.tracked import Tracked
from vllm_thunder.program.cost import Ewma
from vllm_thunder.program.errors import IntegrityError
from vllm_thunder.program.ranked import Ranked
from vllm_thunder.program.report import EngineReport, ProgramReport
from vllm_thunder.program.turn import Turn

__all__ = ["Fleet"]


class Fleet:
    """Programs, the engines that they run on, and the queue of those that wait."""

    def __init__(self, config: CoordinatorConfig):
        self.config = config
        self.backends: dict[str, Backend] = {}
        self.rooms = Rooms()
        self.queue = WaitingQueue(config)
        #: While true every turn waits: weights are being updated.
        self.frozen = False
        self._programs: dict[str, Tracked] = {}
        #: Without a turn in flight; whose last turn ended the longest ago comes first.
        self._idle: dict[Tracked, None] = {}
        #: Those of them that no engine knows, by the time at which they are forgotten.
        self._orphans: Ranked[Tracked] = Ranked()
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
        if program in self._idle:
            del self._idle[program]
            if program.profile.turns:
                program.profile.tool_ended(now - program.idle_since)
        self._orphans.discard(program)
        if turn.final:
            program.last_turn = turn.turn_id
        elif not program.in_flight:
            program.last_turn = None  # it has come back
        if not program.waiting:
            program.group = turn.group or program.group
            program.priority = turn.priority
            program.deadline_seconds = turn.deadline_seconds
        program.parent_id = turn.parent_id or program.parent_id
        program.prompt_tokens = max(prompt_tokens, program.context_tokens)
        if program.home is None and not program.waiting:
            self._find_near(program, cached)
        if at_once is not None:
            return self._send(program, turn.turn_id, at_once, now, 0.0, "has a claim there")
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
            self._no_longer_runs(program, turn_id)
        self.counts.turns_cancelled += cancelled
        self.counts.turns_cancelled_held += held and cancelled
        self.counts.turns_given_up += held and not cancelled
        if (held or refused) and program.last_turn == turn_id:
            program.last_turn = None  # no engine knows that it was to be the last
        if program.in_flight:
            return
        program.idle_since = now
        if refused and not program.told:
            self.counts.programs_ended += 1
            self._forget(program)
        else:
            self._rests(program, now)

    def unsent(
        self, program: Tracked, turn_id: str, waited: float, now: float, body_bytes: int = 0
    ) -> None:
        """The engine did not take the turn, no byte of an answer came: it waits again, whatever
        the limits say, as one that had waited ``waited`` seconds."""
        self._no_longer_runs(program, turn_id)
        self._hold(program, turn_id, now - waited, now, body_bytes)

    def redirected(self, dispatch: Dispatch, backend: Backend, now: float) -> Dispatch:
        """A turn that was sent is at this engine instead, which has what the turn goes on from."""
        program, turn_id, waited = dispatch.program, dispatch.turn_id, dispatch.waited
        self._no_longer_runs(program, turn_id)
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
        self.backends[backend.backend_id] = backend

    def reported(self, backend: Backend, report: EngineReport, now: float) -> None:
        """What an engine says has changed there."""
        if report.reset:
            backend.unconfirmed = dict(backend.residents)
        for told in report.programs:
            self._program_reported(backend, told, now)
        for program_id in report.gone:
            program = self._programs.get(program_id)
            if program is not None and program.home is backend:
                self._engine_forgot(program, now)
        if report.complete:
            unconfirmed, backend.unconfirmed = backend.unconfirmed, {}
            for program in unconfirmed:
                if program.home is backend and not program.running:
                    self._engine_forgot(program, now)
        backend.reported(report.memory)
        self.rooms.update(backend)

    def went_down(self, backend: Backend, now: float) -> None:
        """The engine cannot be reached: its programs have no home any more. Its turns in flight
        are to be :meth:`unsent`, or :meth:`ended` where the client has had bytes of an answer."""
        backend.health = Health.DOWN
        backend.report = None
        backend.unconfirmed = {}
        self.rooms.update(backend)
        for program in list(backend.residents):
            self._leave(program)
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
        for program in list(self._orphans.until(now)):
            self.counts.programs_expired += 1
            self._forget(program)
        sent: list[Dispatch] = []
        self.deadline = self._orphans.next_rank(now, inf)
        if not self.frozen:
            self._place(now, sent)
        self.counts.turns_paused += self.queue.decided()
        return sent

    def _place(self, now: float, sent: list[Dispatch]) -> None:
        for program in self.queue.due(now):
            backend, reason = choose(program, self._need(program), self.rooms, now, due=True)
            if backend is not None:
                due = self._dispatch(program, backend, reason, now)
                self.counts.forced += len(due)
                sent += due
        waiting = ((program, self._need(program)) for program in self.queue.in_order())
        for program, backend, reason in plan(waiting, self.rooms, now):
            sent += self._dispatch(program, backend, reason, now)
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
        return choose(program, self._need(program), self.rooms, now, due=due).reason

    def check_integrity(self) -> None:
        """Raise IntegrityError where the indexes and the records disagree."""
        programs = set(self)
        found = [
            *self.queue.problems(programs),
            *audit.programs(programs, set(self._idle), set(self._orphans)),
            *audit.backends(programs, self.backends.values(), self.rooms),
        ]
        if found:
            raise IntegrityError("; ".join(found))

    # -- inside: programs --------------------------------------------------------------

    def _track(self, program_id: str) -> Tracked:
        if len(self._programs) >= self.config.max_programs:
            oldest = next(iter(self._idle), None)
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
        self._idle[program] = None
        if program.home is None:
            self._orphans.put(program, now + self.config.retention)

    def _forget(self, program: Tracked) -> None:
        del self._programs[program.program_id]
        self._idle.pop(program, None)
        self._leave(program)
        self._orphans.discard(program)

    def _program_reported(self, backend: Backend, told: ProgramReport, now: float) -> None:
        """What an engine says of a program; of one that nobody here knows it is the home."""
        program = self._programs.get(told.program_id)
        if program is None:
            program = self._track(told.program_id)
            program.idle_since = now
            self._idle[program] = None
        backend.unconfirmed.pop(program, None)
        if program.home is not backend:
            if program.home is not None:
                return  # it has moved: what the old home still says is of no use
            self._settle(program, backend)
        program.told = True
        if told.claimed or told.turns_in_flight:
            self._forget_placed(backend, program)  # it is in what the engine says of its room
        grown = told.context_tokens - program.context_tokens
        if program.context_tokens and grown > 0:
            self.growth.add(grown)
        program.context_tokens = told.context_tokens or program.context_tokens
        program.resident_blocks = told.resident_blocks
        program.claimed = told.claimed and backend.health is not Health.LEAVING

    def _engine_forgot(self, program: Tracked, now: float) -> None:
        """Its home does not know it any more: it was released, or its retention ended."""
        if program.in_flight:
            home = program.home
            self._leave(program)
            if home in program.running.values():
                program.perhaps_at = home  # the turn may come after that was said
            return
        self.counts.programs_ended += program.last_turn is not None
        self.counts.programs_expired += program.last_turn is None
        self._forget(program)

    # -- inside: places ----------------------------------------------------------------

    def _find_near(self, program: Tracked, cached: Mapping[str, float]) -> None:
        """A program that is nowhere yet: where most of its prompt is in memory already."""
        program.near, program.near_tokens = None, 0.0
        for backend_id, tokens in cached.items():
            backend = self.backends.get(backend_id)
            if backend is not None and backend.usable and tokens > program.near_tokens:
                program.near, program.near_tokens = backend, tokens

    def _hold(self, program: Tracked, turn_id: str, since: float, now: float, size: int) -> None:
        if self.queue.hold(program, turn_id, since, size):
            self.queue.settle(program, now + self._stay_seconds(program), now)

    def _stay_seconds(self, program: Tracked) -> float:
        """For how long to wait for room where its KV is: as long as it takes to compute it
        elsewhere, at most ``stickiness``."""
        at, tokens = program.kept_at()
        if at is None or not at.usable:
            return 0.0
        return min(at.prefill_seconds(tokens), self.config.stickiness)

    def _need(self, program: Tracked) -> float:
        """Blocks that its next turn takes, on any engine: they serve one model."""
        backend = self.rooms.largest()
        return inf if backend is None else backend.blocks(program.prompt_tokens + self.growth.value)

    def _dispatch(
        self, program: Tracked, backend: Backend, reason: str, now: float
    ) -> list[Dispatch]:
        assert program.waiting_since is not None
        waited = now - program.waiting_since
        turns = list(program.waiting)
        for turn_id in turns:
            self.counts.turns_resumed += self.queue.unhold(program, turn_id, now)
        return [self._send(program, turn_id, backend, now, waited, reason) for turn_id in turns]

    def _send(
        self,
        program: Tracked,
        turn_id: str,
        backend: Backend,
        now: float,
        waited: float,
        reason: str,
    ) -> Dispatch:
        self.counts.turns_admitted += 1
        program.running[turn_id] = backend
        backend.running[program, turn_id] = None
        left = None
        if program.home is not backend:
            if program.home is not None:
                program.moves += 1
                self.counts.moves += 1
            at = program.home or program.perhaps_at
            left = None if at is backend else at
            self._settle(program, backend)
        credit = backend.credit(waited, self.config)
        if not program.claimed and program not in backend.placed:
            self.counts.placements += 1
            shared = program.near_tokens if program.near is backend else 0.0
            blocks = backend.blocks(program.prompt_tokens - shared + self.growth.value)
            backend.placed[program] = blocks
            backend.placed_blocks += blocks
            self.rooms.update(backend)
        return Dispatch(program, turn_id, backend, waited, reason, credit, left)

    def _no_longer_runs(self, program: Tracked, turn_id: str) -> None:
        backend = program.running.pop(turn_id)
        del backend.running[program, turn_id]
        if backend not in program.running.values():
            self._forget_placed(backend, program)

    def _settle(self, program: Tracked, backend: Backend) -> None:
        self._leave(program)
        self._orphans.discard(program)
        program.home, program.perhaps_at = backend, None
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
        program.told = False

    def _forget_placed(self, backend: Backend, program: Tracked) -> None:
        blocks = backend.placed.pop(program, None)
        if blocks is not None:
            backend.placed_blocks = backend.placed_blocks - blocks if backend.placed else 0.0
            self.rooms.update(backend)
