"""ASGI middleware for tests only: lets a test look into the engine over HTTP.

Given to the server with ``--middleware``; it stands inside ours and never sees a model call that
ours answers itself.
"""

import asyncio
import os
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from vllm_thunder.engine.client import EnginePrograms

CHECK = "/test/integrity"


class IntegrityMiddleware:
    """``GET /test/integrity``: a full recount of the books in every engine core, and the pid of
    the API server that answered."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != CHECK:
            await self._app(scope, receive, send)
            return
        programs = EnginePrograms(scope["app"].state.engine_client)
        await JSONResponse(await _check(programs))(scope, receive, send)


async def _check(programs: EnginePrograms) -> dict[str, Any]:
    problem = None
    try:
        async with asyncio.timeout(60):
            await programs.call("check_integrity")
    except Exception as error:
        problem = repr(error)
    return {"problem": problem, "pid": os.getpid()}
