"""The fleet in an event loop: turns wait as futures, decisions follow what changed."""

import asyncio
from collections.abc import Callable

from vllm_thunder.coordinator.backend import Backend, MemoryReport
from vllm_thunder.coordinator.fleet import Dispatch, Fleet, ProgramReport
from vllm_thunder.coordinator.tracked import Tracked
from vllm_thunder.program.turn import Turn

__all__ = ["Dispatcher"]


class Dispatcher:
    """Every change of the fleet goes through it, in one thread.

    ``clock`` gives seconds and never goes back.
    """

    def __init__(self, fleet: Fleet, clock: Callable[[], float]):
        self.fleet = fleet
        self._clock = clock
        self._waiting: dict[str, asyncio.Future[Dispatch]] = {}
        self._soon = False
        self._timer: asyncio.TimerHandle | None = None

    async def place(self, turn: Turn, prompt_tokens: int) -> Dispatch:
        """Where to send a turn; returns when it may go there.

        Cancelled, the turn is gone. Raises Overloaded.
        """
        dispatch = self.fleet.arrived(turn, prompt_tokens, self._clock())
        if dispatch is not None:
            return dispatch
        program = self.fleet.get(turn.program_id)
        assert program is not None
        return await self._wait(program, turn.turn_id)

    async def place_again(self, dispatch: Dispatch) -> Dispatch:
        """The engine did not take the turn: where to send it now."""
        self.fleet.unsent(dispatch.program, dispatch.turn_id, self._clock())
        return await self._wait(dispatch.program, dispatch.turn_id)

    def ended(self, dispatch: Dispatch) -> None:
        """A turn that was placed ended, in whatever way."""
        self.fleet.ended(dispatch.program, dispatch.turn_id, self._clock())
        self.changed()

    def reported(
        self, backend: Backend, memory: MemoryReport, programs: list[ProgramReport]
    ) -> None:
        """An engine told what has changed there."""
        now = self._clock()
        for told in programs:
            self.fleet.program_reported(backend, told, now)
        self.fleet.reported(backend, memory)
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
        except asyncio.CancelledError:
            # It may have been placed in the same instant: it ends all the same.
            self.fleet.ended(program, turn_id, self._clock())
            self.changed()
            raise
        finally:
            del self._waiting[turn_id]

    def _decide(self) -> None:
        self._soon = False
        now = self._clock()
        for dispatch in self.fleet.reconcile(now):
            future = self._waiting[dispatch.turn_id]
            if not future.done():  # else its client leaves, and it ends when that task runs
                future.set_result(dispatch)
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        wait = self.fleet.deadline - now
        self._timer = loop.call_later(wait, self._decide) if wait < 3600 else None
