"""The client's side of one exchange: what it has got so far, and how that can still end."""

import asyncio
import zlib
from collections.abc import Awaitable, Callable
from math import inf

from starlette.types import Message, Receive, Scope, Send

from vllm_thunder.coordinator.proxy.answers import (
    STREAM_HEADERS,
    error_event,
    event_of_answer,
    event_of_error,
    refusal,
)
from vllm_thunder.coordinator.proxy.connection import Connection, EngineLost
from vllm_thunder.coordinator.proxy.exchange import Exchange, Outcome
from vllm_thunder.coordinator.proxy.heads import Headers, answer_headers, value_of

__all__ = ["Departure", "Reply", "is_stream", "rest_of"]

_COMMENT = b": keep-alive\n\n"

#: Bytes of an error answer that can become an event of a stream.
_ERROR_BYTES = 1024 * 1024

#: Answers that have no body; a length that one tells is that of another answer.
_WITHOUT_BODY = frozenset({204, 304})

#: zlib's window bits for gzip or zlib data, whichever it is.
_GZIP_OR_ZLIB = 47


def is_stream(connection: Connection) -> bool:
    """Whether the answer is a stream of server-sent events."""
    kind = _header(connection, b"content-type")
    return connection.status == 200 and kind.startswith(b"text/event-stream")


async def rest_of(connection: Connection, chunk: bytes, most: float = _ERROR_BYTES) -> bytes:
    """What there is of an answer's body from ``chunk`` on, little more than ``most`` bytes; raises
    EngineLost when it is cut."""
    chunks, size = [chunk], len(chunk)
    while not connection.at_end and size < most:
        chunks.append(await connection.chunk())
        size += len(chunks[-1])
    return b"".join(chunks)


class Departure:
    """Cancels the running task when the client goes away.

    ``on_message`` gets what the client sends until then.
    """

    __slots__ = ("_on_message", "_over", "_task", "_watcher", "seen")

    def __init__(
        self, receive: Receive, on_message: Callable[[Message], Awaitable[None]] | None = None
    ):
        task = asyncio.current_task()
        assert task is not None
        self.seen = False
        self._task = task
        self._over = False
        self._on_message = on_message
        self._watcher = asyncio.create_task(self._watch(receive))

    def close(self) -> None:
        """From now on it cancels nothing."""
        self._over = True
        self._watcher.cancel()

    def caused_it(self) -> bool:
        """Whether the task's cancellation was for the client, and for nothing else."""
        return self.seen and self._task.uncancel() == 0

    async def _watch(self, receive: Receive) -> None:
        try:
            while (message := await receive())["type"] != "http.disconnect":
                if self._on_message is not None:
                    await self._on_message(message)
        except asyncio.CancelledError:
            # Kept by the task, its traceback would hold the whole request in a cycle until a full
            # garbage collection, and with thousands of held turns these are rare.
            if not self._over:
                raise
        if not self._over:
            self.seen = True
            self._task.cancel()


