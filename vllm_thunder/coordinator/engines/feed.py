"""Follows one engine: what it tells goes to the dispatcher, and so does its silence."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from vllm_thunder.coordinator.dispatcher import Dispatcher
from vllm_thunder.coordinator.engines.client import EngineClient, EngineError
from vllm_thunder.coordinator.fleet.backend import Backend, Health

__all__ = ["Changes", "Feed", "LostAnswers"]

logger = logging.getLogger(__name__)

#: Seconds for which an engine may keep a question open while nothing happens.
_LONG_POLL = 5.0
#: Seconds between an answer and the next question: while turns wait, and while none do.
_PAUSE_WAITING, _PAUSE_IDLE = 0.005, 0.1
#: Seconds between two attempts to reach an engine that is down: the first, and at most.
_FIRST_RETRY, _LAST_RETRY = 0.25, 2.0
#: Answers in a row that may be missing although the server says that it is well.
_LOST_ANSWERS = 3


class LostAnswers:
    """Answers in a row to who follows an engine that may be missing before it counts as down."""

    def __init__(self, client: EngineClient):
        self._client = client
        self._count = 0

    def came(self) -> None:
        """An answer came."""
        self._count = 0

    async def lost(self, error: EngineError) -> None:
        """One did not; raises ``error`` unless the server says that it is well."""
        self._count += 1
        hangs = isinstance(error.__cause__, TimeoutError)
        well = not hangs and await self._client.healthy()
        if not well or self._count > _LOST_ANSWERS:
            raise error


class Changes:
    """What one engine that knows programs tells of them, as it happens.

    ``timeout``: seconds beyond what an answer may take anyway, after which the engine hangs.
    """

    def __init__(
        self, backend: Backend, client: EngineClient, dispatcher: Dispatcher, timeout: float
    ):
        self._backend = backend
        self._client = client
        self._dispatcher = dispatcher
        self._timeout = timeout

    async def follow(self) -> None:
        """Until the engine cannot be followed any more: raises EngineError then."""
        cursor, answers = "", LostAnswers(self._client)
        while True:
            try:
                report = await self._client.changes(
                    self._backend.rank, cursor, _LONG_POLL, _LONG_POLL + self._timeout
                )
            except EngineError as error:
                await answers.lost(error)
                continue
            answers.came()
            cursor = report.cursor
            self._dispatcher.reported(self._backend, report)
            if report.complete:
                waiting = len(self._dispatcher.fleet.queue)
                await asyncio.sleep(_PAUSE_WAITING if waiting else _PAUSE_IDLE)


class Feed:
    """Keeps one engine followed, whatever happens to it. :meth:`run` is a task of its own.

    ``check``: asks whether the server is still one that the fleet can use; raises EngineError.
    ``follow``: as of :class:`Changes`. ``on_down``: the engine was declared down, what it has in
    flight is lost.
    """

    def __init__(
        self,
        backend: Backend,
        client: EngineClient,
        dispatcher: Dispatcher,
        *,
        check: Callable[[Backend], Awaitable[None]],
        follow: Callable[[], Awaitable[None]],
        on_down: Callable[[Backend], None],
    ):
        self._backend = backend
        self._client = client
        self._dispatcher = dispatcher
        self._check = check
        self._follow = follow
        self._on_down = on_down
        self._asking: asyncio.Task[bool] | None = None
        self._following: asyncio.Future[None] | None = None

    async def run(self) -> None:
        """Follow the engine, and try again when it was down, until it is taken out."""
        retry = _FIRST_RETRY
        backend = self._backend
        while True:
            try:
                await self._check(backend)
                retry = _FIRST_RETRY
                self._dispatcher.came_up(backend)
                await self._follow_while_well()
            except Exception as error:
                if not isinstance(error, EngineError):  # a fault of ours: it must not end for good
                    logger.exception("Engine %s could not be followed", backend.backend_id)
                leaving = backend.health is Health.LEAVING
                self._down(str(error) or repr(error))
                if leaving:
                    return
            await asyncio.sleep(retry)
            retry = min(retry * 2, _LAST_RETRY)

    async def still_well(self) -> bool:
        """An exchange with the engine failed: is it down? It is asked at once, and only once by
        however many exchanges failed together."""
        if self._backend.health is Health.DOWN:
            return False
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._client.healthy())
        if await asyncio.shield(self._asking):
            return True
        self._down(f"{self._client.url}: does not answer /health any more")
        return False

    async def _follow_while_well(self) -> None:
        """Follow until that fails, or until an exchange finds the engine down: what it tells then
        says nothing of whether it is used again. Raises EngineError."""
        self._following = following = asyncio.ensure_future(self._follow())
        try:
            await asyncio.wait([following])
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            self._following = None
        if following.cancelled():
            raise EngineError(self._backend.problem or f"{self._client.url}: was found down")
        following.result()

    def _down(self, problem: str) -> None:
        backend = self._backend
        if backend.problem != problem:
            logger.warning("Engine %s cannot be used: %s", backend.backend_id, problem)
        backend.problem = problem
        if backend.health is not Health.DOWN:
            self._dispatcher.went_down(backend)
            self._on_down(backend)
            if self._following is not None:
                self._following.cancel()
