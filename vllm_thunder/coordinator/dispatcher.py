"""The fleet in an event loop: turns wait as futures, decisions follow what changed."""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

from vllm_thunder.coordinator.fleet.backend import Backend
from vllm_thunder.coordinator.fleet.dispatch import Dispatch, Unavailable
from vllm_thunder.coordinator.fleet.fleet import Fleet
from vllm_thunder.coordinator.fleet.tracked import Tracked
from vllm_thunder.coordinator.prompts.prompts import Prompts
from vllm_thunder.program.report import EngineReport
from vllm_thunder.program.turn import Turn

__all__ = ["Dispatcher"]

#: Programs that an engine which is down is to be told of; of more it forgets by itself, later.
_MOST_OWED = 2000


class Dispatcher:
    """Every change of the fleet goes through it, in one thread.

    ``clock`` gives seconds and never goes back.
    """

    def __init__(self, fleet: Fleet, clock: Callable[[], float]):
        self.fleet = fleet
        self.prompts = Prompts()
        self._clock = clock
        self._waiting: dict[str, asyncio.Future[Dispatch]] = {}
        self._thawed = asyncio.Event()
        self._thawed.set()
        self._soon = False
        self._timer: asyncio.TimerHandle | None = None
        #: Called with the id of a program and an engine that need not keep it any more.
        self.on_forgotten: Callable[[str, Backend], None] = lambda program_id, backend: None
        #: The same of several, and of an engine that was down when they were forgotten.
        self.on_back: Callable[[Iterable[str], Backend], None] = lambda program_ids, backend: None
        self._owed: dict[Backend, dict[str, None]] = {}
        #: Seconds that the last decision took.
        self.decision_seconds = 0.0

    async def place(
        self,
        turn: Turn,
        prompt_tokens: float,
        cached: Mapping[str, float] = MappingProxyType({}),
        body_bytes: int = 0,
    ) -> Dispatch:
        """Where to send a turn; returns when it may go there. Arguments as of
        :meth:`~vllm_thunder.coordinator.fleet.fleet.Fleet.arrived`.

        Cancelled, the turn is gone, and so it is when this raises: Overloaded at once, Unavailable
        when it has waited for ``max_wait`` and no engine can be used.
        """
        dispatch = self.fleet.arrived(turn, prompt_tokens, cached, self._clock(), body_bytes)
        if dispatch is not None:
            self._sent(dispatch)
            return dispatch
        program = self.fleet.get(turn.program_id)
        assert program is not None
        return await self._wait(program, turn.turn_id)

    async def place_again(self, dispatch: Dispatch, body_bytes: int = 0) -> Dispatch:
        """The engine did not take the turn: where to send it now. Raises Unavailable."""
        program, turn_id = dispatch.program, dispatch.turn_id
        self.fleet.unsent(program, turn_id, dispatch.waited, self._clock(), body_bytes)
        return await self._wait(program, turn_id)

    async def weights_updated(self, body_bytes: int) -> None:
        """Returns when a call without a program may go, which is at once unless weights are being
        updated. Raises Overloaded if it may not wait."""
        if self.fleet.frozen:
            with self.fleet.queue.hold_other(body_bytes):
                while self.fleet.frozen:
                    await self._thawed.wait()

    def redirected(self, dispatch: Dispatch, backend: Backend) -> Dispatch:
        """The turn turned out to belong to this engine, which has it now."""
        moved = self.fleet.redirected(dispatch, backend, self._clock())
        self._sent(moved)
        self.changed()
        return moved

    def ended(self, dispatch: Dispatch, *, refused: bool = False, cancelled: bool = False) -> None:
        """A turn that was placed ended, in whatever way; ``refused`` and ``cancelled`` as of
        :meth:`~vllm_thunder.coordinator.fleet.fleet.Fleet.ended`."""
        program = dispatch.program
        self._ended(program, dispatch.turn_id, refused=refused, cancelled=cancelled)
        if refused and dispatch.backend.stock and self.fleet.get(program.program_id) is None:
            self.on_forgotten(program.program_id, dispatch.backend)  # its books have it

    def reported(self, backend: Backend, report: EngineReport) -> None:
        """An engine told what has changed there."""
        for told in report.programs:
            program = self.fleet.get(told.program_id)
            if program is None or program.home is not backend:
                continue
            # While a turn runs, this may have been said of the one before.
            if not program.running and not told.turns_in_flight:
                if program.prompt_size is not None and told.prompt_tokens:
                    self.prompts.counted(program.prompt_size, told.prompt_tokens)
                program.prompt_size = None
        self.fleet.reported(backend, report, self._clock())
        if report.complete:
            self._pay(backend)
        self.changed()

    def owe(self, program_id: str, backend: Backend) -> None:
        """The program has ended, or has moved away, and the engine cannot be told now: it is when
        it has answered again and told everything."""
        if self.fleet.backends.get(backend.backend_id) is backend:
            owed = self._owed.setdefault(backend, {})
            owed[program_id] = None
            if len(owed) > _MOST_OWED:
                del owed[next(iter(owed))]

    def went_down(self, backend: Backend) -> None:
        """An engine cannot be reached; its turns in flight are told of one by one."""
        self.prompts.forget(backend.backend_id)
        self.fleet.went_down(backend, self._clock())
        self.changed()

    def came_up(self, backend: Backend) -> None:
        """An engine answers (again)."""
        backend.problem = None
        self.fleet.came_up(backend)

    def removed(self, backend: Backend) -> None:
        """An engine that was taken out has ended its turns."""
        self.fleet.removed(backend, self._clock())
        self._owed.pop(backend, None)
        self.changed()

    def freeze(self, frozen: bool) -> None:
        """Hold every model call that arrives, or go on."""
        self.fleet.frozen = frozen
        if frozen:
            self._thawed.clear()
        else:
            self._thawed.set()
        self.changed()

    def changed(self) -> None:
        """Decide when the loop is free: what happens at once is decided once."""
        if not self._soon:
            self._soon = True
            asyncio.get_running_loop().call_soon(self._decide)

    async def _wait(self, program: Tracked, turn_id: str) -> Dispatch:
        future = self._waiting[turn_id] = asyncio.get_running_loop().create_future()
        self.changed()
        try:
            return await future
        except (asyncio.CancelledError, Unavailable) as error:
            # It may have been placed in the same instant: it ends all the same.
            self._ended(program, turn_id, cancelled=isinstance(error, asyncio.CancelledError))
            raise
        finally:
            del self._waiting[turn_id]

    def _ended(
        self, program: Tracked, turn_id: str, *, refused: bool = False, cancelled: bool
    ) -> None:
        now = self._clock()
        self.fleet.ended(program, turn_id, now, refused=refused, cancelled=cancelled)
        if program.ends and not program.in_flight and self.fleet.get(program.program_id) is program:
            home = program.home or program.perhaps_at
            self.fleet.release(program.program_id)
            if home is not None:
                self.on_forgotten(program.program_id, home)
        self.changed()

    def _sent(self, dispatch: Dispatch) -> None:
        program_id = dispatch.program.program_id
        self._owed.get(dispatch.backend, {}).pop(program_id, None)
        if dispatch.left is not None:
            self.on_forgotten(program_id, dispatch.left)

    def _pay(self, backend: Backend) -> None:
        """The engine has told of everything it has: now it hears what is of no use."""
        told = []
        for program_id in self._owed.pop(backend, {}):
            program = self.fleet.get(program_id)
            if program is not None and program.home is backend:
                if program.in_flight:
                    continue  # it has come back
                self.fleet.release(program_id)
            told.append(program_id)
        if told:
            self.on_back(told, backend)

    def _decide(self) -> None:
        self._soon = False
        now = self._clock()
        began = time.perf_counter()
        placed = self.fleet.reconcile(now)
        self.decision_seconds = time.perf_counter() - began
        for dispatch in placed:
            self._sent(dispatch)
            future = self._waiting[dispatch.turn_id]
            if not future.done():  # else its client leaves, and it ends when that task runs
                future.set_result(dispatch)
        for program in self.fleet.given_up(now):
            for turn_id in program.waiting:
                future = self._waiting[turn_id]
                if not future.done():
                    future.set_exception(Unavailable("no engine can be used now; try again later"))
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        wait = self.fleet.deadline - now
        self._timer = loop.call_later(wait, self._decide) if wait < 3600 else None
