"""Spans on their way to a collector, and what happens where there is none."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import pytest
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from tests.coordinator.fake_engine import FakeEngine
from tests.coordinator.front import ask, post, running_front
from tests.coordinator.otlp_collector import running_collector
from tests.coordinator.program_engine import (
    ProgramEngine,
    coordinator,
    launch,
    page,
    turn,
    until,
    until_up,
)
from vllm_thunder.coordinator.server import running_coordinator
from vllm_thunder.coordinator.tracing import Tracing
from vllm_thunder.program.errors import ConfigError

PROTOCOL = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
#: Seconds after which nobody shuts down any more: ours, and some for a loaded machine.
MOST_SECONDS = 8.0


@pytest.fixture(params=["grpc", "http/protobuf"])
def protocol(request, monkeypatch):
    monkeypatch.setenv(PROTOCOL, request.param)
    return request.param


async def test_a_span_reaches_the_collector(engines, protocol):
    with running_collector(protocol) as collector:
        launched = launch(engines, otlp_traces_endpoint=collector.endpoint)
        async with coordinator(launched) as (port, control):
            await until_up(control, 2)
            given = f"content-type: application/json\r\ntraceparent: 00-{TRACE}-{PARENT}-01\r\n"
            request = post({"program_id": "p ☃"}, headers=given.encode())
            assert (await ask(port, request)).status == 200
        (call,) = (call for engine in engines for call in engine.calls)
        (span,) = collector.spans
        assert span.name == "llm_request"
        assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
        expected = f"00-{TRACE}-{span.span_id.hex()}-01"
        assert call.values(b"traceparent") == [expected.encode()]
        told = {item.key: item.value for item in span.attributes}
        assert told["vllm_thunder.program_id"].string_value == "p ☃"
        assert told["vllm_thunder.engine"].string_value in {engine.url for engine in engines}
        assert told["vllm_thunder.attempts"].int_value == 1
        assert collector.resource["service.name"] == "vllm_thunder coordinate"


async def test_the_environment_names_the_service(engines, protocol, monkeypatch):
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment=a")
    with running_collector(protocol) as collector:
        launched = launch(engines, otlp_traces_endpoint=collector.endpoint)
        async with coordinator(launched) as (port, control):
            await until_up(control, 2)
            await ask(port, turn("p"))
        assert collector.resource["service.name"] == "mine"
        assert collector.resource["deployment"] == "a"


@contextmanager
def no_collector(how):
    """An endpoint where nobody listens, or somebody who says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        if how == "nobody":
            listening.close()
        yield f"http://127.0.0.1:{port}/v1/traces"


@pytest.mark.parametrize("how", ["nobody", "silent"])
async def test_no_turn_and_no_end_waits_for_a_collector(engines, protocol, how, monkeypatch):
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")  # it is being tried while turns come
    with no_collector(how) as endpoint:
        running = coordinator(launch(engines, otlp_traces_endpoint=endpoint))
        port, control = await running.__aenter__()
        await until_up(control, 2)
        lags = []

        async def watch():
            while True:
                began = time.monotonic()
                await asyncio.sleep(0.01)
                lags.append(time.monotonic() - began - 0.01)

        watching = asyncio.create_task(watch())
        for _ in range(40):
            began = time.monotonic()
            assert (await ask(port, turn("p"))).status == 200
            assert time.monotonic() - began < 1.0
        began = time.monotonic()
        await running.__aexit__(None, None, None)
        assert time.monotonic() - began < MOST_SECONDS
        watching.cancel()
        assert max(lags) < 1.0


async def test_what_cannot_be_exported_is_dropped_and_no_call_waits(monkeypatch):
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "4")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "2")
    exported, free = [], threading.Event()

    class Stuck(SpanExporter):
        def export(self, spans):
            free.wait(60)
            exported.extend(spans)
            return SpanExportResult.SUCCESS

    tracing = Tracing(Stuck())
    async with running_front(tracing=tracing) as front:
        await front.add(FakeEngine())
        for _ in range(30):
            assert (await front.ask(turn("p"))).status == 200
    free.set()
    await tracing.close()
    assert 4 <= len(exported) <= 6  # what was kept, and what was with the exporter


