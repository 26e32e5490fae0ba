"""Passes requests on to engines, and their answers back, byte for byte."""

import asyncio
from collections.abc import Awaitable, Callable
from time import monotonic
from typing import TYPE_CHECKING

from starlette.types import Message, Receive, Scope, Send

from vllm_thunder.asgi import path_of
from vllm_thunder.coordinator.calls import Calls
from vllm_thunder.coordinator.dispatcher import Dispatcher
from vllm_thunder.coordinator.fleet.backend import Backend
from vllm_thunder.coordinator.fleet.fleet import Fleet
from vllm_thunder.coordinator.proxy.connection import Connection, EngineLost
from vllm_thunder.coordinator.proxy.exchange import Exchange, Outcome
from vllm_thunder.coordinator.proxy.heads import RequestHead, request_id_of, value_of
from vllm_thunder.coordinator.proxy.model_call import ModelCall
from vllm_thunder.coordinator.proxy.pool import ConnectionPool
from vllm_thunder.coordinator.proxy.reply import Departure, Reply
from vllm_thunder.coordinator.proxy.request_body import BodyTooLarge
from vllm_thunder.coordinator.proxy.stored import StoredCall
from vllm_thunder.coordinator.proxy.upstream import Ongoing, Server, Upstream
from vllm_thunder.coordinator.replicas.replicas import Replicas

if TYPE_CHECKING:
    from vllm_thunder.coordinator.tracing import Tracing

__all__ = ["Proxy"]