class Reply:
    """Sends one response; notes in ``exchange`` what was sent.

    Until its first byte is sent nothing is decided. ``begun`` says that status and headers are out;
    that may also be because comments keep a stream open (:meth:`hold`). ``reader`` reads along what
    an engine answers; None: nobody does.
    """

    __slots__ = (
        "_comments",
        "_exchange",
        "_path",
        "_root",
        "_send",
        "_streams",
        "_tail",
        "_timer",
        "begun",
        "reader",
    )

    def __init__(self, scope: Scope, send: Send, exchange: Exchange):
        self.begun = False
        self.reader: Callable[[bytes], None] | None = None
        self._path = exchange.path
        self._root: str = scope.get("root_path", "").rstrip("/")
        self._send = send
        self._exchange = exchange
        self._streams = False
        self._tail = b""
        self._timer: asyncio.TimerHandle | None = None
        self._comments: asyncio.Task[None] | None = None

    # -- while there is no answer ------------------------------------------------------

    def hold(self, seconds: float) -> None:
        """Begin a stream with comments if nothing was sent within ``seconds``, and so on."""
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(seconds, self._begin_comments, seconds)

    @property
    def holding(self) -> bool:
        return self._timer is not None

    async def hush(self) -> None:
        """No comment comes after this returned."""
        self.silence()
        if self._comments is not None:
            comments, self._comments = self._comments, None
            await asyncio.wait({comments})
            if not comments.cancelled():
                comments.result()

    def silence(self) -> None:
        """The exchange is over: let go of what :meth:`hold` started."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._comments is not None:
            self._comments.cancel()

    # -- what the client gets ----------------------------------------------------------

    async def relay(self, connection: Connection, chunk: bytes) -> None:
        """The answer of an engine, of which ``chunk`` has come.

        Raises EngineLost when it was cut; what came before that was sent. A response that has
        begun goes on with a stream's events only (:func:`is_stream`).
        """
        inflate = None
        if self.begun:
            inflate = _inflation_of(connection)  # the response began without a coding
        else:
            headers = answer_headers(connection.headers, connection.origin, self._root)
            # No event of ours fits behind what is packed, or into a length that was told.
            fixed = value_of(headers, b"content-encoding") or value_of(headers, b"content-length")
            self._streams = is_stream(connection) and not fixed
            if connection.status in _WITHOUT_BODY:
                headers = [item for item in headers if item[0] != b"content-length"]
            await self._start(connection.status, headers)
        while not connection.at_end:
            await self._more(self._read(chunk) if inflate is None else _inflated(inflate, chunk))
            chunk = await connection.chunk()
        await self._last(self._read(chunk) if inflate is None else _inflated(inflate, chunk))
        self._exchange.outcome = Outcome.OK

    async def end_with_answer(self, connection: Connection, chunk: bytes) -> None:
        """The answer of an engine, of which ``chunk`` has come and which is no stream, as the last
        event of the stream that has begun. Raises EngineLost when it was cut."""
        fine = 200 <= connection.status < 300
        body = await rest_of(connection, chunk, inf if fine else _ERROR_BYTES)
        inflate = _inflation_of(connection)
        if inflate is not None:
            try:
                body = _inflated(inflate, body)
            except EngineLost:
                if fine:
                    raise
                body = b""  # its status tells, too
        if fine:
            await self.end_with(event_of_answer(self._path, self._read(body)))
        else:
            await self.end_with(event_of_error(self._path, connection.status, body))
        self._exchange.outcome = Outcome.OK

    async def refuse(self, status: int, message: str, field: str | None = None) -> None:
        """An error of the coordinator's own, as a response or as the end of the stream."""
        await self.hush()
        self._exchange.outcome = Outcome.REFUSED
        if self.begun:
            await self.end_with(error_event(self._path, status, message))
        else:
            headers, body = refusal(self._path, status, message, field)
            await self._start(status, headers)
            await self._last(body)

    async def cut(self, status: int, message: str) -> None:
        """The engine was lost in the middle: end a stream with an error event, and leave anything
        else incomplete, so that nobody takes it for whole."""
        self._exchange.outcome = Outcome.ENGINE_LOST
        if self._streams:
            await self.end_with(error_event(self._path, status, message))

    async def end_with(self, event: bytes) -> None:
        """The last event of a stream."""
        if not self._tail or self._tail.endswith((b"\n\n", b"\r\n\r\n")):
            await self._last(event)
        else:  # an event is incomplete: its line ends, then it
            await self._last((b"\n" if self._tail.endswith(b"\n") else b"\n\n") + event)

    # -- inside ------------------------------------------------------------------------

    async def _start(self, status: int, headers: Headers) -> None:
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        self.begun = True
        self._exchange.status = status

    def _read(self, chunk: bytes) -> bytes:
        if self.reader is not None:
            self.reader(chunk)
        return chunk

    async def _more(self, chunk: bytes) -> None:
        if chunk:
            await self._send({"type": "http.response.body", "body": chunk, "more_body": True})
            self._exchange.answer_bytes += len(chunk)
            if self._streams:
                self._tail = chunk[-4:] if len(chunk) >= 4 else (self._tail + chunk)[-4:]

    async def _last(self, chunk: bytes) -> None:
        self._exchange.answer_bytes += len(chunk)
        await self._send({"type": "http.response.body", "body": chunk, "more_body": False})

    def _begin_comments(self, seconds: float) -> None:
        self._comments = asyncio.create_task(self._comment(seconds))

    async def _comment(self, seconds: float) -> None:
        await self._start(200, STREAM_HEADERS)
        self._streams = True
        while True:
            await self._send({"type": "http.response.body", "body": _COMMENT, "more_body": True})
            await asyncio.sleep(seconds)


def _header(connection: Connection, name: bytes) -> bytes:
    """The first value of a header of its answer by the lower-case name, b"" where there is none."""
    return next((value for key, value in connection.headers if key.lower() == name), b"")


def _inflation_of(connection: Connection) -> "zlib._Decompress | None":
    """What undoes its answer's content coding; None: it has none."""
    coding = _header(connection, b"content-encoding").lower()
    return None if coding in (b"", b"identity") else zlib.decompressobj(_GZIP_OR_ZLIB)


def _inflated(inflate: "zlib._Decompress", chunk: bytes) -> bytes:
    try:
        return inflate.decompress(chunk)
    except zlib.error as error:
        raise EngineLost(f"its content coding cannot be undone: {error}") from None
