"""An engine that knows programs, on a real socket: as much of one as a coordinator speaks to."""

import asyncio
import json
from contextlib import asynccontextmanager, suppress
from typing import Any
from urllib.parse import parse_qs, urlsplit

import msgspec
import uvicorn

from tests.coordinator.fake_engine import Answer, FakeEngine, Request, Wire, whole
from tests.coordinator.front import ask, post
from vllm_thunder.coordinator.client_protocol import ClientProtocol
from vllm_thunder.coordinator.config import CoordinatorConfig
from vllm_thunder.coordinator.control import Control
from vllm_thunder.coordinator.server import Launch, running_coordinator
from vllm_thunder.program.report import EngineReport, MemoryReport, ProgramReport

MODELS = {"object": "list", "data": [{"id": "m", "object": "model", "max_model_len": 4096}]}


class ProgramEngine(FakeEngine):
    """``chat`` answers model calls. What it reports is what the test puts into ``memory`` and
    ``programs``; a report goes out when :meth:`tell` is called."""

    def __init__(self, room: float = 1000.0, *, key: str | None = None, ranks: int = 1):
        super().__init__()
        self.answer = self._route
        self.chat: Answer = whole(b'{"choices": []}')
        self.key = key
        self.ranks = ranks
        self.models: Any = MODELS
        self.tokens = [1, 2, 3]
        self.block_size = 16
        self.room = room
        self.claimed = 0.0
        self.programs: dict[str, ProgramReport] = {}
        self.released: list[str] = []
        self.healthy = True
        self.silent = False
        self._sequence = 1
        self._changed = asyncio.Event()
        self._told: list[tuple[int, ProgramReport | str]] = []

    @property
    def calls(self) -> list[Request]:
        """Model calls that reached it."""
        return [request for request in self.requests if request.target.startswith(b"/v1/chat")]

    def tell(self, *programs: ProgramReport, gone: str | None = None) -> None:
        """Report, also if only the room has changed."""
        self._sequence += 1
        for program in programs:
            self.programs[program.program_id] = program
            self._told.append((self._sequence, program))
        if gone is not None:
            self.programs.pop(gone, None)
            self._told.append((self._sequence, gone))
        self._changed.set()
        self._changed = asyncio.Event()

    async def kill(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
        await super().kill()

    async def _route(self, request: Request, wire: Wire) -> None:
        url = urlsplit(request.target.decode())
        if self.silent:
            await wire.hang()
        elif url.path == "/health":
            await whole(b"", b"200 OK" if self.healthy else b"503 Service Unavailable")(
                request, wire
            )
        elif request.head.startswith(b"OPTIONS "):  # as in vLLM it wants no key
            await whole(b"", headers=b"access-control-allow-origin: *\r\n")(request, wire)
        elif self.key and request.values(b"authorization") != [f"Bearer {self.key}".encode()]:
            await whole(b'{"error": "Unauthorized"}', b"401 Unauthorized")(request, wire)
        elif url.path in ("/v1/chat/completions", "/v1/completions"):
            await self.chat(request, wire)
        else:
            await self._answer(url.path, parse_qs(url.query), request, wire)

    async def _answer(self, path: str, query: Any, request: Request, wire: Wire) -> None:
        if path == "/programs/changes":
            after, wait = query.get("after", [""])[0], float(query["wait"][0])
            await wire.send(_whole(await self._report(after, wait)))
        elif path == "/v1/models":
            await wire.send(_whole(json.dumps(self.models).encode()))
        elif path == "/tokenize":
            await wire.send(_whole(json.dumps({"tokens": self.tokens}).encode()))
        elif path == "/programs/summary":
            await wire.send(_whole(json.dumps({"ranks": self.ranks}).encode()))
        elif path == "/programs/release":
            name = json.loads(request.body)["program_id"]
            self.released.append(name)
            known = name in self.programs
            if known:
                self.tell(gone=name)
            answer = {"program_id": name, "released": known}
            await wire.send(_whole(json.dumps(answer).encode()))
        elif path == "/programs/tool":
            await wire.send(_whole(b'{"program_id": "p", "known": true}'))
        else:
            await whole(b'{"path": %s}' % json.dumps(path).encode())(request, wire)

    async def _report(self, after: str, wait: float) -> bytes:
        known = int(after) if after else 0
        if known == self._sequence:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), wait)
        changed = [item for at, item in self._told if at > known]
        report = EngineReport(
            cursor=str(self._sequence),
            reset=not after,
            complete=True,
            memory=MemoryReport(
                1000, self.room, 64, [(self.block_size, None)], 0.001, 0.0, self.claimed
            ),
            programs=list(self.programs.values())
            if not after
            else [each for each in changed if isinstance(each, ProgramReport)],
            gone=[] if not after else [each for each in changed if isinstance(each, str)],
        )
        return msgspec.json.encode(report)


def _whole(body: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % len(body) + body


@asynccontextmanager
async def coordinator(launch: Launch, root_path: str = ""):
    """Port and control of a coordinator that serves; everything is over when the block is left."""
    async with running_coordinator(launch) as (app, control):
        config = uvicorn.Config(
            app,
            port=0,
            http=ClientProtocol,
            log_config=None,
            lifespan="off",
            server_header=False,
            date_header=False,
            root_path=root_path,
        )
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve())
        while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
            await asyncio.sleep(0.005)
        try:
            yield server.servers[0].sockets[0].getsockname()[1], control
        finally:
            server.should_exit = server.force_exit = True
            await serving
            control.fleet.check_integrity()
            control.engines.check_integrity()


async def until(true: Any, seconds: float = 20.0) -> None:
    """Wait until ``true()`` is."""
    async with asyncio.timeout(seconds):
        while not true():  # noqa: ASYNC110 - it may be anything that a test waits for
            await asyncio.sleep(0.005)


async def until_up(control: Control, engines: int) -> None:
    """Wait until so many engines are used."""
    await until(lambda: sum(b.usable for b in control.fleet.backends.values()) == engines)


def launch(engines, config=None, **settings):
    return Launch(
        config=config or CoordinatorConfig(engine_timeout=1.0),
        urls=[engine.url for engine in engines],
        **settings,
    )


def turn(program_id, **fields):
    return post({"model": "m", "messages": [], "program_id": program_id, **fields})


def get(path, headers=b""):
    return b"GET %b HTTP/1.1\r\nhost: x\r\n%b\r\n" % (path.encode(), headers)


def delete(path):
    return b"DELETE %b HTTP/1.1\r\nhost: x\r\n\r\n" % path.encode()


async def page(port, path, headers=b""):
    answer = await ask(port, get(path, headers))
    assert answer.status == 200, answer.body
    return answer.json()
