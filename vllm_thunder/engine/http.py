"""The HTTP edge of the engine: labels model calls with their turn, and serves ``/programs`` and
``/metrics``.

``vllm_thunder serve`` gives :class:`ProgramMiddleware` to vLLM's own ``--middleware`` flag, so it
stands outside all of vLLM's middleware in every API server process.
"""

import asyncio
import uuid
from argparse import Namespace
from collections import deque
from collections.abc import Iterable
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest, make_asgi_app
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from vllm import envs
from vllm.entrypoints.serve.middleware.authenticate import (
    GUARDED_PREFIX,
    AuthenticationMiddleware,
)
from vllm.entrypoints.serve.middleware.x_request_id import XRequestIdMiddleware
from vllm.logger import init_logger
from vllm.v1.metrics.prometheus import get_prometheus_registry

from vllm_thunder.engine.body import acceptable_body
from vllm_thunder.engine.client import EnginePrograms, FreshAnswer
from vllm_thunder.engine.errors import bad_request
from vllm_thunder.engine.metrics import ProgramCollector, Registries
from vllm_thunder.engine.routes import ROUTES, build_routes
from vllm_thunder.program.context import current_turn
from vllm_thunder.program.errors import IdentityError
from vllm_thunder.program.identity import (
    HEADER_NAMES,
    RoutingFields,
    decode_routing_fields,
    resolve_turn,
)
from vllm_thunder.program.turn import Turn

__all__ = ["ENGINE_PATHS", "METRICS_SECONDS", "ProgramMiddleware"]

logger = init_logger(f"vllm.{__name__}")  # below vLLM's: its level and handlers

#: Every endpoint of vLLM whose POST requests reach the engine.
ENGINE_PATHS = frozenset(
    {
        "/classify",
        "/cohere/v2/chat",
        "/generative_scoring",
        "/inference/v1/generate",
        "/invocations",
        "/pooling",
        "/rerank",
        "/score",
        "/v1/audio/transcriptions",
        "/v1/audio/translations",
        "/v1/chat/completions",
        "/v1/chat/completions/batch",
        "/v1/completions",
        "/v1/embeddings",
        "/v1/messages",
        "/v1/rerank",
        "/v1/responses",
        "/v1/score",
        "/v1/systemone",
        "/v2/embed",
        "/v2/rerank",
    }
)

#: Seconds for which a scrape waits for the engines; below Prometheus' usual limit of 10.
METRICS_SECONDS = 5.0

_METRICS_PATHS = ("/metrics", "/metrics/")
_WANTED_HEADERS = frozenset(name.encode() for name in HEADER_NAMES)


