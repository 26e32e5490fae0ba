"""The coordinator's own routes: programs, engines, profiles, weight updates, health.

Paths and field names are those of the public ThunderAgent router where it has them, and those that
slime and SGLang's router use for workers; what is ours beside them is said in each summary.
"""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any
from urllib.parse import unquote

import msgspec
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException as StarletteHTTPException

from vllm_thunder.asgi import ANY_TEXT
from vllm_thunder.coordinator.control import Control, EngineFailed, UnknownEngine
from vllm_thunder.coordinator.describe import (
    describe_engine,
    describe_program,
    phase_counts,
    public_engine,
    public_phases,
    public_program,
    state_of,
    status,
)
from vllm_thunder.coordinator.engines.client import EngineError
from vllm_thunder.coordinator.engines.engines import engine_url
from vllm_thunder.coordinator.fleet.backend import Backend
from vllm_thunder.coordinator.proxy.answers import refusal
from vllm_thunder.coordinator.replicas.replicas import Replicas
from vllm_thunder.program.errors import ConfigError, IdentityError
from vllm_thunder.program.values import program_id_of
from vllm_thunder.version import __version__

__all__ = ["ADMIN_PATHS", "build_admin"]

#: Every path that the application below serves is one of these or below one of them.
ADMIN_PATHS = (
    "/programs",
    "/profiles",
    "/engines",
    "/status",
    "/health",
    "/metrics",
    "/weight_sync",
    "/add_worker",
    "/remove_worker",
    "/list_workers",
    "/workers",
    "/openapi.json",
)


class _Told(msgspec.Struct):
    """The members of a POST body that matter; all others are skipped unread."""

    program_id: Any = None
    tool_name: Any = None
    url: Any = None
    worker_url: Any = None


_told_decoder = msgspec.json.Decoder(_Told)


def _answers(*codes: int) -> dict[int | str, dict[str, Any]]:
    """What else a route may answer, for the OpenAPI description."""
    schema = {"type": "object", "properties": {"error": {"type": "object"}}, "required": ["error"]}
    content = {"application/json": {"schema": schema}}
    return {code: {"description": HTTPStatus(code).phrase, "content": content} for code in codes}


