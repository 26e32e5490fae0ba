"""Requests about a stored response, which only the server that made it knows."""

from __future__ import annotations

import asyncio
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING

from starlette.types import Receive, Scope, Send

from vllm_thunder.asgi import path_of
from vllm_thunder.coordinator.fleet.backend import Backend, Health
from vllm_thunder.coordinator.proxy.connection import EngineLost
from vllm_thunder.coordinator.proxy.exchange import Exchange, Outcome
from vllm_thunder.coordinator.proxy.heads import RequestHead, request_id_of
from vllm_thunder.coordinator.proxy.reply import Departure, Reply
from vllm_thunder.coordinator.proxy.request_body import BodyTooLarge, body_within
from vllm_thunder.coordinator.proxy.upstream import Upstream

if TYPE_CHECKING:
    from vllm_thunder.coordinator.proxy.proxy import Proxy

__all__ = ["STORED_PREFIX", "StoredCall"]

#: Every path below it is about one stored response.
STORED_PREFIX = "/v1/responses/"


class StoredCall:
    """Serves one such request: servers are asked one after the other, in the order in which they
    joined, and the first answer that is not 404 is passed on as it came.

    Who made which response is in their answers, which are not read here; an engine says at once
    that it does not know one.
    """

    __slots__ = ("_exchange", "_problems", "_proxy", "_reply", "_scope", "_suspects", "_upstream")

    def __init__(self, proxy: Proxy, scope: Scope, send: Send):
        self._proxy = proxy
        self._scope = scope
        self._exchange = Exchange(path_of(scope), request_id=request_id_of(scope["headers"]))
        self._reply = Reply(scope, send, self._exchange)
        self._upstream = Upstream(proxy.pool, proxy.ongoing, proxy.connect_seconds)
        #: Of servers that may know the response and cannot say so.
        self._problems: list[str] = []
        self._suspects: list[Backend] = []

    async def run(self, receive: Receive) -> None:
        exchange = self._exchange
        began = monotonic()
        departure: Departure | None = None
        try:
            body = await body_within(self._proxy.max_body_bytes, self._scope, receive)
            if body is None:
                return
            exchange.prompt_bytes = len(body)
            departure = Departure(receive)
            await self._ask_servers(body)
        except BodyTooLarge as error:
            await self._reply.refuse(413, str(error))
        except asyncio.CancelledError:
            if departure is None or not departure.caused_it():
                raise
        finally:
            if departure is not None:
                departure.close()
            self._upstream.drop()
            exchange.total_seconds = monotonic() - began
            self._proxy.on_done(exchange)
        for backend in self._suspects:
            if backend.usable:
                await self._proxy.on_failure(backend)

    async def _ask_servers(self, body: bytes) -> None:
        servers = self._servers()
        if not servers:
            await self._reply.refuse(503, "No engine can be used now.")
            return
        head = RequestHead(self._scope, self._proxy.engine_key)
        for backend in servers:
            try:
                chunk = await self._asked(backend, head, body)
            except EngineLost as lost:
                self._upstream.drop()
                self._suspects.append(backend)
                self._problems.append(f"{backend.backend_id}: {lost}")
                continue
            connection = self._upstream.connection
            assert connection is not None
            if connection.status != 404 or (backend is servers[-1] and not self._problems):
                await self._pass_on(backend, chunk)
                return
            self._upstream.drop()
        problems = "; ".join(self._problems)
        await self._reply.refuse(
            502, f"no engine that answers has this response, and not all answer: {problems}"
        )
        self._exchange.outcome = Outcome.ENGINE_LOST

    def _servers(self) -> list[Backend]:
        """One engine of each server: what is stored is stored for all of its ranks."""
        servers: dict[str, Backend] = {}
        for backend in self._proxy.fleet.backends.values():
            known = servers.get(backend.url)
            if known is None or known.health is Health.DOWN:
                servers[backend.url] = backend
        down = [backend for backend in servers.values() if backend.health is Health.DOWN]
        self._problems += [f"{backend.backend_id}: it is down" for backend in down]
        return [backend for backend in servers.values() if backend.health is not Health.DOWN]

    async def _asked(self, backend: Backend, head: RequestHead, body: bytes) -> bytes:
        """The first of what it answers."""
        exchange = self._exchange
        exchange.backend_id = backend.backend_id
        exchange.attempts = 1 + len(self._suspects)  # who says 404 has answered
        sent = monotonic()
        await self._upstream.ask(backend, head, body, 0.0)
        chunk = await self._upstream.first_chunk(partial(self._proxy.on_failure, backend))
        exchange.first_byte_seconds = monotonic() - sent
        return chunk

    async def _pass_on(self, backend: Backend, chunk: bytes) -> None:
        connection = self._upstream.connection
        assert connection is not None
        try:
            await self._reply.relay(connection, chunk)
        except EngineLost as lost:
            self._suspects.append(backend)
            await self._reply.cut(502, f"the engine was lost while it answered ({lost})")
