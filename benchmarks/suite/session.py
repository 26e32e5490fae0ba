"""Takes measurements one after the other, and none twice.

Both kinds of servers of one KV size are up at the same time, one idle while the other is measured
(an idle engine sleeps), so that contenders can alternate without a start in between. Before a run
a server has no program and an empty prefix cache; what vllm_thunder has learned of rates and tools
stays, as it would in production.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.resumable import ResumableSession
from benchmarks.suite.rows import LOADS, Contender
from vllm_thunder.replay.client import ClientOptions
from vllm_thunder.replay.measure import empty_server, measure_on
from vllm_thunder.replay.records import Replay
from vllm_thunder.replay.server import ServerSpec, running_servers
from vllm_thunder.replay.tiny_model import TinyModel, build_tiny_model, default_cache
from vllm_thunder.replay.workload import Workload

__all__ = ["Measurement", "Session"]


@dataclass(frozen=True, slots=True)
class Measurement:
    """One contender with one seed."""

    contender: Contender
    seed: int

    @property
    def workload(self) -> Workload:
        return LOADS[self.contender.load](self.seed)

    def path(self, work: Path) -> Path:
        return work / f"{self.contender.load}-{self.contender.label}-seed{self.seed}.json"


class Session(ResumableSession[Measurement]):
    """The servers of one KV size are up together; see the module."""

    def __init__(
        self,
        work: Path,
        planned: Sequence[Measurement],
        console: Console,
        thunder_arguments: Sequence[str] = (),
    ):
        super().__init__(work, planned, console)
        self._thunder_arguments = tuple(thunder_arguments)
        self._blocks: int | None = None

    def _take(self, measurement: Measurement) -> Replay:
        contender, workload = measurement.contender, measurement.workload
        spec, url = self._server(contender.kind, workload)
        empty_server(url, contender.kind)
        result = measure_on(
            url,
            spec,
            workload,
            ClientOptions(
                url,
                program_id_field="program_id" if contender.ids else None,
                release_path="/programs/release" if contender.release and contender.ids else None,
                max_concurrent_programs=contender.most_programs,
                unlabelled_share=contender.unlabelled_share,
                window_seconds=contender.window,
            ),
            console=self._console,
            label=contender.label,
        )
        empty_server(url, contender.kind)
        return result

    def _server(self, kind: str, workload: Workload) -> tuple[ServerSpec, str]:
        if self._blocks != workload.blocks or kind not in self._running:
            self.stop_servers()
            self._blocks = workload.blocks
            kinds = {
                m.contender.kind for m in self._missing if m.workload.blocks == workload.blocks
            }
            specs = {found: self._spec(found, workload) for found in sorted(kinds | {kind})}
            self._console.print(f"starting {' and '.join(specs)}, {workload.blocks} blocks")
            logs = [self._work / f"server-{found}-{workload.blocks}.log" for found in specs]
            urls = self._servers.enter_context(
                running_servers(list(zip(specs.values(), logs, strict=True)))
            )
            self._running = dict(zip(specs, zip(specs.values(), urls, strict=True), strict=True))
        return self._running[kind]

    def _spec(self, kind: str, workload: Workload) -> ServerSpec:
        tiny = TinyModel()
        return ServerSpec(
            kind=kind,
            model=build_tiny_model(default_cache(), tiny),
            usable_blocks=workload.blocks,
            block_size=workload.block_size,
            kv_bytes_per_token=tiny.kv_bytes_per_token,
            max_model_len=tiny.max_position_embeddings,
            extra=self._thunder_arguments if kind == "thunder" else (),
            dev_mode=True,
        )

    def _identity(self, measurement: Measurement) -> dict[str, Any]:
        contender = measurement.contender
        thunder = contender.kind == "thunder"
        return {
            "seed": measurement.seed,
            "contender": {k: v for k, v in asdict(contender).items() if k != "seconds"},
            "load": hashlib.sha256(repr(measurement.workload).encode()).hexdigest()[:12],
            "commit": self._commit,
            "thunder_arguments": list(self._thunder_arguments) if thunder else [],
        }