def _body(*names: str) -> dict[str, Any]:
    """The JSON body of a route, for the OpenAPI description."""
    ids = {"anyOf": [{"type": "string", "minLength": 1}, {"type": "integer"}]}
    text = {"type": "string", "minLength": 1}
    properties = {name: ids if name == "program_id" else text for name in names}
    schema = {"type": "object", "properties": properties, "required": list(names)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def build_admin(control: Control, replicas: Replicas | None = None) -> FastAPI:
    """The application; the caller answers for API keys. ``replicas``: this coordinator is one of
    them, and says so."""
    app = FastAPI(
        title="vllm_thunder coordinator",
        version=__version__,
        exception_handlers={
            StarletteHTTPException: _http_error,
            UnknownEngine: _unknown_engine,
            EngineError: _engine_error,
            EngineFailed: _engine_failed,
        },
        docs_url=None,
        redoc_url=None,
    )
    own = {} if replicas is None else {"replica": replicas.own}
    _add_programs(app, control, own)
    _add_engines(app, control)
    _add_workers(app, control)
    _add_pages(app, control, replicas)
    return app


def _add_programs(app: FastAPI, control: Control, own: dict[str, str]) -> None:
    fleet = control.fleet

    @app.post(
        "/programs/release",
        responses=_answers(400, 401, 413, 422, 502),
        openapi_extra=_body("program_id"),
        summary="A program ends: at once, or when its turns in flight have ended.",
    )
    async def release(request: Request) -> Response:
        told = await _told(request)
        return JSONResponse(await control.release(_id_of(told.program_id, "program_id")))

    @app.post(
        "/programs/tool",
        responses=_answers(400, 401, 413, 422, 502),
        openapi_extra=_body("program_id", "tool_name"),
        summary="A program has begun to run a tool after its turn.",
    )
    async def tool(request: Request) -> Response:
        told = await _told(request)
        program_id = _id_of(told.program_id, "program_id")
        name = _id_of(told.tool_name, "tool_name")
        return JSONResponse(
            {"program_id": program_id, "known": await control.tool(program_id, name)}
        )

    @app.get("/programs", responses=_answers(401), summary="Every program, by its id.")
    async def list_programs() -> Response:
        return _json({each.program_id: {**public_program(each), **own} for each in fleet})

    @app.get(
        f"/programs/{{program_id:{ANY_TEXT}}}",
        responses=_answers(401, 404),
        summary="One program, and why it waits.",
    )
    async def get_program(request: Request, program_id: str) -> Response:
        program = fleet.get(_after(request, "/programs/"))
        if program is None:
            raise HTTPException(404, "No program has this id.")
        return _json({**describe_program(fleet, program, control.clock()), **own})

    @app.get("/profiles", responses=_answers(401), summary="Where the time of each program went.")
    async def list_profiles() -> Response:
        return _json({program.program_id: program.profile.averages() for program in fleet})

    @app.get(f"/profiles/{{program_id:{ANY_TEXT}}}", responses=_answers(401, 404))
    async def get_profile(request: Request, program_id: str) -> Response:
        program = fleet.get(_after(request, "/profiles/"))
        if program is None:
            raise HTTPException(404, "No program has this id.")
        return _json(program.profile.averages())


def _add_engines(app: FastAPI, control: Control) -> None:
    @app.get("/engines", responses=_answers(401), summary="Every engine, each data-parallel rank.")
    async def list_engines() -> Response:
        return _json({"engines": _described(list(control.fleet.backends.values()))})

    @app.post(
        "/engines",
        responses=_answers(400, 401, 409, 413, 422),
        openapi_extra=_body("url"),
        summary="Add a server that answers now.",
    )
    async def add_engine(request: Request) -> Response:
        told = await _told(request)
        joined = await control.add(_url_of(told.url))
        return JSONResponse({"engines": _described(joined)})

    @app.delete(
        f"/engines/{{engine_id:{ANY_TEXT}}}",
        responses=_answers(401, 404, 409),
        summary="Take an engine out, by its id or the URL of its server if that has no other: its "
        "turns end first.",
    )
    async def remove_engine(request: Request, engine_id: str) -> Response:
        removed = control.remove_engine(_after(request, "/engines/"))
        return JSONResponse({"engines": _described(removed)})

    @app.post(
        "/weight_sync/begin",
        responses=_answers(401, 413),
        summary="Hold every model call that arrives until the weights are updated.",
    )
    async def begin_weight_sync() -> Response:
        control.freeze(True)
        return JSONResponse({"status": "ok", "weight_sync_active": True})

    @app.post("/weight_sync/end", responses=_answers(401, 413), summary="Go on.")
    async def end_weight_sync() -> Response:
        control.freeze(False)
        return JSONResponse({"status": "ok", "weight_sync_active": False})


def _add_workers(app: FastAPI, control: Control) -> None:
    """The names that slime and SGLang's router have for the same."""

    @app.post("/add_worker", responses=_answers(400, 401, 409, 413, 422))
    async def add_worker(request: Request) -> Response:
        added = await _added(control, request)
        return JSONResponse({"status": "success", "added": added, "worker_urls": control.urls()})

    @app.post("/remove_worker", responses=_answers(400, 401, 404, 413, 422))
    async def remove_worker(request: Request) -> Response:
        control.remove(_url_of(await _worker_url(request)))
        return JSONResponse({"status": "success", "removed": True, "worker_urls": control.urls()})

    @app.get("/list_workers", responses=_answers(401))
    async def list_workers() -> Response:
        return JSONResponse({"urls": control.urls()})

    @app.get("/workers", responses=_answers(401))
    async def workers() -> Response:
        return JSONResponse({"workers": _workers(control)})

    @app.post("/workers", responses=_answers(400, 401, 409, 413, 422))
    async def add_worker_too(request: Request) -> Response:
        added = await _added(control, request)
        return JSONResponse({"status": "success", "added": added, "workers": _workers(control)})

    @app.delete(f"/workers/{{worker:{ANY_TEXT}}}", responses=_answers(401, 404))
    async def remove_worker_too(request: Request, worker: str) -> Response:
        control.remove(_after(request, "/workers/"))
        return JSONResponse({"status": "success", "removed": True, "workers": _workers(control)})


def _add_pages(app: FastAPI, control: Control, replicas: Replicas | None) -> None:
    fleet = control.fleet

    @app.get(
        "/status", responses=_answers(401), summary="Engines, and of each waiting program why."
    )
    async def status_page() -> Response:
        shared = {} if replicas is None else replicas.describe()
        return _json({**status(fleet, control.engines, control.clock()), **shared})

    @app.get("/health", responses=_answers(503), summary="Whether turns can be served.")
    async def health() -> Response:
        state = state_of(fleet, control.engines)
        counts = phase_counts(fleet)
        shared = {}
        if replicas is not None:  # the others look at it: they have to agree who there is
            shared = {"replica": replicas.own, "replica_urls": replicas.urls()}
        return JSONResponse(
            {
                "status": state,
                "router_mode": "tr",
                "scheduling_enabled": True,
                "backends": control.urls(),
                "programs_count": len(fleet),
                **{f"{name}_count": count for name, count in counts.items()},
                "per_backend": {b.backend_id: public_phases(b) for b in fleet.backends.values()},
                "profile_enabled": True,
                **shared,
            },
            status_code=503 if state == "unavailable" else 200,
        )

    @app.get(
        "/metrics",
        responses=_answers(401),
        summary="Prometheus text; the public router's JSON where application/json is asked for.",
    )
    async def metrics(request: Request) -> Response:
        if "application/json" not in request.headers.get("accept", ""):
            text = generate_latest(control.metrics.registry)
            return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})
        backends = {
            b.backend_id: {**describe_engine(b), **public_engine(b)}
            for b in fleet.backends.values()
        }
        return _json(
            {
                "metrics_enabled": True,
                "metrics_interval": control.config.interval,
                "backends": backends,
                "counters": fleet.counts,
            }
        )


