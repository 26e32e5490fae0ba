"""What the coordinator's proxy costs: its CPU time a turn, and what it adds to a turn's time.

    python benchmarks/proxy_cost.py

Three processes on loopback: an engine that answers at once, the proxy alone (uvicorn with uvloop
and httptools, pinned to one core), and a client. Each load is sent straight to the engine and
through the proxy in turns, in rounds, in one run. Turns belong to programs, and each is placed by
the queue.

    short     a chat of a few hundred bytes, answered in one piece
    stream    the same, answered in 20 events that come one by one
    large     a prompt of 2 MB

CPU time is the proxy process's own (user and system), with one turn at a time and with sixteen.
"""

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import metadata
from itertools import chain
from pathlib import Path
from typing import Any, cast

import httptools
import uvicorn
import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from vllm_thunder.coordinator.calls import Calls
from vllm_thunder.coordinator.client_protocol import ClientProtocol
from vllm_thunder.coordinator.config import CoordinatorConfig
from vllm_thunder.coordinator.dispatcher import Dispatcher
from vllm_thunder.coordinator.engines.stock import StockEngines
from vllm_thunder.coordinator.fleet.backend import Backend
from vllm_thunder.coordinator.fleet.fleet import Fleet
from vllm_thunder.coordinator.proxy.pool import ConnectionPool
from vllm_thunder.coordinator.proxy.proxy import Proxy
from vllm_thunder.program.config import ThunderConfig
from vllm_thunder.program.report import EngineReport, MemoryReport
from vllm_thunder.replay.machine import describe_machine

PATH = "/v1/chat/completions"
LOADS = ["short", "stream", "large"]
CHUNKS = 20
#: Seconds between two events of a stream.
GAP = 0.002
CONCURRENT = 16
#: The first turns of a connection do not count in times.
WARM_UP = 2

#: The proxy's CPU milliseconds a short turn, and milliseconds that it adds: what must hold.
BARS = {
    "short_cpu_ms": 0.67,
    "short_added_p50_ms": 1.5,
    "stream_added_p50_ms": 1.5,
    "large_added_p50_ms": 15.0,
}

_ANSWER = json.dumps(
    {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello there. " * 8},
                "finish_reason": "stop",
            }
        ],
        "usage": {"prompt_tokens": 90, "completion_tokens": 24, "total_tokens": 114},
    }
).encode()
_EVENT = b'data: {"id":"chatcmpl-1","choices":[{"index":0,"delta":{"content":" word"}}]}\n\n'


