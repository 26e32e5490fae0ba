"""One measurement: what is sent to which kind, and what must be left afterwards: nothing."""

import asyncio
import contextlib
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.replay.fake_server import FakeServer
from vllm_thunder.program.errors import ConfigError
from vllm_thunder.replay import measure as measure_module
from vllm_thunder.replay.client import ClientOptions
from vllm_thunder.replay.measure import NotDrained, check_drained, measure
from vllm_thunder.replay.presets import preset
from vllm_thunder.replay.server import ServerSpec


@pytest.fixture
def serving(monkeypatch: pytest.MonkeyPatch):
    """``measure`` gets this server, in a thread of its own, instead of an engine's."""

    def use(server: FakeServer) -> None:
        @contextlib.contextmanager
        def running(spec: ServerSpec, log: Path, *, on_wait: Any) -> Iterator[str]:
            on_wait(0.1, "loading [/weights]")
            with in_thread(server):
                yield server.url

        monkeypatch.setattr(measure_module, "running_server", running)

    return use


@contextlib.contextmanager
def in_thread(server: FakeServer) -> Iterator[None]:
    ready, loop, stop = threading.Event(), asyncio.new_event_loop(), asyncio.Event()

    async def serve() -> None:
        async with server.serving():
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    assert ready.wait(5)
    try:
        yield
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(5)
        loop.close()


def run(kind: str, tmp_path: Path, **client: Any):
    return measure(
        ServerSpec(kind, "tiny", 40),
        preset("smoke", programs=3),
        ClientOptions("http://to-be-started", **client),
        log=tmp_path / "log",
        console=Console(quiet=True),
        label=f"{kind}@3",
    )


def test_stock_is_sent_no_ids(serving, tmp_path: Path) -> None:
    server = FakeServer()
    serving(server)
    result = run("stock", tmp_path)
    assert result.kind == "stock@3"
    assert len(result.steps) == 9
    assert not any("program_id" in request for request in server.requests)
    assert server.released == []
    assert result.about["server"]["usable_blocks"] == 40
    assert result.about["machine"]["cores"] >= 1
    assert result.about["client"]["program_id_field"] is None


def test_thunder_is_sent_ids_and_must_be_empty_afterwards(serving, tmp_path: Path) -> None:
    server = FakeServer()
    serving(server)
    result = run("thunder", tmp_path)
    assert all("program_id" in request for request in server.requests)
    assert len(server.released) == 3
    assert result.summary is not None
    assert result.summary["programs"] == 0


def test_a_program_that_is_left_is_an_error(serving, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(measure_module, "_DRAIN_SECONDS", 0.3)
    server = FakeServer()
    monkeypatch.setattr(server, "released", _Forgetful())
    serving(server)
    with pytest.raises(NotDrained, match="programs: 3"):
        run("thunder", tmp_path)


class _Forgetful(list):
    def append(self, _program_id: str) -> None:
        pass


def test_programs_that_are_never_released_may_stay(serving, tmp_path: Path) -> None:
    server = FakeServer()
    serving(server)
    result = run("thunder", tmp_path, release_path=None)
    assert result.summary is not None
    assert result.summary["programs"] == 3


@pytest.mark.parametrize(
    ("summary", "message"),
    [
        ({"programs": 1}, "programs: 1"),
        ({"held_turns": 2}, "held_turns: 2"),
        ({"free_blocks": 39}, "blocks in use: 1"),
    ],
)
def test_what_is_not_drained(monkeypatch, summary: dict[str, int], message: str) -> None:
    monkeypatch.setattr(measure_module, "_DRAIN_SECONDS", 0.0)
    empty = {"programs": 0, "held_turns": 0, "total_blocks": 40, "free_blocks": 40}
    with summary_server([empty]) as url:
        assert check_drained(url) == empty
    with summary_server([{**empty, **summary}]) as url, pytest.raises(NotDrained, match=message):
        check_drained(url)


def test_a_release_may_take_a_moment() -> None:
    busy = {"programs": 1, "held_turns": 0, "total_blocks": 40, "free_blocks": 30}
    empty = {"programs": 0, "held_turns": 0, "total_blocks": 40, "free_blocks": 40}
    with summary_server([busy, busy, empty]) as url:
        assert check_drained(url) == empty


def test_a_server_without_a_summary_is_not_taken_for_drained() -> None:
    with pytest.raises(NotDrained, match=r"GET http://127\.0\.0\.1:9/programs/summary"):
        check_drained("http://127.0.0.1:9")


@contextlib.contextmanager
def summary_server(answers: list[dict[str, int]]) -> Iterator[str]:
    """Gives the answers one after the other, the last one again and again."""
    left = list(answers)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps(left.pop(0) if len(left) > 1 else left[0]).encode()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_args: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join(5)


def test_a_context_that_cannot_fit_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--blocks: the longest context of thrash"):
        measure(
            ServerSpec("stock", "tiny", 100),
            preset("thrash"),
            ClientOptions("http://x"),
            log=tmp_path / "log",
            console=Console(quiet=True),
        )
    assert not (tmp_path / "log").exists()
