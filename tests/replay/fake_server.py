"""An OpenAI-compatible server without a model, with a switch for every way to fail."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

BLOCK = 16


@dataclass
class FakeServer:
    """Answers with numbered words. A prompt is counted in words, of which whole blocks that an
    earlier call of the same program sent or got come from the cache."""

    token_seconds: float = 0.0
    #: What happens to the call with this number (from 0): "500", "error", "cut" or "hang".
    fail_at: dict[int, str] = field(default_factory=dict)
    release_status: int = 200
    with_metrics: bool = True
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    #: ``POST /reset_prefix_cache`` fails as often as this says, then works.
    busy_resets: int = 0
    resets: int = 0
    running: int = 0
    most_running: int = 0
    queried: int = 0
    hit: int = 0
    contexts: dict[str, int] = field(default_factory=dict)
    url: str = ""
    called: asyncio.Event = field(default_factory=asyncio.Event)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator["FakeServer"]:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/programs/release", self._release)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/programs/summary", self._summary)
        app.router.add_get("/programs", self._programs)
        app.router.add_post("/reset_prefix_cache", self._reset)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await runner.cleanup()

    async def _models(self, _request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "fake"}]})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        number = len(self.requests)
        self.requests.append(body)
        self.called.set()
        self.headers.append(dict(request.headers))
        fault = self.fail_at.get(number)
        if fault == "500":
            return web.Response(status=500, text="out of luck")
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            return await self._stream(request, body, number, fault)
        finally:
            self.running -= 1

    async def _stream(
        self, request: web.Request, body: dict[str, Any], number: int, fault: str | None
    ) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        await answer.write(b": a comment that keeps the connection open\n\n")
        if fault == "hang":
            await asyncio.sleep(3600)
        if fault == "error":
            await _send(answer, {"error": {"message": "the engine died"}})
            return answer
        await _send(answer, {"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        for index in range(body["max_tokens"]):
            await asyncio.sleep(self.token_seconds)
            await _send(answer, {"choices": [{"delta": {"content": f" answer{number}.{index}"}}]})
        if fault == "cut":
            return answer
        await _send(answer, {"choices": [{"delta": {}, "finish_reason": "length"}]})
        await _send(answer, {"choices": [], "usage": self._usage(body)})
        await answer.write(b"data: [DONE]\n\n")
        return answer

    def _usage(self, body: dict[str, Any]) -> dict[str, Any]:
        prompt = sum(len(message["content"].split()) for message in body["messages"])
        conversation = body["messages"][0]["content"] + body["messages"][1]["content"]
        cached = self.contexts.get(conversation, 0) // BLOCK * BLOCK
        self.contexts[conversation] = prompt + body["max_tokens"]
        self.queried += prompt
        self.hit += cached
        return {
            "prompt_tokens": prompt,
            "completion_tokens": body["max_tokens"],
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    async def _release(self, request: web.Request) -> web.Response:
        program_id = (await request.json())["program_id"]
        self.released.append(program_id)
        return web.json_response({"program_id": program_id}, status=self.release_status)

    async def _metrics(self, _request: web.Request) -> web.Response:
        if not self.with_metrics:
            raise web.HTTPNotFound
        page = (
            "# TYPE vllm:prefix_cache_queries counter\n"
            f'vllm:prefix_cache_queries_total{{engine="0"}} {self.queried}\n'
            f'vllm:prefix_cache_queries_total{{engine="1"}} 1000\n'
            "# TYPE vllm:prefix_cache_hits counter\n"
            f'vllm:prefix_cache_hits_total{{engine="0"}} {self.hit}\n'
        )
        return web.Response(text=page)

    @property
    def _tracked(self) -> set[str]:
        return {r["program_id"] for r in self.requests if "program_id" in r} - set(self.released)

    async def _programs(self, _request: web.Request) -> web.Response:
        return web.json_response({"programs": [{"program_id": name} for name in self._tracked]})

    async def _reset(self, _request: web.Request) -> web.Response:
        if self.busy_resets > 0:
            self.busy_resets -= 1
            return web.json_response({"success": False})
        self.resets += 1
        self.contexts.clear()
        return web.json_response({"success": True})

    async def _summary(self, _request: web.Request) -> web.Response:
        return web.json_response(
            {
                "programs": len({r.get("program_id") for r in self.requests} - {None})
                - len(set(self.released)),
                "pauses": 5 + len(self.requests),
                "held_turns": 0,
                "free_blocks": 40,
                "total_blocks": 40,
            }
        )


async def _send(answer: web.StreamResponse, chunk: dict[str, Any]) -> None:
    await answer.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
