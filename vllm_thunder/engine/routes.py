"""The HTTP routes about programs, on the engine's own server.

    POST /programs/release           {"program_id": "a"} -> {"program_id": "a", "released": true}
    GET  /programs                   {"programs": [...]}
    GET  /programs?program_id=a      the same record as /programs/a, for every possible id
    GET  /programs/{program_id}      any id, percent-encoded, slashes included
    GET  /programs/summary           totals; a program called "summary" is at ?program_id=summary

A release never fails for an unknown id ("released" is false), and answers at once while turns
are in flight ("pending" is true): the program goes when they have ended.
"""

from collections.abc import Awaitable
from http import HTTPStatus
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.convertors import Convertor, register_url_convertor
from starlette.exceptions import HTTPException
from starlette.responses import Response
from vllm.logger import init_logger

from vllm_thunder.engine.client import EnginePrograms
from vllm_thunder.engine.errors import error_response
from vllm_thunder.program.errors import IdentityError
from vllm_thunder.program.identity import program_id_of

__all__ = ["ROUTES", "build_routes"]

logger = init_logger(__name__)

#: Every path that :func:`build_routes` serves starts with this.
ROUTES = "/programs"


class _AnyText(Convertor[str]):
    """Like Starlette's ``path``, which stops at a newline."""

    regex = r"(?s:.*)"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


register_url_convertor("any_text", _AnyText())


class _Release(msgspec.Struct):
    program_id: Any = None


_release_decoder = msgspec.json.Decoder(_Release)


def build_routes(programs: EnginePrograms) -> FastAPI:
    """An application with the routes above; every error has OpenAI's shape.

    The caller answers for API keys and cross-origin headers.
    """
    app = FastAPI(openapi_url=None, exception_handlers={HTTPException: _http_error})

    @app.post("/programs/release")
    async def release(request: Request) -> Response:
        try:
            wanted = _release_decoder.decode(await request.body())
            if wanted.program_id is None:
                raise IdentityError("program_id", "is missing")
            program_id = program_id_of(wanted.program_id)
        except msgspec.DecodeError as error:
            return error_response(
                f'The body must be a JSON object like {{"program_id": "a"}}: {error}',
                HTTPStatus.BAD_REQUEST,
            )
        except IdentityError as error:
            return error_response(str(error), HTTPStatus.BAD_REQUEST, error.field)
        answer = await _ask(programs.release(program_id))
        if isinstance(answer, Response):
            return answer
        told = {"program_id": program_id, "released": answer["released"]}
        if answer["pending"]:
            told["pending"] = True
        return JSONResponse(told)

    @app.get("/programs")
    async def list_programs(program_id: str | None = None) -> Response:
        if program_id is not None:
            return await _one(programs, program_id)
        answer = await _ask(programs.list())
        return answer if isinstance(answer, Response) else JSONResponse({"programs": answer})

    # One route: Starlette would also find "/programs/summary" in "/programs/summary\n".
    @app.get("/programs/{rest:any_text}")
    async def get_programs(rest: str, program_id: str | None = None) -> Response:
        if not rest:
            return await list_programs(program_id)
        if rest == "summary":
            return _json(await _ask(programs.summary()))
        return await _one(programs, rest)

    return app


async def _one(programs: EnginePrograms, program_id: str) -> Response:
    answer = await _ask(programs.get(program_id))
    if answer is None:
        return error_response("No program has this id.", HTTPStatus.NOT_FOUND, "program_id")
    return _json(answer)


async def _ask(question: Awaitable[Any]) -> Any:
    """The engine's answer, or an error response when it cannot answer."""
    try:
        return await question
    except Exception as error:
        logger.exception("The engine did not answer a question about programs")
        return error_response(error, HTTPStatus.INTERNAL_SERVER_ERROR)


def _json(answer: Any) -> Response:
    return answer if isinstance(answer, Response) else JSONResponse(answer)


async def _http_error(request: Request, error: Exception) -> Response:
    """Unknown paths and wrong methods; keeps headers such as Allow."""
    assert isinstance(error, HTTPException)
    response = error_response(error.detail, HTTPStatus(error.status_code))
    response.headers.update(error.headers or {})
    return response
