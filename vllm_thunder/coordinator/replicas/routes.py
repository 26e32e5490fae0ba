"""Requests about one program, other than its turns: they go where the program is."""

import asyncio
from functools import partial
from time import monotonic
from typing import Any

import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send

from vllm_thunder.asgi import path_of, read_body, replay
from vllm_thunder.coordinator.proxy.connection import EngineLost
from vllm_thunder.coordinator.proxy.exchange import Exchange
from vllm_thunder.coordinator.proxy.heads import RequestHead, value_of
from vllm_thunder.coordinator.proxy.proxy import Proxy
from vllm_thunder.coordinator.proxy.reply import Departure, Reply
from vllm_thunder.coordinator.proxy.upstream import Upstream
from vllm_thunder.coordinator.replicas.replicas import Replica, Replicas
from vllm_thunder.program.endpoints import REPLICA_HEADER
from vllm_thunder.program.errors import IdentityError
from vllm_thunder.program.values import program_id_of

__all__ = ["ProgramRoutes"]

#: What names its program in the body, and what names it in the path.
_POSTS = frozenset({"/programs/release", "/programs/tool"})
_GETS = ("/programs/", "/profiles/")

_REPLICA = REPLICA_HEADER.encode()


class _Named(msgspec.Struct):
    program_id: Any = None


_decoder = msgspec.json.Decoder(_Named)


class ProgramRoutes:
    """Answers for ``routes``: what is about a program of another replica is answered there, or by
    ``routes`` where it is about none, was passed on before, or that replica is lost before a byte
    of an answer came."""

    def __init__(self, routes: ASGIApp, replicas: Replicas, proxy: Proxy):
        self._routes = routes
        self._replicas = replicas
        self._proxy = proxy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, method = path_of(scope), scope["method"]
        posted = method == "POST" and path in _POSTS
        asked = method == "GET" and path.startswith(_GETS)
        if not (posted or asked) or value_of(scope["headers"], _REPLICA):
            await self._routes(scope, receive, send)
            return
        messages, body = await read_body(receive)
        program_id = None
        if body is not None:
            program_id = _named_in(body) if posted else _id_of(path.split("/", 2)[2])
        owner = None if program_id is None else self._replicas.owner(program_id)
        if owner is not None and body is not None:
            exchange = Exchange(path, program_id, replica=owner.url, prompt_bytes=len(body))
            if await self._answered(owner, exchange, scope, body, receive, send):
                return
        await self._routes(scope, replay(messages, receive), send)

    async def _answered(
        self,
        owner: Replica,
        exchange: Exchange,
        scope: Scope,
        body: bytes,
        receive: Receive,
        send: Send,
    ) -> bool:
        """Whether there was an answer, whole or not, or nobody waits for it any more."""
        proxy = self._proxy
        reply = Reply(scope, send, exchange)
        upstream = Upstream(proxy.pool, proxy.ongoing, proxy.connect_seconds)
        departure = Departure(receive)
        began = monotonic()
        try:
            head = RequestHead(scope, passed_on_by=self._replicas.own)
            await upstream.ask(owner, head, body, 0.0)
            chunk = await upstream.first_chunk(partial(self._replicas.still_well, owner))
            exchange.first_byte_seconds = monotonic() - began
            assert upstream.connection is not None
            await reply.relay(upstream.connection, chunk)
        except EngineLost as lost:
            self._replicas.look(owner)
            if not reply.begun:
                return False
            await reply.cut(502, f"replica {owner.url} was lost while it answered ({lost})")
        except asyncio.CancelledError:
            if not departure.caused_it():
                raise
        finally:
            departure.close()
            upstream.drop()
        exchange.total_seconds = monotonic() - began
        proxy.on_done(exchange)
        return True


def _named_in(body: bytes) -> str | None:
    try:
        return _id_of(_decoder.decode(body).program_id)
    except (msgspec.DecodeError, RecursionError):
        return None


def _id_of(value: Any) -> str | None:
    """None where it is no id: the routes say why."""
    try:
        return program_id_of(value)
    except IdentityError:
        return None
