"""Requests that are for every engine: what changes the state of a server changes all of them."""

import asyncio
from collections.abc import Callable
from typing import Any

import aiohttp
import msgspec
from starlette.types import Receive, Scope, Send
from yarl import URL

from vllm_thunder.asgi import path_of, read_body
from vllm_thunder.coordinator.engines.engines import Engines
from vllm_thunder.coordinator.fleet.fleet import Fleet
from vllm_thunder.coordinator.proxy.answers import refusal

__all__ = ["BROADCAST_PATHS", "SINGLE_ENGINE_PATHS", "Broadcast"]

#: Sent to every server; answered when all have answered.
BROADCAST_PATHS = frozenset(
    {
        "/finish_weight_update",
        "/pause",
        "/reset_encoder_cache",
        "/reset_mm_cache",
        "/reset_prefix_cache",
        "/resume",
        "/sleep",
        "/start_profile",
        "/start_weight_update",
        "/stop_profile",
        "/update_weights",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
        "/wake_up",
    }
)

#: Of these, what empties the engines' prefix caches.
_EMPTY_CACHES = frozenset(
    {"/finish_weight_update", "/reset_prefix_cache", "/sleep", "/update_weights"}
)

#: What must differ from engine to engine, such as ranks in a process group.
SINGLE_ENGINE_PATHS = frozenset(
    {
        "/collective_rpc",
        "/init_weight_transfer_engine",
        "/scale_elastic_ep",
        "/shutdown_weight_transfer_engine",
    }
)

#: Seconds: loading weights or an adapter takes minutes.
_SECONDS = 1800.0
_PASSED_ON = ("content-type", "authorization", "accept", "x-request-id")


class Broadcast:
    """ASGI application. The answer is that of the first server where all agree that it worked,
    else 502 with what each of them said. ``on_caches_reset``: it emptied their prefix caches."""

    def __init__(
        self,
        fleet: Fleet,
        engines: Engines,
        session: aiohttp.ClientSession,
        on_caches_reset: Callable[[], None],
    ):
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
        query = b"?" + scope["query_string"] if scope["query_string"] else b""
        target = scope["raw_path"] + query
        headers = {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in scope["headers"]
            if name.decode("latin-1") in _PASSED_ON
        }
        answers = await asyncio.gather(
            *(self._ask(url + target.decode("latin-1"), headers, body) for url in urls)
        )
        if path in _EMPTY_CACHES and any(answer[0] < 400 for answer in answers):
            self._on_caches_reset()
        status, kind, text = answers[0]
        if all(answer[0] < 400 for answer in answers):
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

    async def _ask(self, url: str, headers: dict[str, str], body: bytes) -> tuple[int, str, bytes]:
        """Status (599: no answer came), content type and body."""
        try:
            async with self._session.post(
                URL(url, encoded=True),
                data=body,
                headers=headers,
                timeout=aiohttp.ClientTimeout(total=_SECONDS),
            ) as answer:
                kind = answer.headers.get("content-type", "application/json")
                return answer.status, kind, await answer.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            return 599, "text/plain", repr(error).encode()


async def _answer(send: Send, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
    length = (
        []
        if any(name == b"content-length" for name, _ in headers)
        else [(b"content-length", b"%d" % len(body))]
    )
    await send({"type": "http.response.start", "status": status, "headers": [*headers, *length]})
    await send({"type": "http.response.body", "body": body})
