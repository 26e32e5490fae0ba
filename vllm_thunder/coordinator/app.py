"""The coordinator as one ASGI application: who is asked what, and who may ask."""

import hmac
from collections.abc import Sequence
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from vllm_thunder.asgi import path_of, replay
from vllm_thunder.coordinator.admin import ADMIN_PATHS
from vllm_thunder.coordinator.broadcast import BROADCAST_PATHS, SINGLE_ENGINE_PATHS, Broadcast
from vllm_thunder.coordinator.fleet.fleet import Fleet
from vllm_thunder.coordinator.proxy.answers import refusal
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
    """``api_keys``: clients must have one of them; none: engines are left to refuse."""

    def __init__(
        self,
        fleet: Fleet,
        proxy: Proxy,
        admin: ASGIApp,
        broadcast: Broadcast,
        api_keys: Sequence[str],
    ):
        self._fleet = fleet
        self._proxy = proxy
        self._admin = admin
        self._broadcast = broadcast
        self._keys = [f"Bearer {key}".encode() for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1003, "reason": "HTTP only"})
            return
        path, method = path_of(scope), scope["method"]
        if self._keys and path not in _OPEN_PATHS and not self._has_key(scope):
            await _refuse(send, path, 401, "The API key is missing or wrong.")
        elif has_other_coding(scope):
            await _refuse(send, path, 501, "No transfer coding but chunked can be read.")
        elif method == "POST" and (path in MODEL_CALLS or path in _OTHER_MODEL_CALLS):
            await self._proxy.model_call(scope, receive, send)
        elif _is_admin(path):
            await self._within_limit(self._admin, scope, receive, send)
        elif method == "POST" and path in BROADCAST_PATHS:
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

    def _has_key(self, scope: Scope) -> bool:
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        # All are compared, in constant time: how long it takes tells nothing.
        return sum(hmac.compare_digest(given, key) for key in self._keys) > 0


def _is_admin(path: str) -> bool:
    return any(path == own or path.startswith(own + "/") for own in ADMIN_PATHS)


async def _refuse(send: Send, path: str, status: int, message: str) -> None:
    headers, body = refusal(path, status, message)
    start: dict[str, Any] = {"type": "http.response.start", "status": status, "headers": headers}
    await send(start)
    await send({"type": "http.response.body", "body": body})
