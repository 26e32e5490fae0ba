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

__all__ = ["NotDrained", "check_drained", "measure"]

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
    if spec.kind == "stock":
        client = changed(client, program_id_field=None, release_path=None)
    with (
        RunProgress(console, kind, workload.steps) as progress,
        running_server(spec, log, on_wait=progress.starting) as url,
    ):
        options = changed(client, base_url=url)
        machine = describe_machine()
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


def check_drained(url: str) -> dict[str, Any]:
    """The summary of a server that tracks no program and has every block free.

    Releases finish when the last turn ends, so it may take a moment. Raises NotDrained if it is
    not so within ten seconds, and if the server has no ``/programs/summary``.
    """
    deadline = time.monotonic() + _DRAIN_SECONDS
    while True:
        try:
            with urllib.request.urlopen(f"{url}/programs/summary", timeout=10) as answer:
                summary: dict[str, Any] = json.load(answer)
        except (OSError, ValueError) as error:
            raise NotDrained(f"GET /programs/summary: {error}") from error
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