class ProgramMiddleware:
    """Pure ASGI middleware around vLLM's server application.

    A POST to one of :data:`ENGINE_PATHS` is served with :data:`current_turn` set to the turn
    that it is. Its body is passed on byte for byte, or, if it is labelled and vLLM's own models
    would refuse how, as :func:`~vllm_thunder.engine.body.acceptable_body` makes it. Requests that
    vLLM will answer with 401 or 400 by itself pass untouched. Responses are not looked at.
    """

    def __init__(self, app: ASGIApp):
        self._app = app
        self._edge: _Edge | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        # By default uvicorn starts a pipelined request in the context of the one before it.
        token = current_turn.set(None)
        try:
            if scope["type"] == "websocket":
                await self._app(scope, receive, send)
            else:
                await self._serve(scope, receive, send)
        finally:
            current_turn.reset(token)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, method = _path_of(scope), scope["method"]
        if path == ROUTES or path.startswith(ROUTES + "/"):
            await self._edge_of(scope).routes(scope, receive, send)
        elif method == "GET" and path in _METRICS_PATHS:
            await self._edge_of(scope).metrics(path, scope, receive, send)
        elif method == "POST" and path in ENGINE_PATHS:
            await self._serve_model_call(path, scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _serve_model_call(
        self, path: str, scope: Scope, receive: Receive, send: Send
    ) -> None:
        edge = self._edge_of(scope)
        if path.startswith(GUARDED_PREFIX) and not edge.has_key(scope):
            await self._app(scope, receive, send)  # answers 401
            return
        headers = _identity_headers(scope)
        messages: list[Message] = []
        body, fields = None, None
        if _is_json(scope):
            messages, body = await _read(receive)
            fields = decode_routing_fields(body) if body is not None else None
        try:
            turn = resolve_turn(headers, fields, path=path, new_turn_id=_new_turn_id)
        except IdentityError as error:
            await edge.answer(bad_request(path, str(error), error.field), scope, receive, send)
            return
        if turn is not None and body is not None and fields is not None:
            messages = _with_acceptable_body(messages, body, fields, scope)
        await self._call_model(turn, edge, scope, _replay(messages, receive), send)

    async def _call_model(
        self, turn: Turn | None, edge: "_Edge", scope: Scope, receive: Receive, send: Send
    ) -> None:
        token = current_turn.set(turn)
        try:
            await self._app(scope, receive, send)
        finally:
            current_turn.reset(token)
            if turn is not None and turn.fans_out:
                edge.end_turn(turn)

    def _edge_of(self, scope: Scope) -> "_Edge":
        if self._edge is None:
            state = scope["app"].state
            self._edge = _Edge(state.args, EnginePrograms(state.engine_client))
        return self._edge


class _Edge:
    """What one API server process needs besides vLLM's application; built on first use, when
    vLLM has put its arguments and its engine client into the application's state."""

    def __init__(self, args: Namespace, programs: EnginePrograms):
        self._args = args
        self._programs = programs
        self._metrics = FreshAnswer(programs.metrics, METRICS_SECONDS)
        self._ending: set[asyncio.Task[None]] = set()
        tokens = [key for key in (args.api_key or [envs.VLLM_API_KEY]) if key]
        routes = build_routes(programs)
        self._keys = AuthenticationMiddleware(routes, tokens) if tokens else None
        self.routes = self._dressed(self._guarded(routes))

    def has_key(self, scope: Scope) -> bool:
        """Whether vLLM lets this request on a guarded path through."""
        return self._keys is None or self._keys.verify_token(Headers(scope=scope))

    async def answer(self, response: Response, scope: Scope, receive: Receive, send: Send) -> None:
        """Send a response of ours in place of vLLM's."""
        await self._dressed(response)(scope, receive, send)

    async def metrics(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        """vLLM's families and ours, in the formats that vLLM gives: text at ``/metrics``, and at
        ``/metrics/`` what the client's headers and query ask for."""
        try:
            values: dict[str, Any] | None = await self._metrics.get()
        except Exception as error:
            logger.warning("No program metrics: the engine did not answer (%r)", error)
            values = None
        families = Registries(get_prometheus_registry(), ProgramCollector(values))
        if path.endswith("/"):
            await make_asgi_app(families)(scope, receive, send)
        else:
            text = await run_in_threadpool(generate_latest, families)
            await Response(text, headers={"content-type": CONTENT_TYPE_LATEST})(
                scope, receive, send
            )

    def end_turn(self, turn: Turn) -> None:
        """Tell the engines that the HTTP request of a turn that fans out is over.

        In the background: the request's own task may be ending by cancellation.
        """
        task = asyncio.create_task(self._end_turn(turn))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _end_turn(self, turn: Turn) -> None:
        try:
            await self._programs.end_turn(turn.program_id, turn.turn_id)
        except Exception:  # a dead engine raises anything, and nobody waits for this task
            logger.exception("The engine was not told that turn %s is over", turn.turn_id)

    def _guarded(self, routes: ASGIApp) -> ASGIApp:
        async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
            # vLLM guards its own prefixes only; the rule and the answer are the same.
            if scope["method"] == "OPTIONS" or self.has_key(scope):
                await routes(scope, receive, send)
            else:
                refusal = JSONResponse({"error": "Unauthorized"}, status_code=401)
                await refusal(scope, receive, send)

        return guarded

    def _dressed(self, app: ASGIApp) -> ASGIApp:
        """Inside the middleware that vLLM would put around a route of its own."""
        args = self._args
        app = CORSMiddleware(
            app,
            allow_origins=args.allowed_origins,
            allow_credentials=args.allow_credentials,
            allow_methods=args.allowed_methods,
            allow_headers=args.allowed_headers,
        )
        return XRequestIdMiddleware(app) if args.enable_request_id_headers else app


def _new_turn_id() -> str:
    return uuid.uuid4().hex


def _path_of(scope: Scope) -> str:
    """The path without the server's root path, as Starlette routes it."""
    path, root = scope["path"], scope.get("root_path", "").rstrip("/")
    if root and (path == root or path.startswith(root + "/")):
        return path[len(root) :]
    return path


def _identity_headers(scope: Scope) -> dict[str, str]:
    """The headers that can name a program; of a repeated one the first, as vLLM reads them."""
    headers: dict[str, str] = {}
    for name, value in scope["headers"]:
        if name in _WANTED_HEADERS:
            headers.setdefault(name.decode(), value.decode("latin-1"))
    return headers


def _is_json(scope: Scope) -> bool:
    media_type = Headers(scope=scope).get("content-type", "").split(";")[0].strip().lower()
    return media_type == "application/json" or media_type.endswith("+json")


async def _read(receive: Receive) -> tuple[list[Message], bytes | None]:
    """The request's messages up to the end of its body, and the body; None when the client
    disconnected before that."""
    messages, chunks = [], []
    while True:
        message = await receive()
        if message["type"] != "http.request":
            messages.append(message)
            return messages, None
        messages.append(message)
        chunks.append(message.get("body", b""))
        if not message.get("more_body", False):
            break
    body = chunks[0] if len(chunks) == 1 else b"".join(chunks)
    return [_whole(body)], body


def _whole(body: bytes) -> Message:
    return {"type": "http.request", "body": body, "more_body": False}


def _replay(messages: Iterable[Message], receive: Receive) -> Receive:
    """Receives ``messages`` first, then whatever comes, such as the client's disconnect."""
    pending = deque(messages)

    async def replayed() -> Message:
        return pending.popleft() if pending else await receive()

    return replayed


def _with_acceptable_body(
    messages: list[Message], body: bytes, fields: RoutingFields, scope: Scope
) -> list[Message]:
    accepted = acceptable_body(body, fields)
    if accepted is body:
        return messages
    length = str(len(accepted)).encode()
    scope["headers"] = [
        (name, length if name == b"content-length" else value) for name, value in scope["headers"]
    ]
    return [_whole(accepted)]