# -- settings ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "endpoint", ["", "localhost:4317", "ftp://host", "http://", "http://[", "http://h:x"]
)
async def test_an_endpoint_that_is_none_is_refused(endpoint, protocol):
    with pytest.raises(ConfigError, match="--otlp-traces-endpoint"):
        async with running_coordinator(launch([], otlp_traces_endpoint=endpoint)):
            pass


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (PROTOCOL, "http/json"),
        ("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "100000"),
        ("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "soon"),
    ],
)
async def test_what_the_environment_says_wrongly_is_refused(name, value, monkeypatch):
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="OTEL_"):
        async with running_coordinator(launch([], otlp_traces_endpoint="http://127.0.0.1:9")):
            pass


async def test_without_the_packages_the_flag_says_what_it_needs(monkeypatch):
    monkeypatch.delitem(sys.modules, "vllm_thunder.coordinator.tracing")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match="opentelemetry-sdk"):
        async with running_coordinator(launch([], otlp_traces_endpoint="http://127.0.0.1:9")):
            pass


# -- whole processes ---------------------------------------------------------------------

_A_CALL_WITHOUT_TRACING = """
import asyncio, sys
from tests.coordinator.front import ask
from tests.coordinator.program_engine import ProgramEngine, coordinator, launch, turn, until_up
import vllm_thunder.cli.coordinate

async def main():
    engine = ProgramEngine()
    await engine.start()
    async with coordinator(launch([engine])) as (port, control):
        await until_up(control, 1)
        assert (await ask(port, turn("p"))).status == 200
    await engine.kill()

asyncio.run(main())
print([name for name in sys.modules if name.split(".")[0] in ("opentelemetry", "grpc", "requests")])
"""


def test_without_the_flag_nothing_of_it_is_imported(repo_root):
    done = subprocess.run(
        [sys.executable, "-c", _A_CALL_WITHOUT_TRACING],
        cwd=repo_root,
        env={**os.environ, "PYTHONPATH": str(repo_root)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


@contextmanager
def process(engine, repo_root, *flags):
    """A coordinator of its own and its port."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm_thunder", "coordinate", "--engines", engine.url]
    running = subprocess.Popen(
        [*command, "--host", "127.0.0.1", "--port", str(port), "--log-level", "info", *flags],
        env={**os.environ, "PYTHONPATH": str(repo_root)},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield running, port
    finally:
        running.kill()
        running.communicate()


async def first_answer(port):
    """Of a process that has just been started."""
    async with asyncio.timeout(60):
        while True:
            try:
                return await ask(port, turn("p"))
            except OSError:
                await asyncio.sleep(0.1)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
async def test_a_process_that_is_stopped_exports_what_it_has(number, protocol, repo_root):
    engine = ProgramEngine()
    await engine.start()
    with (
        running_collector(protocol) as collector,
        process(engine, repo_root, "--otlp-traces-endpoint", collector.endpoint) as (running, port),
    ):
        assert (await first_answer(port)).status == 200
        running.send_signal(number)
        _, said = await asyncio.to_thread(running.communicate, timeout=60)
        assert running.returncode == 0, said
        assert "Traceback" not in said
        (span,) = collector.spans
        (line,) = (line for line in said.splitlines() if '"turn_id"' in line)
        told = json.loads(line[line.index("{") :])
        assert told["trace_id"] == span.trace_id.hex()
        attributes = {item.key: item.value.string_value for item in span.attributes}
        assert told["request_id"] == attributes["gen_ai.request.id"]
    await engine.kill()


@pytest.mark.parametrize("how", ["nobody", "silent"])
async def test_a_process_ends_without_a_collector(how, protocol, repo_root):
    engine = ProgramEngine()
    await engine.start()
    with (
        no_collector(how) as endpoint,
        process(engine, repo_root, "--otlp-traces-endpoint", endpoint) as (running, port),
    ):
        assert (await first_answer(port)).status == 200
        began = time.monotonic()
        running.send_signal(signal.SIGTERM)
        _, said = await asyncio.to_thread(running.communicate, timeout=60)
        assert time.monotonic() - began < MOST_SECONDS
        assert running.returncode == 0, said
        assert "Traceback" not in said
        assert "could not be exported" in said
    await engine.kill()


# -- times -------------------------------------------------------------------------------


async def test_a_profile_counts_no_upload_as_decoding(engines):
    async with coordinator(launch(engines)) as (port, control):
        await until_up(control, 2)
        request = turn("p")
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request[:-5])
        await asyncio.sleep(0.4)
        writer.write(request[-5:])
        await reader.readuntil(b"}")
        writer.close()
        await until(lambda: control.fleet.get("p").profile.turns)
        profile = await page(port, "/profiles/p")
        assert profile["avg_decode_s"] < 0.2
