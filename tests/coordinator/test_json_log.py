"""The log of the running command, read as those read it who collect logs."""

import asyncio
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager

import pytest

from tests.coordinator.fake_engine import hang
from tests.coordinator.front import Client, ask, post
from tests.coordinator.program_engine import ProgramEngine, turn, until
from vllm_thunder.coordinator.json_log import JsonLines

COMMON = {"time", "level", "logger", "message"}


@contextmanager
def process(engine, repo_root, level):
    """A coordinator of its own and its port."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm_thunder", "coordinate", "--host", "127.0.0.1"]
    running = subprocess.Popen(
        [*command, "--port", str(port), "--engines", engine.url, "--log-level", level],
        env={**os.environ, "PYTHONPATH": str(repo_root)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield running, port
    finally:
        running.kill()
        running.wait()


async def said_and_log(repo_root, level):
    """Three calls, one that is answered, one that is refused and one whose client leaves."""
    engine = ProgramEngine()
    await engine.start()
    with process(engine, repo_root, level) as (running, port):
        async with asyncio.timeout(60):
            while True:
                try:
                    if (await ask(port, turn("p ☃\n"))).status == 200:
                        break
                except OSError:
                    await asyncio.sleep(0.1)
        refused = await ask(port, post({"program_id": ""}, headers=b"x-request-id: r\xe9\r\n"))
        assert refused.status == 200  # no JSON, as nothing says so
        assert (await ask(port, turn(""))).status == 400
        engine.chat = hang
        client = await Client.to(port)
        client.send(turn("q"))
        await until(lambda: len(engine.calls) == 3)
        client.leave()
        await engine.kill()
        await asyncio.sleep(0.5)
        running.send_signal(signal.SIGTERM)
        return await asyncio.to_thread(running.communicate, timeout=60)


@pytest.mark.parametrize("level", ["info", "warning"])
async def test_every_line_is_json(repo_root, level):
    said, log = await said_and_log(repo_root, level)
    assert said.startswith("vllm_thunder coordinate: http://127.0.0.1:")
    records = [json.loads(line) for line in log.splitlines()]
    assert all(set(record) >= COMMON for record in records)
    calls = [record for record in records if "outcome" in record]
    well = ["ok", "ok"] if level == "info" else []
    assert [call["outcome"] for call in calls if call["level"] == "INFO"] == well
    others = [call["outcome"] for call in calls if call["level"] == "WARNING"]
    assert others == ["refused", "client_gone"]
    assert all(call["path"] == "/v1/chat/completions" for call in calls)
    if level == "info":
        assert calls[0]["program_id"] == "p ☃\n"
        assert calls[0]["total_seconds"] >= calls[0]["first_byte_seconds"] > 0
        assert calls[1]["request_id"] == "ré"


def test_an_error_is_one_line_with_its_traceback():
    try:
        raise ValueError("first\nsecond \ud800")
    except ValueError:
        record = logging.LogRecord(
            "a", logging.ERROR, "f", 1, "it %s", ("broke\n",), sys.exc_info()
        )
    line = JsonLines().format(record)
    assert "\n" not in line
    told = json.loads(line)
    assert (told["level"], told["logger"], told["message"]) == ("ERROR", "a", "it broke\n")
    assert "ValueError: first\nsecond" in told["traceback"]
