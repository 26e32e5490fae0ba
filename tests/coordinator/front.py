"""A proxy behind a real HTTP server, and a client that tells every byte."""

import asyncio
import json
import logging
from collections.abc import Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from uvicorn.server import ServerState

from tests.coordinator.fake_engine import FakeEngine
from vllm_thunder.coordinator.calls import Calls
from vllm_thunder.coordinator.client_protocol import ClientProtocol
from vllm_thunder.coordinator.config import CoordinatorConfig
from vllm_thunder.coordinator.dispatcher import Dispatcher
from vllm_thunder.coordinator.engines.stock import StockEngines
from vllm_thunder.coordinator.fleet.backend import Backend, Health
from vllm_thunder.coordinator.fleet.fleet import Fleet
from vllm_thunder.coordinator.prompts.prompts import Prompt, Prompts
from vllm_thunder.coordinator.proxy.exchange import Exchange
from vllm_thunder.coordinator.proxy.pool import ConnectionPool
from vllm_thunder.coordinator.proxy.proxy import Proxy
from vllm_thunder.coordinator.proxy.stored import STORED_PREFIX
from vllm_thunder.program.config import ThunderConfig
from vllm_thunder.program.endpoints import MODEL_CALLS
from vllm_thunder.program.report import EngineReport, MemoryReport

CHAT = "/v1/chat/completions"


@dataclass
class Answer:
    """``whole`` is false where the connection ended before the answer did."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes
    whole: bool

    def values(self, name: bytes) -> list[bytes]:
        return [value for key, value in self.headers if key == name]

    def json(self) -> Any:
        return json.loads(self.body)


class Client:
    """One connection to a server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self.reader = reader
        self.writer = writer

    @classmethod
    async def to(cls, port: int) -> "Client":
        return cls(*await asyncio.open_connection("127.0.0.1", port, limit=2**20))

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    def leave(self) -> None:
        self.writer.transport.abort()

    async def head(self) -> tuple[int, list[tuple[bytes, bytes]]]:
        head = await self.reader.readuntil(b"\r\n\r\n")
        first, *lines = head[:-4].split(b"\r\n")
        pairs = [line.split(b":", 1) for line in lines]
        return int(first.split(b" ")[1]), [(name.lower(), value.strip()) for name, value in pairs]

    async def piece(self) -> bytes:
        """One chunk of a chunked body, b"" for the last."""
        size = int(await self.reader.readline(), 16)
        return (await self.reader.readexactly(size + 2))[:-2]

    async def answer(self, *, has_body: bool = True) -> Answer:
        status, headers = await self.head()
        fields = dict(headers)
        body, complete = b"", True
        try:
            if not has_body or status in (204, 304):
                pass
            elif fields.get(b"transfer-encoding") == b"chunked":
                while piece := await self.piece():
                    body += piece
            elif b"content-length" in fields:
                body = await self.reader.readexactly(int(fields[b"content-length"]))
            else:
                body = await self.reader.read()
        except (asyncio.IncompleteReadError, ConnectionError, ValueError) as error:
            body += getattr(error, "partial", b"")
            complete = False
        return Answer(status, headers, body, complete)


