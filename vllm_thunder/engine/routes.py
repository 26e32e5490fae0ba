"""The HTTP routes about programs, on the engine's own server.

    POST /programs/release           {"program_id": "a"} -> {"program_id": "a", "released": true}
    POST /programs/tool              {"program_id": "a", "tool_name": "pytest"}
                                     -> {"program_id": "a", "known": true}
    GET  /programs                   {"programs": [...], "next": "m"}: at most ?limit= (1000) of
                                     them by id, those after ?after=; no "next": that was the last
    GET  /programs?program_id=a      the same record as /programs/a, for every possible id
    GET  /programs/{program_id}      any id, percent-encoded, slashes included
    GET  /programs/summary           totals, and "ranks": how many data-parallel ranks there are
    GET  /programs/changes           what has changed after ?after=CURSOR ("": tell everything), as
                                     vllm_thunder/program/report.py says; if nothing has, as soon
                                     as something does, or after ?wait= (0) seconds, at most 60.
                                     Of one data-parallel rank, ?rank= from 0; needed if there are
                                     several

Programs called "summary" and "changes" are at ?program_id=summary and ?program_id=changes.

A release never fails for an unknown id ("released" is false), and answers at once while turns
are in flight ("pending" is true): the program goes when they have ended. A tool is what the
program has begun to run after its turn: how long it will is learned by that name. For an unknown
program "known" is false.
"""

import re
from collections.abc import Awaitable
from http import HTTPStatus
from math import inf
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.responses import Response
from vllm.logger import init_logger

from vllm_thunder.asgi import ANY_TEXT
from vllm_thunder.engine.client import EnginePrograms
from vllm_thunder.engine.errors import error_response
from vllm_thunder.program.errors import IdentityError
from vllm_thunder.program.values import program_id_of

__all__ = ["build_routes"]

logger = init_logger(f"vllm.{__name__}")  # below vLLM's: its level and handlers

#: Programs in one answer of ``GET /programs``, and at most.
_PAGE, _LARGEST_PAGE = 1000, 10_000

#: Seconds for which ``GET /programs/changes`` waits at most.
_LONGEST_WAIT = 60

#: Longest text of a cursor that is looked at: those that are given out are much shorter.
_LONGEST_CURSOR = 200

_RANK = re.compile(r"\d{1,6}", re.ASCII)
_SECONDS = re.compile(r"\d{1,3}(\.\d{1,20})?", re.ASCII)


class _Told(msgspec.Struct):
    """The members of a POST body that matter; all others are skipped unread."""

    program_id: Any = None
    tool_name: Any = None


_told_decoder = msgspec.json.Decoder(_Told)


def build_routes(programs: EnginePrograms) -> FastAPI:
    """An application with the routes above; every error has OpenAI's shape.

    The caller answers for API keys and cross-origin headers.
    """
    app = FastAPI(openapi_url=None, exception_handlers={HTTPException: _http_error})

    @app.post("/programs/release")
    async def release(request: Request) -> Response:
        told = await _told(request, "program_id")
        if isinstance(told, Response):
            return told
        answer = await _ask(programs.release(told["program_id"]))
        if isinstance(answer, Response):
            return answer
        released = {**told, "released": answer["released"]}
        if answer["pending"]:
            released["pending"] = True
        return JSONResponse(released)

    @app.post("/programs/tool")
    async def tool(request: Request) -> Response:
        told = await _told(request, "program_id", "tool_name")
        if isinstance(told, Response):
            return told
        answer = await _ask(programs.tool(told["program_id"], told["tool_name"]))
        if isinstance(answer, Response):
            return answer
        return JSONResponse({"program_id": told["program_id"], "known": answer["known"]})

    @app.get("/programs")
    async def list_programs(
        program_id: str | None = None, after: str = "", limit: str = str(_PAGE)
    ) -> Response:
        if program_id is not None:
            return await _one(programs, program_id)
        try:
            size = _page_size(limit)
        except IdentityError as error:
            return error_response(str(error), HTTPStatus.BAD_REQUEST, error.field)
        answer = await _ask(programs.page(after, size))
        if isinstance(answer, Response):
            return answer
        page, following = answer
        more = {} if following is None else {"next": following}
        return JSONResponse({"programs": page, **more})

    # One route: Starlette would also find "/programs/summary" in "/programs/summary\n".
    @app.get(f"/programs/{{rest:{ANY_TEXT}}}")
    async def get_programs(
        rest: str,
        program_id: str | None = None,
        after: str = "",
        limit: str = str(_PAGE),
        wait: str = "0",
        rank: str | None = None,
    ) -> Response:
        if not rest:
            return await list_programs(program_id, after, limit)
        if rest == "summary":
            return _json(await _ask(programs.summary()))
        if rest == "changes":
            return await _changes(programs, after, wait, rank)
        return await _one(programs, rest)

    return app


async def _told(request: Request, *names: str) -> dict[str, str] | Response:
    """The members of the body called ``names``, valid as ids are; or the 400 that says what is
    wrong with them."""
    example = ", ".join(f'"{name}": "a"' for name in names)
    try:
        told = _told_decoder.decode(await request.body())
        return {name: _required(getattr(told, name), name) for name in names}
    except msgspec.DecodeError as error:
        return error_response(
            f"The body must be a JSON object like {{{example}}}: {error}", HTTPStatus.BAD_REQUEST
        )
    except IdentityError as error:
        return error_response(str(error), HTTPStatus.BAD_REQUEST, error.field)


def _required(value: Any, name: str) -> str:
    if value is None:
        raise IdentityError(name, "is missing")
    return program_id_of(value, name)


def _page_size(limit: str) -> int:
    """Raises IdentityError unless ``limit`` is a number of programs that one answer may have."""
    size = int(limit) if limit.isascii() and limit.isdigit() and len(limit) < 10 else 0
    if not 1 <= size <= _LARGEST_PAGE:
        raise IdentityError("limit", f"must be an integer from 1 to {_LARGEST_PAGE}")
    return size


async def _one(programs: EnginePrograms, program_id: str) -> Response:
    answer = await _ask(programs.get(program_id))
    if answer is None:
        return error_response("No program has this id.", HTTPStatus.NOT_FOUND, "program_id")
    return _json(answer)


async def _changes(programs: EnginePrograms, after: str, wait: str, rank: str | None) -> Response:
    try:
        if len(after) > _LONGEST_CURSOR:
            raise IdentityError("after", f"must have at most {_LONGEST_CURSOR} characters")
        seconds, index = _wait_of(wait), _rank_of(rank, programs.ranks)
    except IdentityError as error:
        return error_response(str(error), HTTPStatus.BAD_REQUEST, error.field)
    answer = await _ask(programs.changes(index, after, seconds))
    if isinstance(answer, Response):
        return answer
    return Response(answer, media_type="application/json")


def _wait_of(text: str) -> float:
    """Raises IdentityError unless ``text`` is a number of seconds to wait."""
    seconds = float(text) if _SECONDS.fullmatch(text) else inf
    if seconds > _LONGEST_WAIT:
        raise IdentityError("wait", f"must be a number of seconds from 0 to {_LONGEST_WAIT}")
    return seconds


def _rank_of(text: str | None, ranks: int) -> int:
    """Raises IdentityError unless ``text`` names one of the ranks; it may be left out for the only
    one."""
    if text is None and ranks == 1:
        return 0
    number = int(text) if text is not None and _RANK.fullmatch(text) else ranks
    if number >= ranks:
        problem = "is missing: it" if text is None else ""
        raise IdentityError("rank", f"{problem} must be an integer from 0 to {ranks - 1}".strip())
    return number


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
