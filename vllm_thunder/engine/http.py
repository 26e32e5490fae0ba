"""The HTTP edge of the engine: labels model calls with their turn, and serves ``/programs`` and
``/metrics``.

``vllm_thunder serve`` gives :class:`ProgramMiddleware` to vLLM's own ``--middleware`` flag, so it
stands outside all of vLLM's middleware in every API server process.
"""

import asyncio
from argparse import Namespace
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

from vllm_thunder.asgi import (
    has_json_body,
    identity_headers,
    new_turn_id,
    path_of,
    read_body,
    replay,
    whole_body,
)
from vllm_thunder.engine.client import EnginePrograms, FreshAnswer
from vllm_thunder.engine.errors import bad_request
from vllm_thunder.engine.metrics import ProgramCollector, Registries
from vllm_thunder.engine.ranks import RankFollower
from vllm_thunder.engine.routes import build_routes
from vllm_thunder.program.body import acceptable_body
from vllm_thunder.program.context import current_turn
from vllm_thunder.program.endpoints import MODEL_CALLS, PROGRAM_ROUTES
from vllm_thunder.program.errors import IdentityError
from vllm_thunder.program.identity import (
    RoutingFields,
    decode_routing_fields,
    resolve_turn,
)
from vllm_thunder.program.turn import Turn

__all__ = ["METRICS_SECONDS", "ProgramMiddleware"]

logger = init_logger(f"vllm.{__name__}")  # below vLLM's: its level and handlers

#: Seconds for which a scrape waits for the engines; below Prometheus' usual limit of 10.
METRICS_SECONDS = 5.0

_METRICS_PATHS = ("/metrics", "/metrics/")


class ProgramMiddleware:
    """Pure ASGI middleware around vLLM's server application.

    A POST to one of :data:`~vllm_thunder.program.endpoints.MODEL_CALLS` is served with
    :data:`current_turn` set to the turn that it is. Its body is passed on byte for byte, or, if it
    is labelled and vLLM's own models would refuse how, as
    :func:`~vllm_thunder.program.body.acceptable_body` makes it. Requests that
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
        path, method = path_of(scope), scope["method"]
        if path == PROGRAM_ROUTES or path.startswith(PROGRAM_ROUTES + "/"):
            await self._edge_of(scope).routes(scope, receive, send)
        elif method == "GET" and path in _METRICS_PATHS:
            await self._edge_of(scope).metrics(path, scope, receive, send)
        elif method == "POST" and path in MODEL_CALLS:
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
        headers = identity_headers(scope)
        messages: list[Message] = []
        body, fields = None, None
        if has_json_body(scope):
            messages, body = await read_body(receive)
            fields = decode_routing_fields(body) if body is not None else None
        try:
            turn = resolve_turn(headers, fields, path=path, new_turn_id=new_turn_id)
        except IdentityError as error:
            await edge.answer(bad_request(path, str(error), error.field), scope, receive, send)
            return
        if turn is not None and body is not None and fields is not None:
            messages = _with_acceptable_body(messages, body, fields, scope)
        await self._call_model(turn, edge, scope, replay(messages, receive), send)

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
            client = state.engine_client
            self._edge = _Edge(state.args, EnginePrograms(client), client.engine_core)
        return self._edge


class _Edge:
    """What one API server process needs besides vLLM's application; built on first use, when
    vLLM has put its arguments and its engine client into the application's state."""

    def __init__(self, args: Namespace, programs: EnginePrograms, core_client: Any):
        self._ranks = RankFollower(programs, core_client) if programs.ranks > 1 else None
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
    return [whole_body(accepted)]