def request_for(load: str, program: int) -> bytes:
    """A model call as an SDK sends it."""
    content = "word " * 60 if load != "large" else "some words " * (2_000_000 // 11)
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 24,
        "program_id": f"program-{program}",
        "stream": load == "stream",
    }
    data = json.dumps(body).encode()
    head = (
        f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nAccept: application/json\r\n"
        "Accept-Encoding: gzip, deflate\r\nConnection: keep-alive\r\nUser-Agent: OpenAI/Python\r\n"
        "Authorization: Bearer key\r\nX-Stainless-Lang: python\r\nX-Stainless-OS: Linux\r\n"
        "X-Stainless-Arch: x64\r\nX-Stainless-Runtime: CPython\r\nX-Stainless-Retry-Count: 0\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


# -- the engine --------------------------------------------------------------------------


class Engine(asyncio.Protocol):
    """Answers as vLLM's server does, and does nothing else."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._parser = httptools.HttpRequestParser(self)
        self._streams = False

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        if b'"stream": true' in body:
            self._streams = True

    def on_message_complete(self) -> None:
        common = b"HTTP/1.1 200 OK\r\ndate: Mon, 30 Nov 2026 12:00:00 GMT\r\nserver: uvicorn\r\n"
        if not self._streams:
            kind = b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(_ANSWER)
            self._transport.write(common + kind + _ANSWER)
            return
        self._streams = False
        kind = b"content-type: text/event-stream; charset=utf-8\r\n"
        self._transport.write(common + kind + b"transfer-encoding: chunked\r\n\r\n")
        self._event(CHUNKS)

    def _event(self, left: int) -> None:
        if self._transport.is_closing():
            return
        if left == 0:
            self._transport.write(b"0\r\n\r\n")
            return
        self._transport.write(b"%x\r\n%b\r\n" % (len(_EVENT), _EVENT))
        asyncio.get_running_loop().call_later(GAP, self._event, left - 1)


async def run_engine() -> None:
    server = await asyncio.get_running_loop().create_server(Engine, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


# -- the proxy ---------------------------------------------------------------------------


async def run_proxy(engine_port: int) -> None:
    fleet = Fleet(CoordinatorConfig())
    loop = asyncio.get_running_loop()
    dispatcher = Dispatcher(fleet, loop.time)
    backend = Backend("engine", f"http://127.0.0.1:{engine_port}")
    fleet.joined(backend)
    memory = MemoryReport(10_000_000, 10_000_000, 1024, [(16, None)], 1e-6)
    dispatcher.reported(backend, EngineReport("1", False, True, memory, [], []))
    stock = StockEngines(dispatcher, ThunderConfig(), 0, loop.time)

    async def still_well(backend: Backend) -> bool:
        return True

    proxy = Proxy(
        dispatcher,
        ConnectionPool(),
        calls=Calls(fleet, dispatcher.prompts, stock, loop.time),
        on_failure=still_well,
        on_done=lambda exchange: None,
        max_body_bytes=64 * 1024 * 1024,
        keepalive_seconds=15.0,
        connect_seconds=5.0,
    )

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == PATH:
            await proxy.model_call(scope, receive, send)
            return
        text = repr(time.process_time()).encode()
        length = [(b"content-length", b"%d" % len(text))]
        await send({"type": "http.response.start", "status": 200, "headers": length})
        await send({"type": "http.response.body", "body": text})

    config = uvicorn.Config(
        app,
        loop="uvloop",
        http=ClientProtocol,
        access_log=False,
        log_level="warning",
        lifespan="off",
        timeout_keep_alive=600,
        proxy_headers=False,
        server_header=False,
        date_header=False,
    )
    listening = socket.create_server(("127.0.0.1", 0), backlog=128)
    print(listening.getsockname()[1], flush=True)
    await uvicorn.Server(config).serve(sockets=[listening])


# -- the client --------------------------------------------------------------------------


class Caller(asyncio.Protocol):
    """One connection; :meth:`call` is one request and its answer."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    @classmethod
    async def to(cls, port: int) -> "Caller":
        _, caller = await asyncio.get_running_loop().create_connection(cls, "127.0.0.1", port)
        return caller

    async def call(self, request: bytes) -> tuple[float, float, bytes]:
        """Seconds to the first byte of the body and to its end; the body."""
        self._parser = httptools.HttpResponseParser(self)
        self._body: list[bytes] = []
        self._done: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._first = 0.0
        began = time.perf_counter()
        self._transport.write(request)
        end = await self._done
        return self._first - began, end - began, b"".join(self._body)

    def close(self) -> None:
        self._transport.close()

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        self._first = self._first or time.perf_counter()
        self._body.append(body)

    def on_message_complete(self) -> None:
        self._done.set_result(time.perf_counter())

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._done.done():
            self._done.set_exception(ConnectionError("the connection was lost"))


async def calls(port: int, load: str, turns: int, concurrent: int) -> list[tuple[float, float]]:
    """First-byte and total seconds of each turn."""

    async def caller(number: int) -> list[tuple[float, float]]:
        request = request_for(load, number)
        expected = _EVENT * CHUNKS if load == "stream" else _ANSWER
        connection = await Caller.to(port)
        taken = []
        for turn in range(turns // concurrent + WARM_UP):
            first, total, body = await connection.call(request)
            if body != expected:
                raise SystemExit(f"not the engine's answer: {body[:500]!r}")
            if turn >= WARM_UP:
                taken.append((first, total))
        connection.close()
        return taken

    return list(chain.from_iterable(await asyncio.gather(*map(caller, range(concurrent)))))


async def cpu_seconds(port: int) -> float:
    caller = await Caller.to(port)
    _, _, body = await caller.call(b"GET /cpu HTTP/1.1\r\nhost: x\r\n\r\n")
    caller.close()
    return float(body)


async def measure(engine: int, proxy: int, load: str, turns: int, rounds: int) -> dict[str, Any]:
    straight: list[tuple[float, float]] = []
    through: list[tuple[float, float]] = []
    cpu: dict[str, list[float]] = {"one": [], "many": []}
    await calls(proxy, load, turns // 4, 1)
    for _ in range(rounds):
        straight += await calls(engine, load, turns, 1)
        for name, concurrent in (("one", 1), ("many", CONCURRENT)):
            before = await cpu_seconds(proxy)
            taken = await calls(proxy, load, turns, concurrent)
            spent = await cpu_seconds(proxy) - before
            sent = (turns // concurrent + WARM_UP) * concurrent
            cpu[name].append(spent / sent)
            if concurrent == 1:
                through += taken
    totals = {"straight": [t for _, t in straight], "through": [t for _, t in through]}
    firsts = {"straight": [f for f, _ in straight], "through": [f for f, _ in through]}
    return {
        "turns": len(through),
        "cpu_ms_one_at_a_time": _ms(statistics.median(cpu["one"])),
        f"cpu_ms_{CONCURRENT}_at_once": _ms(statistics.median(cpu["many"])),
        "total_ms": {name: _quantiles(values) for name, values in totals.items()},
        "first_byte_ms": {name: _quantiles(values) for name, values in firsts.items()},
        "added_ms": _added(totals),
        "added_first_byte_ms": _added(firsts),
    }


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 4)


def _quantiles(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {f"p{p}": _ms(ordered[min(len(ordered) * p // 100, len(ordered) - 1)]) for p in (50, 99)}


def _added(values: dict[str, list[float]]) -> dict[str, float]:
    straight, through = _quantiles(values["straight"]), _quantiles(values["through"])
    return {name: round(through[name] - straight[name], 4) for name in straight}


# -- all of it ---------------------------------------------------------------------------


def start(*arguments: str, core: int | None = None) -> tuple[subprocess.Popen[str], int]:
    """A child and the port that it says it listens on."""
    process = subprocess.Popen(
        [sys.executable, __file__, *arguments], stdout=subprocess.PIPE, text=True
    )
    if core is not None:
        os.sched_setaffinity(process.pid, {core})
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def run(names: list[str], turns: int, rounds: int) -> dict[str, Any]:
    cores = sorted(os.sched_getaffinity(0))
    pinned, others = cores[-1], set(cores[:-1]) or set(cores)
    os.sched_setaffinity(0, others)
    engine, engine_port = start("--child", "engine")
    children = [engine]
    try:
        proxy, proxy_port = start("--child", "proxy", str(engine_port), core=pinned)
        children.append(proxy)
        sizes = {"short": turns, "stream": max(turns // 16, 16), "large": max(turns // 16, 16)}
        return {
            load: uvloop.run(measure(engine_port, proxy_port, load, sizes[load], rounds))
            for load in names
        }
    finally:
        for child in children:
            child.terminate()
            child.wait()


def held_bars(loads: dict[str, Any]) -> dict[str, Any]:
    values = {f"{load}_added_p50_ms": told["added_ms"]["p50"] for load, told in loads.items()}
    if "short" in loads:
        # The dearer of the two: alone, a turn wakes the process for itself.
        cpu = (value for name, value in loads["short"].items() if name.startswith("cpu_ms"))
        values["short_cpu_ms"] = max(cpu)
    return {
        name: {"bar": BARS[name], "value": value, "holds": value <= BARS[name]}
        for name, value in values.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--turns", type=int, default=800, help="short turns a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=LOADS)
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        children: dict[str, Callable[..., Any]] = {"engine": run_engine, "proxy": run_proxy}
        kind, *ports = args.child
        uvloop.run(children[kind](*map(int, ports)))
        return
    machine = describe_machine()
    loads = run(args.loads, args.turns, args.rounds)
    report = {"bars": held_bars(loads), "loads": loads, "machine": machine}
    for name in ("aiohttp", "httptools", "msgspec", "uvicorn", "uvloop"):
        machine[name] = metadata.version(name)
    print(json.dumps(report, indent=1))
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if not all(bar["holds"] for bar in report["bars"].values()):
        raise SystemExit("a bar does not hold")


if __name__ == "__main__":
    main()
