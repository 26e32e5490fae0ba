"""An engine on loopback that knows programs and computes nothing: its books are real, its work is
to wait.

A program claims the blocks of its prompt while a turn of it runs. Between two turns it claims
nothing, unless it is one of those that act: who acts is decided from outside.
"""

import asyncio
import json
from collections import Counter
from contextlib import suppress
from math import ceil
from typing import Any

import msgspec
from aiohttp import web

from vllm_thunder.program.report import EngineReport, MemoryReport, ProgramReport

__all__ = ["EVENTS", "MODEL", "CrowdedEngine", "answer_of", "events_of"]

MODEL = "m"
#: Events of a streamed answer, the last one not counted.
EVENTS = 3
_BLOCK, _SEATS = 16, 64
#: Bytes of a request for each token of its prompt.
_BYTES_PER_TOKEN = 4
_MODELS = {"object": "list", "data": [{"id": MODEL, "object": "model", "max_model_len": 1_000_000}]}


def answer_of(name: str) -> bytes:
    """What is answered to the turn whose last message is ``name``."""
    choice = {"index": 0, "message": {"role": "assistant", "content": f"done: {name}"}}
    return json.dumps({"object": "chat.completion", "choices": [choice]}).encode()


def events_of(name: str) -> list[bytes]:
    """The same as a stream."""
    said = (
        json.dumps({"choices": [{"delta": {"content": f"{n}: {name}"}}]}) for n in range(EVENTS)
    )
    return [*(b"data: %b\n\n" % text.encode() for text in said), b"data: [DONE]\n\n"]


class CrowdedEngine:
    """``capacity_blocks``, its memory, and ``turn_seconds``, for how long a turn runs, may be
    changed at any time; :meth:`tell` says so to whoever follows it."""

    def __init__(self, capacity_blocks: int, turn_seconds: float):
        self.capacity_blocks = capacity_blocks
        self.turn_seconds = turn_seconds
        #: Programs that keep their claim while no turn of theirs runs.
        self.acting: set[str] = set()
        #: How often each turn was run, by its last message.
        self.ran: Counter[str] = Counter()
        #: Turns in flight, by program.
        self.running: Counter[str] = Counter()
        #: Context of each program that it knows, in tokens.
        self.context_tokens: dict[str, int] = {}
        self.url = ""
        #: Released while a turn of theirs ran.
        self._ending: set[str] = set()
        #: When each program changed, or went, counted in changes.
        self._changed: dict[str, int] = {}
        self._gone: dict[str, int] = {}
        self._changes = 1
        self._told = asyncio.Event()

    @property
    def claimed_blocks(self) -> int:
        """Blocks of what runs, and of what acts."""
        claimants = self.acting.union(self.running)
        return sum(ceil(self.context_tokens[name] / _BLOCK) for name in claimants)

    async def start(self) -> None:
        app = web.Application(client_max_size=2**30)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_get("/programs/changes", self._report)
        app.router.add_post("/programs/release", self._release)
        app.router.add_get("/programs/summary", self._page({"ranks": 1}))
        app.router.add_get("/v1/models", self._page(_MODELS))
        app.router.add_post("/tokenize", self._page({"tokens": [1, 2, 3]}))
        app.router.add_get("/health", self._page({}))
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        self.tell()
        await self._runner.cleanup()

    def tell(self, program_id: str | None = None, *, gone: bool = False) -> None:
        """A program, or only the room, has changed."""
        self._changes += 1
        if program_id is not None:
            log, other = (self._gone, self._changed) if gone else (self._changed, self._gone)
            log[program_id] = self._changes
            other.pop(program_id, None)
        self._told.set()
        self._told = asyncio.Event()

    # -- routes ------------------------------------------------------------------------

    @staticmethod
    def _page(value: Any) -> Any:
        async def answer(request: web.Request) -> web.Response:
            return web.json_response(value)

        return answer

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        asked = json.loads(body)
        program_id, name = asked["program_id"], asked["messages"][-1]["content"]
        self.ran[name] += 1
        self.running[program_id] += 1
        self.context_tokens[program_id] = len(body) // _BYTES_PER_TOKEN
        self.tell(program_id)
        try:
            await asyncio.sleep(self.turn_seconds)
            if not asked["stream"]:
                return web.Response(body=answer_of(name), content_type="application/json")
            stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await stream.prepare(request)
            for event in events_of(name):
                await stream.write(event)
            return stream
        finally:
            self.running[program_id] -= 1
            self.running += Counter()  # those with none are not kept
            if program_id in self._ending and program_id not in self.running:
                self._forget(program_id)
            else:
                self.tell(program_id)

    async def _release(self, request: web.Request) -> web.Response:
        program_id = (await request.json())["program_id"]
        known = program_id in self.context_tokens
        if program_id in self.running:
            self._ending.add(program_id)
        elif known:
            self._forget(program_id)
        return web.json_response({"program_id": program_id, "released": known})

    def _forget(self, program_id: str) -> None:
        del self.context_tokens[program_id]
        self.acting.discard(program_id)
        self._ending.discard(program_id)
        self.tell(program_id, gone=True)

    async def _report(self, request: web.Request) -> web.Response:
        after, wait = request.query["after"], float(request.query["wait"])
        known = int(after or 0)
        if known == self._changes:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._told.wait(), wait)
        claimed = self.claimed_blocks
        room = self.capacity_blocks - claimed
        report = EngineReport(
            cursor=str(self._changes),
            reset=not after,
            complete=True,
            memory=MemoryReport(
                self.capacity_blocks, room, _SEATS, [(_BLOCK, None)], 1e-6, claimed_blocks=claimed
            ),
            programs=[self._told_of(name) for name, at in self._changed.items() if at > known],
            gone=[name for name, at in self._gone.items() if after and at > known],
        )
        return web.Response(body=msgspec.json.encode(report), content_type="application/json")

    def _told_of(self, name: str) -> ProgramReport:
        tokens = self.context_tokens[name]
        acts = name in self.acting
        return ProgramReport(
            program_id=name,
            context_tokens=tokens,
            resident_blocks=ceil(tokens / _BLOCK) if acts else 0,
            claimed=acts or name in self.running,
            turns_in_flight=self.running[name],
            prompt_tokens=tokens,
        )
