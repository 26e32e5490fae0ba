"""Requests that are for every engine: what changes the state of a server changes all of them."""

import asyncio
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs

import aiohttp
import msgspec
from starlette.types import Receive, Scope, Send
from yarl import URL

from vllm_thunder.asgi import path_of, read_body
from vllm_thunder.coordinator.engines.engines import Engines
from vllm_thunder.coordinator.fleet.fleet import Fleet
from vllm_thunder.coordinator.proxy.answers import refusal
from vllm_thunder.coordinator.proxy.heads import Headers, RequestHead

__all__ = ["BROADCAST_PATHS", "SINGLE_ENGINE_PATHS", "Broadcast", "is_broadcast"]

_VLLM = frozenset(
    {
        "/abort_requests",
        "/adapters",
        "/finish_weight_update",
        "/inference/v1/abort_requests",
        "/pause",
        "/release_kv_cache_memory",
        "/reset_encoder_cache",
        "/reset_mm_cache",
        "/reset_prefix_cache",
        "/resume",
        "/sleep",
        "/start_draft_weight_update",
        "/start_profile",
        "/start_weight_update",
        "/stop_profile",
        "/update_weight_version",
        "/update_weights",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
        "/wake_up",
        "/weight_checker",
    }
)
_SGLANG = frozenset(
    {
        "/abort_request",
        "/continue_generation",
        "/destroy_weights_update_group",
        "/flush_cache",
        "/load_lora_adapter",
        "/pause_generation",
        "/release_memory_occupation",
        "/resume_memory_occupation",
        "/unload_lora_adapter",
        "/update_weights_from_disk",
        "/update_weights_from_distributed",
    }
)
#: Sent to every server; answered when all have answered.
BROADCAST_PATHS = _VLLM | _SGLANG
#: What is below it, too: one adapter as SageMaker names it.
_ADAPTERS = "/adapters/"

#: Of these, what empties the engines' prefix caches; ``/pause`` unless it is told not to.
_EMPTY_CACHES = frozenset(
    {
        "/finish_weight_update",
        "/flush_cache",
        "/release_kv_cache_memory",
        "/release_memory_occupation",
        "/reset_prefix_cache",
        "/sleep",
        "/update_weights",
        "/update_weights_from_disk",
        "/update_weights_from_distributed",
    }
)
_FALSE = frozenset({"0", "f", "false", "n", "no", "off"})

#: What must differ from engine to engine, such as ranks in a process group and handles of memory,
#: or is about the fault of one.
SINGLE_ENGINE_PATHS = frozenset(
    {
        "/collective_rpc",
        "/fault_tolerance/apply",
        "/init_weight_transfer_engine",
        "/init_weights_update_group",
        "/scale_elastic_ep",
        "/shutdown_weight_transfer_engine",
        "/update_weights_from_ipc",
        "/update_weights_from_tensor",
    }
)

#: Seconds: loading weights or an adapter takes minutes.
_SECONDS = 1800.0
_PASSED_ON = (b"content-type", b"authorization", b"accept", b"x-request-id")
#: The status of who has not answered.
_NO_ANSWER = 599


def is_broadcast(path: str) -> bool:
    """Whether requests to ``path`` are for every engine."""
    return path in BROADCAST_PATHS or path.startswith(_ADAPTERS)


class Broadcast:
    """ASGI application. The answer is that of the first server where all say that it worked, or
    why it did not with one status, else 502 with what each of them said. ``on_caches_reset``: it
    emptied their prefix caches. ``engine_key``: as of :class:`~proxy.heads.RequestHead`."""

    def __init__(
        self,
        fleet: Fleet,
        engines: Engines,
        session: aiohttp.ClientSession,
        on_caches_reset: Callable[[], None],
        engine_key: str | None,
    ):
        self._engine_key = engine_key
        self._on_caches_reset = on_caches_reset
        self._fleet = fleet
        self._engines = engines
        self._session = session

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = path_of(scope)
        _, body = await read_body(receive)
        if body is None:
            return
        urls = list(dict.fromkeys(backend.url for backend in self._fleet.backends.values()))
        missing = list(self._engines.unreachable)
        if not urls or missing:
            named = f"these do not answer: {', '.join(missing)}" if missing else "there is none"
            problem = f"not every engine can be asked: {named}"
            await _answer(send, 503, *refusal(path, 503, problem))
            return
        head = RequestHead(scope, self._engine_key)
        answers = await asyncio.gather(*(self._ask(url, head, body) for url in urls))
        done = [answer[0] < 300 for answer in answers]
        if any(done) and _empties_caches(path, scope["query_string"]):
            self._on_caches_reset()
        status, kind, text = answers[0]
        agree = status != _NO_ANSWER and all(answer[0] == status for answer in answers)
        if agree or all(done):
            await _answer(send, status, [(b"content-type", kind.encode("latin-1"))], text)
            return
        said = {
            url: {"status": status, "answer": text.decode(errors="replace")[:1000]}
            for url, (status, _, text) in zip(urls, answers, strict=True)
        }
        shape: dict[str, Any] = {
            "error": {
                "message": "Not every engine has done it.",
                "type": "BadGatewayError",
                "param": None,
                "code": 502,
            },
            "engines": said,
        }
        kind_header = [(b"content-type", b"application/json")]
        await _answer(send, 502, kind_header, msgspec.json.encode(shape))

    async def _ask(self, url: str, head: RequestHead, body: bytes) -> tuple[int, str, bytes]:
        """Status, content type and body."""
        try:
            async with self._session.request(
                head.method,
                URL(url + head.target.decode("latin-1"), encoded=True),
                data=body,
                headers=_passed_on(head.headers),
                timeout=aiohttp.ClientTimeout(total=_SECONDS),
                allow_redirects=False,
            ) as answer:
                kind = answer.headers.get("content-type", "application/json")
                return answer.status, kind, await answer.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            return _NO_ANSWER, "text/plain", repr(error).encode()


def _passed_on(headers: Headers) -> dict[str, str]:
    kept = [item for item in headers if item[0] in _PASSED_ON]
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in kept}


def _empties_caches(path: str, query: bytes) -> bool:
    if path != "/pause":
        return path in _EMPTY_CACHES
    said = parse_qs(query.decode("latin-1"))
    clears = said.get("clear_cache", ["true"])[-1].lower() not in _FALSE
    return clears and said.get("mode", ["abort"])[-1] != "keep"


async def _answer(send: Send, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
    length = (
        []
        if any(name == b"content-length" for name, _ in headers)
        else [(b"content-length", b"%d" % len(body))]
    )
    await send({"type": "http.response.start", "status": status, "headers": [*headers, *length]})
    await send({"type": "http.response.body", "body": body})
