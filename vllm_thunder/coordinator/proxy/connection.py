"""One HTTP/1.1 connection to an engine, byte for byte.

The usual clients do more than a proxy may: they re-encode header bytes that are not UTF-8, and add
headers of their own. This one writes the head that it is given, and tells what came back.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from vllm_thunder.program.errors import ThunderError

if TYPE_CHECKING:
    from vllm_thunder.coordinator.proxy.pool import Origin

__all__ = ["Connection", "EngineLost"]

#: Bytes of an answer that may lie here unread before the engine has to wait.
_HIGH_WATER = 256 * 1024

#: Bytes up to which head and body are joined: one packet costs less than two.
_SMALL_BODY = 64 * 1024


class EngineLost(ThunderError):
    """No answer, or only a part of one: the connection broke, or what came over it is no HTTP."""


class Connection(asyncio.Protocol):
    """Carries one exchange after the other.

    ``status`` and ``headers`` (names and values as the engine wrote them, in its order) are there
    after :meth:`answered`. Bytes of a body come without their transfer coding and with their
    content coding.
    """

    __slots__ = (
        "_chunks",
        "_exchanging",
        "_head_only",
        "_interim",
        "_keep_alive",
        "_loop",
        "_lost",
        "_parser",
        "_reading_paused",
        "_unread",
        "_waiter",
        "complete",
        "headers",
        "idle_since",
        "origin",
        "status",
        "transport",
    )

    def __init__(self, loop: asyncio.AbstractEventLoop, origin: Origin):
        self._loop = loop
        self.origin = origin
        self.transport: asyncio.Transport
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        #: The whole answer has come, though it may not have been read.
        self.complete = False
        self.idle_since = 0.0
        self._parser: HttpResponseParser | None = HttpResponseParser(self)
        self._exchanging = self._head_only = self._interim = self._keep_alive = False
        self._chunks: list[bytes] = []
        self._unread = 0
        self._reading_paused = False
        self._lost: EngineLost | None = None
        self._waiter: asyncio.Future[None] | None = None

    # -- what an exchange does ---------------------------------------------------------

    def send(self, head: bytes, body: bytes = b"", *, head_only: bool = False) -> None:
        """Begin an exchange. ``head_only``: its answer has no body, whatever its headers say."""
        self.status = 0
        self.headers = []
        self.complete = self._interim = self._keep_alive = False
        self._exchanging = True
        self._head_only = head_only
        if len(body) <= _SMALL_BODY:
            self.transport.write(head + body)
        else:
            self.transport.write(head)
            self.transport.write(body)

    def write(self, data: bytes) -> None:
        """More of the request's body."""
        if not self.transport.is_closing():
            self.transport.write(data)

    async def answered(self) -> None:
        """Returns when status and headers have come; EngineLost if they never do."""
        while not self.status:
            await self._news()

    async def chunk(self) -> bytes:
        """What has come of the body since the last call, b"" after its end; EngineLost when it
        was cut."""
        while not self._chunks:
            if self.complete:
                return b""
            await self._news()
        chunks = self._chunks
        data = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        chunks.clear()
        self._unread = 0
        if self._reading_paused:
            self._reading_paused = False
            self.transport.resume_reading()
        return data

    @property
    def at_end(self) -> bool:
        """Whether :meth:`chunk` would say that the body is over."""
        return self.complete and not self._chunks

    # -- what its owner does -----------------------------------------------------------

    @property
    def reusable(self) -> bool:
        """Whether another exchange may follow."""
        return (
            self.complete
            and self._keep_alive
            and not self._chunks
            and not self.transport.is_closing()
            and not self.transport.get_write_buffer_size()  # it answered without reading all
        )

    def rest(self, now: float) -> None:
        """No exchange until the next :meth:`send`: whatever comes before that is not asked for."""
        self._exchanging = False
        self.idle_since = now

    def abort(self, reason: str) -> None:
        """Close at once; who waits for the answer gets EngineLost with ``reason``."""
        self._lose(reason)
        self.transport.abort()

    # -- what the transport and the parser say -----------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's is none of asyncio's classes.
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._parser is None:
            return
        if not self._exchanging or self.complete:
            self._keep_alive = False
            self.transport.close()
            return
        try:
            self._parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade) as error:
            self._keep_alive = False
            self._lose(f"its answer is no HTTP: {error.__context__ or error}")
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._parser = None
        if self._exchanging and not self.complete:
            if exc is None and self.status and not self._has_length():
                self.complete = True  # this server ends a body by closing
                self._wake()
            else:
                self._lose("it closed the connection" if exc is None else str(exc) or repr(exc))

    def on_message_begin(self) -> None:
        if self.complete:
            raise ValueError("a second answer to one request")

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        status = self._parser.get_status_code()
        if status == 101:
            raise ValueError("another protocol, which nobody asked for")
        if status < 200:
            self._interim = True
            self.headers = []
            return
        self.status = status
        self._keep_alive = self._parser.should_keep_alive()
        if self._head_only:
            # The parser waits for a body that does not come: this connection has served.
            self._keep_alive = False
            self.complete = True
        self._wake()

    def on_body(self, data: bytes) -> None:
        self._chunks.append(data)
        self._unread += len(data)
        if self._unread > _HIGH_WATER and not self._reading_paused:
            self._reading_paused = True
            self.transport.pause_reading()
        self._wake()

    def on_message_complete(self) -> None:
        if self._interim:
            self._interim = False
            return
        self.complete = True
        self._wake()

    # -- inside ------------------------------------------------------------------------

    async def _news(self) -> None:
        if self._lost is not None:
            raise self._lost
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _lose(self, reason: str) -> None:
        if self._lost is None and not self.complete:
            self._lost = EngineLost(reason)
        self._wake()

    def _has_length(self) -> bool:
        names = {name.lower() for name, _ in self.headers}
        return b"content-length" in names or b"transfer-encoding" in names