def _described(backends: list[Backend]) -> list[dict[str, Any]]:
    return [describe_engine(backend) for backend in backends]


def _workers(control: Control) -> list[dict[str, Any]]:
    return [{"id": url, "url": url} for url in control.urls()]


async def _added(control: Control, request: Request) -> bool:
    """Whether the worker was not there yet: rollout frameworks name theirs more than once."""
    url = _url_of(await _worker_url(request))
    if control.serves(url):
        return False
    await control.add(url)
    return True


def _after(request: Request, prefix: str) -> str:
    """What follows ``prefix`` in the path: Starlette's own converters stop at a newline."""
    raw: bytes = request.scope["raw_path"]
    return unquote(raw.decode("latin-1").partition(prefix)[2])


async def _told(request: Request) -> _Told:
    try:
        return _told_decoder.decode(await request.body())
    except (msgspec.DecodeError, RecursionError) as error:
        raise HTTPException(400, f"The body must be a JSON object: {error}") from error


async def _worker_url(request: Request) -> Any:
    """In the query or in the body, under the names that the clients use."""
    query = request.query_params
    named = query.get("url") or query.get("worker_url")
    if named:
        return named
    told = await _told(request)
    return told.url or told.worker_url


def _id_of(value: Any, field: str) -> str:
    try:
        if value is None:
            raise IdentityError(field, "is missing")
        return program_id_of(value, field)
    except IdentityError as error:
        raise HTTPException(400, str(error)) from error


def _url_of(value: Any) -> str:
    if not isinstance(value, str):
        raise HTTPException(400, "url: must be the address of a server")
    try:
        return engine_url(value)
    except ConfigError as error:
        raise HTTPException(400, f"url: {error}") from error


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


async def _http_error(request: Request, error: Exception) -> Response:
    """Errors of ours, unknown paths and wrong methods; keeps headers such as Allow."""
    assert isinstance(error, StarletteHTTPException)
    return _refused(error.status_code, str(error.detail), error.headers)


async def _unknown_engine(request: Request, error: Exception) -> Response:
    return _refused(404, str(error))


async def _engine_error(request: Request, error: Exception) -> Response:
    return _refused(409, str(error))


async def _engine_failed(request: Request, error: Exception) -> Response:
    return _refused(502, str(error))


def _refused(status: int, message: str, headers: Mapping[str, str] | None = None) -> Response:
    own, body = refusal("", status, message)
    response = Response(body, status_code=status, headers=headers)
    response.raw_headers = [*own, *(h for h in response.raw_headers if h[0] != b"content-length")]
    return response
