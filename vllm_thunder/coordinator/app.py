"""The coordinator as one ASGI application: who is asked what, and who may ask."""

import hmac
from collections.abc import Sequence
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from vllm_thunder.asgi import path_of, replay
from vllm_thunder.coordinator.admin import ADMIN_PATHS
from vllm_thunder.coordinator.broadcast import SINGLE_ENGINE_PATHS, Broadcast, is_broadcast
from vllm_thunder.coordinator.fleet.fleet import Fleet
from vllm_thunder.coordinator.proxy.answers import refusal
from vllm_thunder.coordinator.proxy.heads import value_of
from vllm_thunder.coordinator.proxy.proxy import Proxy
from vllm_thunder.coordinator.proxy.request_body import (
    BodyTooLarge,
    body_within,
    has_other_coding,
)
from vllm_thunder.coordinator.proxy.stored import STORED_PREFIX
from vllm_thunder.program.endpoints import MODEL_CALLS

__all__ = ["Coordinator"]

#: Model calls of engines other than vLLM: SGLang's own endpoint.
_OTHER_MODEL_CALLS = frozenset({"/generate"})
#: Whoever checks whether a server is alive has no key.
_OPEN_PATHS = frozenset({"/health", "/ping"})


class Coordinator:
    """``api_keys``: clients must have one of them; none: engines are left to refuse. ``own_key``:
    what engines are shown when the coordinator asks for itself; whoever has it do so must have a
    key, that one if there is no other."""

    def __init__(
        self,
        fleet: Fleet,
        proxy: Proxy,
        admin: ASGIApp,
        broadcast: Broadcast,
        api_keys: Sequence[str],
        own_key: str | None = None,
    ):
        self._fleet = fleet
        self._proxy = proxy
        self._admin = admin
        self._broadcast = broadcast
        self._keys = [key.encode() for key in api_keys]
        self._admin_keys = self._keys or ([] if own_key is None else [own_key.encode()])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1003, "reason": "HTTP only"})
            return
        path, method = path_of(scope), scope["method"]
        keys = self._admin_keys if _is_admin(path) else self._keys
        # As in vLLM: browsers ask without a key whether they may send one.
        is_open = path in _OPEN_PATHS or method == "OPTIONS"
        if keys and not is_open and not _has_one_of(keys, scope):
            await _refuse(send, path, 401, "The API key is missing or wrong.")
        elif has_other_coding(scope):
            await _refuse(send, path, 501, "No transfer coding but chunked can be read.")
        elif method == "POST" and (path in MODEL_CALLS or path in _OTHER_MODEL_CALLS):
            await self._proxy.model_call(scope, receive, send)
        elif _is_admin(path):
            await self._within_limit(self._admin, scope, receive, send)
        elif method != "OPTIONS" and is_broadcast(path):
            await self._within_limit(self._broadcast, scope, receive, send)
        elif path.startswith(STORED_PREFIX):
            await self._proxy.stored_call(scope, receive, send)
        elif path in SINGLE_ENGINE_PATHS:
            problem = "This has to say something else to each engine: ask the engines themselves."
            await _refuse(send, path, 400, problem)
        else:
            await self._ask_one(path, scope, receive, send)

    async def _within_limit(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """``app``, which reads bodies whole, sees none that is larger than a body may be."""
        try:
            body = await body_within(self._proxy.max_body_bytes, scope, receive)
        except BodyTooLarge as error:
            await _refuse(send, path_of(scope), 413, str(error))
            return
        if body is not None:
            whole = {"type": "http.request", "body": body, "more_body": False}
            await app(scope, replay([whole], receive), send)

    async def _ask_one(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        backend = self._fleet.least_busy()
        if backend is None:
            await _refuse(send, path, 503, "No engine can be used now.")
        else:
            await self._proxy.pass_on(scope, receive, send, backend)


def _has_one_of(keys: Sequence[bytes], scope: Scope) -> bool:
    scheme, _, given = value_of(scope["headers"], b"authorization").partition(b" ")
    # All are compared, in constant time: how long it takes tells nothing.
    return scheme.lower() == b"bearer" and sum(hmac.compare_digest(given, key) for key in keys) > 0


def _is_admin(path: str) -> bool:
    return any(path == own or path.startswith(own + "/") for own in ADMIN_PATHS)


async def _refuse(send: Send, path: str, status: int, message: str) -> None:
    headers, body = refusal(path, status, message)
    start: dict[str, Any] = {"type": "http.response.start", "status": status, "headers": headers}
    await send(start)
    await send({"type": "http.response.body", "body": body})
