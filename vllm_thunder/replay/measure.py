"""One measurement: start a server, replay a workload against it, check that nothing is left."""

import asyncio
import json
import time
import urllib.request
from dataclasses import replace as changed
from pathlib import Path
from typing import Any

from rich.console import Console

from vllm_thunder.program.errors import ConfigError, ThunderError
from vllm_thunder.replay.client import ClientOptions
from vllm_thunder.replay.driver import replay
from vllm_thunder.replay.machine import describe_machine
from vllm_thunder.replay.progress import RunProgress
from vllm_thunder.replay.records import Replay
from vllm_thunder.replay.server import ServerSpec, running_server
from vllm_thunder.replay.workload import Workload

__all__ = ["NotDrained", "check_drained", "empty_server", "measure", "measure_on"]

#: What a chat template adds to a message, at most, in tokens (the tiny model's adds about eight).
_TOKENS_PER_MESSAGE = 16
_DRAIN_SECONDS = 10.0


class NotDrained(ThunderError):
    """After a run the server still holds programs or blocks; the message says which."""


def measure(
    spec: ServerSpec,
    workload: Workload,
    client: ClientOptions,
    *,
    log: Path,
    console: Console,
    label: str | None = None,
) -> Replay:
    """Start the server of ``spec``, replay ``workload`` once with ``client`` and stop it.

    ``client.base_url`` is replaced by the server's. A stock server is sent no program ids and
    no releases. A server of kind ``thunder`` has to be empty afterwards, unless the client
    releases nothing: NotDrained if it is not. Raises ConfigError when a context cannot fit into
    the KV cache at all, and ServerFailed when the server does not start.
    """
    kind = label or spec.kind
    _check_fits(spec, workload)
    with (
        RunProgress(console, kind, workload.steps) as progress,
        running_server(spec, log, on_wait=progress.starting) as url,
    ):
        return _replay_on(url, spec, workload, client, kind, progress)


def measure_on(
    url: str,
    spec: ServerSpec,
    workload: Workload,
    client: ClientOptions,
    *,
    console: Console,
    label: str | None = None,
) -> Replay:
    """As :func:`measure`, on the server of ``spec`` that runs at ``url`` and goes on running."""
    kind = label or spec.kind
    _check_fits(spec, workload)
    with RunProgress(console, kind, workload.steps) as progress:
        return _replay_on(url, spec, workload, client, kind, progress)


def _replay_on(
    url: str,
    spec: ServerSpec,
    workload: Workload,
    client: ClientOptions,
    kind: str,
    progress: RunProgress,
) -> Replay:
    if spec.kind == "stock":
        client = changed(client, program_id_field=None, release_path=None)
    machine = describe_machine()
    options = changed(client, base_url=url)
    result = asyncio.run(replay(workload, options, kind=kind, on_step=progress.step))
    if spec.kind == "thunder" and client.release_path:
        result.summary = check_drained(url)
    result.about |= {
        "machine": machine,
        "server": {
            "kind": spec.kind,
            "usable_blocks": spec.usable_blocks,
            "block_size": spec.block_size,
            "max_num_seqs": spec.max_num_seqs,
            "extra": list(spec.extra),
        },
    }
    return result


def empty_server(url: str, kind: str) -> None:
    """Make a running server of that kind as good as new for the next run: no program, no turn in
    flight, nothing in its prefix cache. What it has learned of rates and tools stays.

    The server needs vLLM's development mode. Raises NotDrained if it is not empty in the end.
    """
    if kind == "thunder":
        for program in _get(url, "/programs")["programs"]:
            _post(url, "/programs/release", {"program_id": program["program_id"]})
        check_drained(url)
    deadline = time.monotonic() + _DRAIN_SECONDS
    while not _post(url, "/reset_prefix_cache")["success"]:
        if time.monotonic() > deadline:
            raise NotDrained("the prefix cache cannot be reset: the server still uses blocks")
        time.sleep(0.2)


def _get(url: str, path: str) -> dict[str, Any]:
    return _json(urllib.request.Request(url + path))


def _post(url: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    return _json(
        urllib.request.Request(
            url + path,
            data=json.dumps(body or {}).encode(),
            headers={"Content-Type": "application/json"},
            method="POST",
        )
    )


def _json(request: urllib.request.Request) -> dict[str, Any]:
    """The answer's JSON object; NotDrained when there is none."""
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            found: dict[str, Any] = json.load(answer)
    except (OSError, ValueError) as error:
        method, url = request.get_method(), request.full_url
        raise NotDrained(f"{method} {url}: {error}") from error
    return found


def check_drained(url: str) -> dict[str, Any]:
    """The summary of a server that tracks no program and has every block free.

    Releases finish when the last turn ends, so it may take a moment. Raises NotDrained if it is
    not so within ten seconds, and if the server has no ``/programs/summary``.
    """
    deadline = time.monotonic() + _DRAIN_SECONDS
    while True:
        summary = _get(url, "/programs/summary")
        left = {
            "programs": summary["programs"],
            "held_turns": summary["held_turns"],
            "blocks in use": summary["total_blocks"] - summary["free_blocks"],
        }
        if not any(left.values()):
            return summary
        if time.monotonic() > deadline:
            text = ", ".join(f"{name}: {value}" for name, value in left.items() if value)
            raise NotDrained(f"after the run the server still has {text}")
        time.sleep(0.2)


def _check_fits(spec: ServerSpec, workload: Workload) -> None:
    if spec.usable_blocks is None:
        return
    longest = max(
        program.context_tokens + _TOKENS_PER_MESSAGE * (1 + 2 * len(program.steps))
        for program in workload.programs
    )
    capacity = spec.usable_blocks * spec.block_size
    if longest > capacity:
        raise ConfigError(
            f"--blocks: the longest context of {workload.name} takes about {longest} tokens; "
            f"{spec.usable_blocks} blocks hold {capacity}"
        )
