"""An engine on a real socket that answers as a test says, down to single bytes and broken ones."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field


@dataclass
class Request:
    """What came over the wire. ``head`` is all of it before the body, ``body`` what was framed."""

    head: bytes
    body: bytes

    @property
    def target(self) -> bytes:
        return self.head.split(b" ")[1]

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        lines = self.head.split(b"\r\n")[1:]
        pairs = [line.split(b":", 1) for line in lines if line]
        return [(name, value.strip()) for name, value in pairs]

    def values(self, name: bytes) -> list[bytes]:
        return [value for key, value in self.headers if key.lower() == name]


class Wire:
    """The connection that a request came over."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self.reader = reader
        self.writer = writer
        self.gone = asyncio.Event()

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    def reset(self) -> None:
        """As a process that is killed."""
        self.writer.transport.abort()

    async def hang(self) -> None:
        """Until the other side closes."""
        while await self.reader.read(65536):
            pass
        self.gone.set()


Answer = Callable[[Request, Wire], Awaitable[None]]


def whole(
    body: bytes,
    status: bytes = b"200 OK",
    headers: bytes = b"content-type: application/json\r\n",
) -> Answer:
    """One answer in one piece, with its length."""
    head = b"HTTP/1.1 %b\r\n%bcontent-length: %d\r\n\r\n" % (status, headers, len(body))

    async def answer(request: Request, wire: Wire) -> None:
        await wire.send(head + body)

    return answer


def chunked(
    *pieces: bytes,
    delay: float = 0.0,
    headers: bytes = b"content-type: text/event-stream; charset=utf-8\r\n",
    end: Callable[[Wire], None] | None = None,
) -> Answer:
    """An answer in chunks, ``delay`` seconds between them; ``end`` in place of the last chunk."""
    head = b"HTTP/1.1 200 OK\r\n%btransfer-encoding: chunked\r\n\r\n" % headers

    async def answer(request: Request, wire: Wire) -> None:
        await wire.send(head)
        for piece in pieces:
            await asyncio.sleep(delay)
            await wire.send(b"%x\r\n%b\r\n" % (len(piece), piece))
        if end is not None:
            await asyncio.sleep(0.02)
            end(wire)
        else:
            await wire.send(b"0\r\n\r\n")

    return answer


def raw(data: bytes, end: Callable[[Wire], None] | None = None) -> Answer:
    """Exactly these bytes."""

    async def answer(request: Request, wire: Wire) -> None:
        await wire.send(data)
        if end is not None:
            await asyncio.sleep(0.02)
            end(wire)

    return answer


async def hang(request: Request, wire: Wire) -> None:
    """No byte ever."""
    await wire.hang()


async def reset(request: Request, wire: Wire) -> None:
    """The process is gone before it said anything."""
    wire.reset()


@dataclass
class FakeEngine:
    """``answer`` serves every request; ``requests`` are all that came."""

    answer: Answer = field(default_factory=lambda: whole(b"{}"))
    requests: list[Request] = field(default_factory=list)
    wires: list[Wire] = field(default_factory=list)
    alive: bool = True
    port: int = 0
    tls: ssl.SSLContext | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_server(
            self._serve, "127.0.0.1", self.port, limit=2**20, ssl=self.tls
        )
        self.port = self._server.sockets[0].getsockname()[1]
        self.alive = True

    async def kill(self) -> None:
        """As kill -9: nothing listens, every connection is reset."""
        self.alive = False
        self._server.close()
        for wire in self.wires:
            wire.reset()
        await asyncio.sleep(0)

    @property
    def url(self) -> str:
        return f"http{'s' if self.tls else ''}://127.0.0.1:{self.port}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        wire = Wire(reader, writer)
        self.wires.append(wire)
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            async for request in _requests(reader):
                self.requests.append(request)
                await self.answer(request, wire)
        wire.gone.set()
        self.wires.remove(wire)
        writer.close()


async def _requests(reader: asyncio.StreamReader) -> AsyncIterator[Request]:
    while True:
        head = await reader.readuntil(b"\r\n\r\n")
        lowered = head.lower()
        body = b""
        if b"transfer-encoding: chunked" in lowered:
            while size := int(await reader.readline(), 16):
                body += (await reader.readexactly(size + 2))[:-2]
            await reader.readline()
        elif b"content-length: " in lowered:
            length = lowered.split(b"content-length: ")[1].split(b"\r\n")[0]
            body = await reader.readexactly(int(length))
        yield Request(head, body)
