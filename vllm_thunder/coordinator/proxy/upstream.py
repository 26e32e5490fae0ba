"""The server's side of one exchange: a connection, and how it is broken off from outside."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

from vllm_thunder.coordinator.proxy.connection import Connection, EngineLost
from vllm_thunder.coordinator.proxy.heads import RequestHead
from vllm_thunder.coordinator.proxy.pool import ConnectionPool, Origin, origin_of

__all__ = ["Ongoing", "Server", "Upstream"]

#: Answers that a server which is going down may give to anything.
_PERHAPS_DOWN = frozenset({500, 502, 503, 504})


class Server(Protocol):
    """Who is asked: an engine, or another replica of the coordinator, which has no ranks."""

    @property
    def url(self) -> str: ...

    @property
    def rank(self) -> int | None: ...


class Ongoing:
    """Exchanges by the server that they are with."""

    def __init__(self) -> None:
        self._at: dict[Server, dict[Upstream, None]] = {}

    def add(self, server: Server, upstream: "Upstream") -> None:
        self._at.setdefault(server, {})[upstream] = None

    def discard(self, server: Server, upstream: "Upstream") -> None:
        there = self._at.get(server)
        if there is not None:
            there.pop(upstream, None)
            if not there:
                del self._at[server]

    def at(self, server: Server) -> "list[Upstream]":
        return list(self._at.get(server, ()))

    def __len__(self) -> int:
        return sum(map(len, self._at.values()))


class Upstream:
    """Asks one engine after the other until one answers; ``ongoing`` knows which it is now.

    ``connect_seconds``: for how long an engine may take to accept a connection.
    """

    __slots__ = (
        "_abandoned",
        "_connect_seconds",
        "_connecting",
        "_ongoing",
        "_pool",
        "_server",
        "connection",
    )

    def __init__(self, pool: ConnectionPool, ongoing: Ongoing, connect_seconds: float):
        self.connection: Connection | None = None
        self._pool = pool
        self._ongoing = ongoing
        self._connect_seconds = connect_seconds
        self._server: Server | None = None
        self._connecting: asyncio.Timeout | None = None
        self._abandoned: str | None = None

    async def ask(self, server: Server, head: RequestHead, body: bytes, waited: float) -> None:
        """Send a whole request; returns when status and headers of the answer have come.

        Raises EngineLost. A request for which a connection of before broke is sent once more, on
        a new one: the engine may have closed the old one for idleness in that moment.
        """
        self._begin(server)
        origin = origin_of(server.url)
        data = head.bytes_for(origin, rank=server.rank, waited=waited, length=len(body))
        head_only = head.method == "HEAD"
        idle = self._pool.take(origin)
        if idle is not None:
            self.connection = idle
            idle.send(data, body, head_only=head_only)
            try:
                await idle.answered()
                return
            except EngineLost:
                if self._abandoned is not None:
                    raise
                self.connection = None
                self._pool.give_back(idle)
        self.connection = await self._connect(origin)
        self.connection.send(data, body, head_only=head_only)
        await self.connection.answered()

    async def first_chunk(self, still_well: Callable[[], Awaitable[bool]]) -> bytes:
        """The first bytes of the body of what :meth:`ask` was answered, b"" for none.

        ``still_well()``: whether the server serves, asked when its answer is one that a server
        which is going down gives to anything. Raises EngineLost when it does not, or broke off.
        """
        connection = self.connection
        assert connection is not None
        if connection.status in _PERHAPS_DOWN and not await still_well():
            raise EngineLost(f"it answered {connection.status} and is down")
        return await connection.chunk()

    async def open(self, server: Server, head: RequestHead, length: int | None) -> Connection:
        """Send the head of a request on a new connection; its body of ``length`` bytes follows, in
        chunks if that is None. Raises EngineLost."""
        self._begin(server)
        origin = origin_of(server.url)
        self.connection = await self._connect(origin)
        data = head.bytes_for(origin, rank=server.rank, waited=0.0, length=length)
        self.connection.send(data, head_only=head.method == "HEAD")
        return self.connection

    def abandon(self, reason: str) -> None:
        """Break it off: who waits for the engine gets EngineLost."""
        self._abandoned = reason
        if self.connection is not None:
            self.connection.abort(reason)
        elif self._connecting is not None and not self._connecting.expired():
            self._connecting.reschedule(asyncio.get_running_loop().time())

    def drop(self) -> None:
        """Done with this engine, however it ended; closes the connection unless it can serve
        again."""
        if self.connection is not None:
            self._pool.give_back(self.connection)
            self.connection = None
        if self._server is not None:
            self._ongoing.discard(self._server, self)
            self._server = None

    def _begin(self, server: Server) -> None:
        self._abandoned = None
        self._server = server
        self._ongoing.add(server, self)

    async def _connect(self, origin: Origin) -> Connection:
        self._connecting = asyncio.timeout(self._connect_seconds)
        try:
            async with self._connecting:
                return await self._pool.connect(origin)
        except TimeoutError:
            raise EngineLost(
                self._abandoned or f"no connection within {self._connect_seconds:g} s"
            ) from None
        finally:
            self._connecting = None