def post(
    body: bytes | dict, path: str = CHAT, headers: bytes = b"content-type: application/json\r\n"
) -> bytes:
    """A request as bytes."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = b"POST %b HTTP/1.1\r\nhost: x\r\n%bcontent-length: %d\r\n\r\n"
    return head % (path.encode(), headers, len(data)) + data


async def ask(port: int, request: bytes, *, has_body: bool = True) -> Answer:
    """One request on a connection of its own."""
    client = await Client.to(port)
    client.send(request)
    try:
        return await asyncio.wait_for(client.answer(has_body=has_body), 60)
    finally:
        client.writer.close()


async def until(true: Callable[[], Any]) -> None:
    """Returns when it is so; TimeoutError if it never is."""
    async with asyncio.timeout(30):
        while not true():  # noqa: ASYNC110 - it may be anything that a test waits for
            await asyncio.sleep(0.005)


@dataclass
class Front:
    """``failures``: engines that the proxy said misbehaved. ``done``: requests that are over."""

    fleet: Fleet
    dispatcher: Dispatcher
    pool: ConnectionPool
    port: int = 0
    engines: dict[Backend, FakeEngine] = field(default_factory=dict)
    failures: list[Backend] = field(default_factory=list)
    done: list[Exchange] = field(default_factory=list)
    proxy: Proxy = field(init=False)
    #: What the fleet is said to have room for by each new engine.
    room: float = 1000.0

    async def add(self, engine: FakeEngine, **backend: Any) -> Backend:
        await engine.start()
        added = Backend(f"e{len(self.engines)}", engine.url, **backend)
        self.engines[added] = engine
        self.fleet.joined(added)
        self.report(added, self.room)
        return added

    def report(self, backend: Backend, room: float) -> None:
        memory = MemoryReport(1000, room, 64, [(16, None)], 0.001)
        self.dispatcher.reported(backend, EngineReport("1", False, True, memory, [], []))

    def down(self, backend: Backend) -> None:
        self.dispatcher.went_down(backend)
        self.proxy.abandon(backend)

    async def on_failure(self, backend: Backend) -> bool:
        self.failures.append(backend)
        await asyncio.sleep(0.01)
        if not self.engines[backend].alive and backend.health is not Health.DOWN:
            self.down(backend)
        return self.engines[backend].alive

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["method"] == "POST" and scope["path"] in MODEL_CALLS:
            await self.proxy.model_call(scope, receive, send)
        elif scope["path"].startswith(STORED_PREFIX):
            await self.proxy.stored_call(scope, receive, send)
        else:
            await self.proxy.pass_on(scope, receive, send, next(iter(self.engines)))

    async def ask(self, request: bytes, *, has_body: bool = True) -> Answer:
        return await ask(self.port, request, has_body=has_body)

    async def until(self, true: Callable[[], Any]) -> None:
        await until(true)


class _Raised(logging.Handler):
    """Keeps what the server says of an application that raised."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            self.records.append(record)


class _HundredTokens(Prompts):
    """Every prompt has a hundred tokens, so that a test knows what fits."""

    def look(self, body: bytes, now: float, *, is_new: bool) -> Prompt:
        return super().look(body, now, is_new=is_new)._replace(tokens=100.0)


@asynccontextmanager
async def running_front(**settings: Any):
    """A front whose books are empty when it ends, and with it every task that it started."""
    tasks = asyncio.all_tasks()
    loop = asyncio.get_running_loop()
    limits = ("max_wait", "max_held_turns", "max_held_bytes")
    fleet_settings = {name: settings.pop(name) for name in limits if name in settings}
    fleet = Fleet(CoordinatorConfig(**fleet_settings))
    front = Front(
        fleet, Dispatcher(fleet, loop.time), ConnectionPool(tls=settings.pop("tls", None))
    )
    settings = {
        "max_body_bytes": 8 * 1024 * 1024,
        "keepalive_seconds": 15.0,
        "connect_seconds": 2.0,
        "calls": Calls(
            fleet,
            _HundredTokens(),
            StockEngines(front.dispatcher, ThunderConfig(), 0, loop.time),
            loop.time,
        ),
        **settings,
    }
    front.proxy = Proxy(
        front.dispatcher,
        front.pool,
        on_failure=front.on_failure,
        on_done=front.done.append,
        **settings,
    )
    config = uvicorn.Config(
        front, log_config=None, server_header=False, date_header=False, proxy_headers=False
    )
    config.load()
    state = ServerState()
    server = await loop.create_server(lambda: ClientProtocol(config, state, {}), "127.0.0.1", 0)
    front.port = server.sockets[0].getsockname()[1]
    raised = _Raised()
    logging.getLogger("uvicorn.error").addHandler(raised)
    try:
        yield front
        await front.until(lambda: not state.tasks)
        assert not raised.records
        fleet.check_integrity()
        assert fleet.queue.held_turns == 0
        assert not any(program.in_flight for program in fleet)
        assert not any(b.running or b.unlabelled for b in fleet.backends.values())
        assert len(front.proxy.ongoing) == 0
    finally:
        logging.getLogger("uvicorn.error").removeHandler(raised)
        server.close()
        for connection in list(state.connections):
            connection.transport.abort()
        front.pool.close()
        for engine in front.engines.values():
            await engine.kill()
    await front.until(lambda: asyncio.all_tasks() <= tasks)
