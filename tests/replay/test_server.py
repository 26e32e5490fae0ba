"""Starting and stopping servers: same flags for both kinds, and never one left behind."""

import ast
import os
import signal
import subprocess
import sys
import textwrap
import time
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest

from vllm_thunder.program.errors import ConfigError
from vllm_thunder.replay import server as server_module
from vllm_thunder.replay.server import (
    ServerFailed,
    ServerSpec,
    running_server,
    running_servers,
    server_command,
)

HEALTHY = """
    import http.server, os, signal, subprocess, sys
    if "deaf" in sys.argv:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200); self.end_headers()
            self.wfile.write(f"{os.getpid()} {child.pid}".encode())
    http.server.HTTPServer(("127.0.0.1", PORT), Handler).serve_forever()
"""


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch):
    """Run this Python text instead of a server; PORT stands for the port."""

    def use(text: str, *arguments: str) -> ServerSpec:
        def command(spec: ServerSpec, port: int, *, cpu: bool) -> list[str]:
            code = textwrap.dedent(text).replace("PORT", str(port))
            return [sys.executable, "-c", code, *arguments]

        monkeypatch.setattr(server_module, "server_command", command)
        return ServerSpec("stock", "model", 10)

    return use


def alive(pid: int) -> bool:
    """Whether a process runs; one that only waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def assert_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 5
    while any(map(alive, pids)):
        assert time.monotonic() < deadline, f"still there: {pids}"
        time.sleep(0.02)


def pids_of(url: str) -> list[int]:
    with urllib.request.urlopen(url) as answer:
        return [int(pid) for pid in answer.read().split()]


def test_both_kinds_get_the_same_flags() -> None:
    spec = {"model": "m", "usable_blocks": 750, "kv_bytes_per_token": 2048, "extra": ("--x",)}
    stock = server_command(ServerSpec("stock", **spec), 1234, cpu=True)
    thunder = server_command(ServerSpec("thunder", **spec), 1234, cpu=True)
    assert stock[stock.index("m") :] == thunder[thunder.index("m") :]
    assert thunder[: thunder.index("m")] == [sys.executable, "-m", "vllm_thunder", "serve"]
    assert stock[1] == "-P"
    text = " ".join(stock)
    assert "--num-gpu-blocks-override 751 " in text, "vLLM keeps one block for itself"
    assert "--max-model-len 24000 " in text, "a longer one would not fit the cache"
    assert "--enforce-eager --dtype float32" in text
    assert text.endswith("--x")


def test_a_gpu_is_not_told_how_to_run() -> None:
    command = server_command(ServerSpec("stock", "m", None), 1234, cpu=False)
    assert not {"--enforce-eager", "--dtype", "--num-gpu-blocks-override"} & set(command)


def test_memory_is_enough_for_the_blocks() -> None:
    spec = ServerSpec("stock", "m", 4000, kv_bytes_per_token=2048, max_model_len=8000)
    command = server_command(spec, 1, cpu=True)
    reserved = int(command[command.index("--kv-cache-memory-bytes") + 1])
    assert reserved >= 4001 * 32 * 2048
    assert command[command.index("--max-model-len") + 1] == "8000"


@pytest.mark.parametrize(("kind", "blocks"), [("stocks", 10), ("stock", 1)])
def test_a_spec_has_ranges(kind: str, blocks: int) -> None:
    with pytest.raises(ConfigError):
        ServerSpec(kind, "m", blocks)


def test_the_stock_launcher_imports_nothing_of_ours() -> None:
    launcher = Path(server_module.__file__).with_name("stock_launcher.py")
    tree = ast.parse(launcher.read_text())
    modules = [n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
    modules += [a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names]
    assert modules
    assert not [name for name in modules if name.startswith("vllm_thunder")]


def test_runs_and_stops_with_all_children(program, tmp_path: Path) -> None:
    waits: list[float] = []
    with running_server(
        program(HEALTHY), tmp_path / "deep" / "log", on_wait=lambda s, _: waits.append(s)
    ) as url:
        pids = pids_of(url)
        assert all(map(alive, pids))
    assert_gone(pids)
    assert waits
    assert waits == sorted(waits)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_exception_stops_it_too(program, tmp_path: Path, error: type[BaseException]) -> None:
    pids: list[int] = []

    def measurement_that_fails() -> None:
        with running_server(program(HEALTHY), tmp_path / "log") as url:
            pids.extend(pids_of(url))
            raise error

    with pytest.raises(error):
        measurement_that_fails()
    assert pids
    assert_gone(pids)


def test_a_server_that_ignores_sigterm_is_killed(program, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(server_module, "_STOP_SECONDS", 0.3)
    with running_server(program(HEALTHY, "deaf"), tmp_path / "log") as url:
        pids = pids_of(url)
    assert_gone(pids)


def test_sigterm_stops_the_server_first(program, tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    pids: list[int] = []

    def measurement_that_is_stopped() -> None:
        with running_server(program(HEALTHY), tmp_path / "log") as url:
            pids.extend(pids_of(url))
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)

    with pytest.raises(SystemExit) as left:
        measurement_that_is_stopped()
    assert left.value.code == 128 + signal.SIGTERM
    assert_gone(pids)
    assert signal.getsignal(signal.SIGTERM) == before


def test_several_run_at_once_and_stop_together(program, tmp_path: Path) -> None:
    spec = program(HEALTHY)
    pids: list[int] = []
    with running_servers([(spec, tmp_path / "one"), (spec, tmp_path / "two")]) as urls:
        assert len(set(urls)) == 2
        for url in urls:
            pids += pids_of(url)
        assert len(set(pids)) == 4
    assert_gone(pids)


def test_one_that_does_not_start_stops_the_others(program, tmp_path: Path) -> None:
    only_once = "\n    import sys; open(sys.argv[1], 'x').close()"
    spec = program(only_once + HEALTHY, str(tmp_path / "there"))
    with (
        pytest.raises(ServerFailed, match="FileExistsError"),
        running_servers([(spec, tmp_path / "one"), (spec, tmp_path / "two")]),
    ):
        pass


@pytest.mark.parametrize("dev_mode", [False, True])
def test_the_routes_for_development_are_asked_for(program, tmp_path: Path, dev_mode: bool) -> None:
    spec = replace(
        program("import os; print('mode', os.environ['VLLM_SERVER_DEV_MODE'], flush=True)"),
        dev_mode=dev_mode,
    )
    with pytest.raises(ServerFailed), running_server(spec, tmp_path / "log"):
        pass
    assert (tmp_path / "log").read_text() == f"mode {int(dev_mode)}\n"


def test_a_server_that_ends_tells_why(program, tmp_path: Path) -> None:
    text = """
        print("INFO starting")
        print("(EngineCore pid=7) ERROR 01-02 03:04:05 [core.py:1] ValueError: no memory left")
        print("(APIServer pid=6) RuntimeError: see the root cause above")
        raise SystemExit(3)
    """
    with (
        pytest.raises(ServerFailed, match="status 3: ValueError: no memory left") as failed,
        running_server(program(text), tmp_path / "log"),
    ):
        pass
    assert "RuntimeError" not in str(failed.value)
    assert str(tmp_path / "log") in str(failed.value)


def test_a_server_that_never_answers_is_given_up(program, tmp_path: Path) -> None:
    text = "import time; time.sleep(600)"
    with (
        pytest.raises(ServerFailed, match=r"did not answer within 0\.8 s: "),
        running_server(program(text), tmp_path / "log", start_timeout=0.8),
    ):
        pass


def test_a_log_without_an_exception_tells_its_last_lines(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("".join(f"line {number}\n\n" for number in range(30)))
    lines = server_module._cause(log).splitlines()
    assert lines == [*(f"line {number}" for number in range(20, 30)), f"(whole log: {log})"]


def test_the_stock_launcher_refuses_a_process_with_us_in_it() -> None:
    """It would measure something else than stock vLLM."""
    launcher = Path(server_module.__file__).with_name("stock_launcher.py")
    code = f"import sys; sys.modules['vllm_thunder'] = sys; exec(open({str(launcher)!r}).read())"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=False
    )
    assert found.returncode == 1
    assert "would not measure stock vLLM" in found.stderr