class Proxy:
    """Forwards requests, each in the task that the server runs for it.

    ``calls`` learns from every model call, and says what is known of one before it is sent.
    ``on_failure(backend)``: this engine misbehaved, look
    at it now; True: it is up all the same, False: it has been declared down. ``on_done`` is told of
    every request when it is over. ``max_body_bytes``: of a request. ``keepalive_seconds``: after
    how long without a byte a held stream gets a comment. ``connect_seconds``: how long an engine
    may take to accept a connection. ``engine_key``: API key for the engines in place of the
    client's own, which was checked; None: the client's is passed on, for them to check.
    ``replicas``: coordinators that programs are shared with; None: this one has them all.
    ``tracing``: makes a span of every model call; None: trace headers are passed on like any other.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        pool: ConnectionPool,
        *,
        calls: Calls,
        on_failure: Callable[[Backend], Awaitable[bool]],
        on_done: Callable[[Exchange], None],
        max_body_bytes: int,
        keepalive_seconds: float,
        connect_seconds: float,
        engine_key: str | None = None,
        replicas: Replicas | None = None,
        tracing: "Tracing | None" = None,
    ):
        self.dispatcher = dispatcher
        self.pool = pool
        self.calls = calls
        self.on_failure = on_failure
        self.on_done = on_done
        self.max_body_bytes = max_body_bytes
        self.keepalive_seconds = keepalive_seconds
        self.connect_seconds = connect_seconds
        self.engine_key = engine_key
        self.replicas = replicas
        self.tracing = tracing
        self.ongoing = Ongoing()

    @property
    def fleet(self) -> Fleet:
        return self.dispatcher.fleet

    async def model_call(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a POST to one of :data:`~vllm_thunder.program.endpoints.MODEL_CALLS`.

        A call of which no byte of an answer went out goes to another engine when its own is lost.
        Returns without completing the response where an answer was cut: the server then has to
        close the connection.
        """
        await ModelCall(self, scope, send).run(receive)

    async def stored_call(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request below :data:`~vllm_thunder.coordinator.proxy.stored.STORED_PREFIX` by
        the server that knows the response; 502 when none that answers does and not all answer."""
        await StoredCall(self, scope, send).run(receive)

    async def pass_on(self, scope: Scope, receive: Receive, send: Send, backend: Backend) -> None:
        """Serve any other request by one engine, its body passed on as it comes."""
        request_id = request_id_of(scope["headers"])
        exchange = Exchange(path_of(scope), request_id=request_id, backend_id=backend.backend_id)
        reply = Reply(scope, send, exchange)
        upstream = Upstream(self.pool, self.ongoing, self.connect_seconds)
        passage = _Passage(self, scope, upstream, reply, exchange)
        began = monotonic()
        try:
            await passage.run(receive, backend)
        finally:
            upstream.drop()
            exchange.total_seconds = monotonic() - began
            self.on_done(exchange)
        if passage.lost and backend.usable:
            await self.on_failure(backend)

    def abandon(self, server: Server) -> None:
        """An engine, or a replica, was declared down: all that is with it ends there, and goes
        elsewhere where nothing was sent to the client yet."""
        for upstream in self.ongoing.at(server):
            upstream.abandon("it is down")


class _Passage:
    """One request that one given engine answers."""

    def __init__(
        self, proxy: Proxy, scope: Scope, upstream: Upstream, reply: Reply, exchange: Exchange
    ):
        self._proxy = proxy
        self._scope = scope
        self._upstream = upstream
        self._reply = reply
        self._exchange = exchange
        self._head = RequestHead(scope, proxy.engine_key)
        #: Bytes of the body; None: it comes in chunks.
        self._length = _declared_length(scope)
        self._sent_whole = self._length == 0
        self._too_large = False
        self.lost = False

    async def run(self, receive: Receive, backend: Backend) -> None:
        if self._length is not None and self._length > self._proxy.max_body_bytes:
            await self._refuse_size()
            return
        departure = Departure(receive) if self._sent_whole else None
        exchange = self._exchange
        try:
            sent = monotonic()
            exchange.attempts = 1
            if self._sent_whole:
                await self._upstream.ask(backend, self._head, b"", 0.0)
            else:
                connection = await self._upstream.open(backend, self._head, self._length)
                departure = Departure(receive, lambda m: self._upload(m, connection))
                await connection.answered()
            assert self._upstream.connection is not None
            chunk = await self._upstream.connection.chunk()
            exchange.first_byte_seconds = monotonic() - sent
            await self._reply.relay(self._upstream.connection, chunk)
        except EngineLost as lost:
            await self._end(backend, lost)
        except asyncio.CancelledError:
            if departure is None or not departure.caused_it():
                raise
        finally:
            if departure is not None:
                departure.close()
            if not self._sent_whole and self._upstream.connection is not None:
                self._upstream.connection.abort("its request was not sent whole")

    async def _end(self, backend: Backend, lost: EngineLost) -> None:
        if self._too_large and not self._reply.begun:
            await self._refuse_size()
            return
        self.lost = not self._too_large
        if self._reply.begun:
            await self._reply.cut(502, f"the engine was lost while it answered ({lost})")
        else:
            await self._reply.refuse(502, f"engine {backend.backend_id} did not answer: {lost}")
            self._exchange.outcome = Outcome.ENGINE_LOST

    async def _refuse_size(self) -> None:
        await self._reply.refuse(413, str(BodyTooLarge(f"{self._proxy.max_body_bytes} bytes")))

    async def _upload(self, message: Message, connection: Connection) -> None:
        if self._sent_whole or self._too_large:
            return
        data = message.get("body", b"")
        self._exchange.prompt_bytes += len(data)
        if self._exchange.prompt_bytes > self._proxy.max_body_bytes:
            self._too_large = True
            self._upstream.abandon("the request body is too large")
            return
        chunked = self._length is None
        if data:
            connection.write(b"%x\r\n%b\r\n" % (len(data), data) if chunked else data)
        if not message.get("more_body", False):
            if chunked:
                connection.write(b"0\r\n\r\n")
            self._sent_whole = True


def _declared_length(scope: Scope) -> int | None:
    if value_of(scope["headers"], b"transfer-encoding"):
        return None
    declared = value_of(scope["headers"], b"content-length")
    return int(declared) if declared.isdigit() else 0
