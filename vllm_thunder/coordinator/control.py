"""What may be done to a running coordinator, beside sending it model calls."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from vllm_thunder.coordinator.config import CoordinatorConfig
from vllm_thunder.coordinator.dispatcher import Dispatcher
from vllm_thunder.coordinator.engines.client import EngineError
from vllm_thunder.coordinator.engines.engines import Engines
from vllm_thunder.coordinator.engines.stock import StockEngines
from vllm_thunder.coordinator.fleet.backend import Backend, Health
from vllm_thunder.coordinator.fleet.tracked import Tracked
from vllm_thunder.coordinator.metrics import Metrics
from vllm_thunder.program.errors import ThunderError

__all__ = ["Control", "EngineFailed", "UnknownEngine"]

logger = logging.getLogger(__name__)

#: Times that an engine is asked to end a program, and seconds between two of them.
_RELEASE_ATTEMPTS, _RELEASE_SECONDS = 5, 1.0
#: Seconds for which a coordinator that stops waits for that.
_STOP_SECONDS = 3.0


class UnknownEngine(ThunderError):
    """No engine has this id or address (HTTP 404)."""


class EngineFailed(ThunderError):
    """An engine that was to be told something did not answer as it should (HTTP 502)."""


class Control:
    """Releases programs, adds and takes out engines, holds turns while weights are updated."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        engines: Engines,
        metrics: Metrics,
        config: CoordinatorConfig,
        clock: Callable[[], float],
        stock: StockEngines,
    ):
        self._stock = stock
        self.dispatcher = dispatcher
        self.fleet = dispatcher.fleet
        self.engines = engines
        self.metrics = metrics
        self.config = config
        self.clock = clock
        self._background: set[asyncio.Task[None]] = set()
        #: Ends an update of weights whose end nobody tells.
        self._sync_timer: asyncio.TimerHandle | None = None
        dispatcher.on_forgotten = self._forget_there
        dispatcher.on_back = self._forget_all_there

    async def release(self, program_id: str) -> dict[str, Any]:
        """End a program, here and at the engine that has it: at once, or when its turns in flight
        have ended.

        Raises EngineFailed when no engine says that it had the program, and one did not answer.
        Here the program has ended all the same, and that engine is told again.
        """
        program = self.fleet.get(program_id)
        if program is not None and program.in_flight:
            program.ends = True  # the last of its turns takes it along
            return {"program_id": program_id, "released": True, "pending": True}
        # Who is not known here may have come to an engine in another way.
        home = None if program is None else program.home
        if program is not None:
            self.fleet.release(program_id)
        backends = [home] if home is not None else list(self.fleet.backends.values())
        for backend in backends:
            if backend.health in (Health.DOWN, Health.UNKNOWN) and not backend.stock:
                self.dispatcher.owe(program_id, backend)
        asked = {backend.url: backend for backend in backends if backend.usable}
        answers = await asyncio.gather(
            *(self._release_at(backend, program_id) for backend in asked.values())
        )
        problems = [str(answer) for answer in answers if isinstance(answer, EngineError)]
        if problems and True not in answers:
            told = "; ".join(problems)
            raise EngineFailed(f"The program may not have ended yet at its engine: {told}")
        return {"program_id": program_id, "released": program is not None or True in answers}

    async def tool(self, program_id: str, tool_name: str) -> bool:
        """A program has begun to run a tool; whether the engine that has it knows it. Raises
        EngineFailed."""
        program = self.fleet.get(program_id)
        home = None if program is None else program.home
        if home is None or home.health is not Health.UP:
            return False
        if home.stock:
            self._stock.tool_began(home, program_id, tool_name)
            return True
        try:
            return await self.engines.client(home.url).tool(program_id, tool_name)
        except EngineError as error:
            raise EngineFailed(f"The engine was not told: {error}") from error

    async def add(self, url: str) -> list[Backend]:
        """Add a server. Raises EngineError."""
        return await self.engines.add(url)

    def remove(self, name: str) -> list[Backend]:
        """Take out the engines that ``name`` means. Raises UnknownEngine."""
        backends = self.engines.at(name)
        if not backends and not self.engines.give_up(name):
            known = ", ".join(self.fleet.backends) or "there are none"
            raise UnknownEngine(f"No engine has the id or address {name!r}; known: {known}")
        self.engines.remove(backends)
        return backends

    def remove_engine(self, name: str) -> list[Backend]:
        """The same for a name in a path, which clients cut off at ``#``: raises EngineError where
        it means several engines."""
        ranks = self.engines.at(name)
        if len(ranks) > 1:
            listed = ", ".join(backend.backend_id for backend in ranks)
            raise EngineError(
                f"{name} has several engines: {listed}. Take out one by its id, with %23 for the "
                "#; POST /remove_worker takes out all of them"
            )
        return self.remove(name)

    def urls(self) -> list[str]:
        """Servers, each once."""
        urls = (backend.url for backend in self.fleet.backends.values())
        return list(dict.fromkeys([*urls, *self.engines.unreachable]))

    def serves(self, url: str) -> bool:
        """Whether a server is one of the fleet's and stays so, reachable or not."""
        backends = self.fleet.backends.values()
        stays = any(b.url == url and b.health is not Health.LEAVING for b in backends)
        return stays or url in self.engines.unreachable

    def freeze(self, frozen: bool) -> None:
        """Hold every model call that arrives while weights are updated, for at most
        ``weight_sync_timeout``, or go on: what was computed with the old ones is of no use then."""
        if self._sync_timer is not None:
            self._sync_timer.cancel()
            self._sync_timer = None
        if frozen:
            loop = asyncio.get_running_loop()
            timeout = self.config.weight_sync_timeout
            self._sync_timer = loop.call_later(timeout, self._sync_too_long)
        else:
            self.caches_reset()
        self.dispatcher.freeze(frozen)

    def caches_reset(self) -> None:
        """The prefix caches of all engines were emptied; who knows programs tells that itself."""
        self._stock.caches_reset()
        for backend_id in self.fleet.backends:
            self.dispatcher.prompts.forget(backend_id)

    async def stop(self) -> None:
        """Ask no more; what engines are still to be told they get a moment for."""
        if self._sync_timer is not None:
            self._sync_timer.cancel()
        if self._background:
            await asyncio.wait(self._background, timeout=_STOP_SECONDS)
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)

    # -- inside ------------------------------------------------------------------------

    def _sync_too_long(self) -> None:
        logger.error(
            "The update of weights was not ended within %g seconds: model calls go on",
            self.config.weight_sync_timeout,
        )
        self.freeze(False)

    async def _release_at(self, backend: Backend, program_id: str) -> bool | EngineError:
        """Whether the engine had it, or why that is not known yet."""
        if backend.stock:
            self._stock.released(backend, program_id)
            return False  # it was asked for nothing
        try:
            return await self.engines.client(backend.url).release(program_id)
        except EngineError as error:
            # Nobody is tracking the program any more: so it has to go there, too.
            logger.warning("A program was not released at once: %s", error)
            self._spawn(self._insist(backend, program_id))
            return error

    def _forget_there(self, program_id: str, backend: Backend) -> None:
        """The program has ended, or has moved away: what the engine keeps of it is of no use."""
        if backend.stock:
            self._stock.released(backend, program_id)
        else:
            self._spawn(self._insist(backend, program_id))

    def _forget_all_there(self, program_ids: Iterable[str], backend: Backend) -> None:
        self._spawn(self._insist_on_all(backend, program_ids))

    async def _insist_on_all(self, backend: Backend, program_ids: Iterable[str]) -> None:
        for program_id in program_ids:
            await self._insist(backend, program_id)

    async def _insist(self, backend: Backend, program_id: str) -> None:
        for attempt in range(_RELEASE_ATTEMPTS):
            await asyncio.sleep(attempt * _RELEASE_SECONDS)
            if backend.health is Health.DOWN:
                self.dispatcher.owe(program_id, backend)
                return
            program = self.fleet.get(program_id)
            if program is not None and program.home is backend and _has_run(program):
                return  # it has it again
            try:
                await self.engines.client(backend.url).release(program_id)
                return
            except EngineError as error:
                logger.warning("A program was not released (attempt %d): %s", attempt + 1, error)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


def _has_run(program: Tracked) -> bool:
    """Else it is known only because an engine has told of it."""
    return program.in_flight or bool(program.profile.turns)
