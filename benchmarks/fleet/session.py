"""Takes measurements one after the other, and none twice.

The engines of all contenders of a row are up at the same time, idle while others are measured, so
that contenders can alternate. Before a run they have no program and an empty prefix cache; what
vllm_thunder has learned of rates and tools stays. The coordinator is started for each run.
"""

import asyncio
import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console

from benchmarks.fleet.client import FleetClient
from benchmarks.fleet.load import ENGINES, engine_blocks, skewed
from benchmarks.fleet.rows import Contender, Setup
from benchmarks.fleet.watch import Imbalance, Watch, coordinator_reader, engine_reader
from benchmarks.resumable import ResumableSession
from vllm_thunder.replay.client import ChatClient, ClientOptions
from vllm_thunder.replay.driver import OnStep, replay
from vllm_thunder.replay.machine import describe_machine
from vllm_thunder.replay.measure import NotDrained, check_drained, empty_server
from vllm_thunder.replay.progress import RunProgress
from vllm_thunder.replay.records import Replay
from vllm_thunder.replay.server import (
    ServerFailed,
    ServerSpec,
    running_coordinator,
    running_servers,
)
from vllm_thunder.replay.tiny_model import TinyModel, build_tiny_model, default_cache
from vllm_thunder.replay.workload import Workload

__all__ = ["Measurement", "Session"]

_CHECKOUT = Path(__file__).resolve().parents[2]
#: Seconds between two samples of memory.
_COORDINATOR_INTERVAL, _ENGINE_INTERVAL = 0.2, 1.0
_COUNTERS = ("placements", "moves", "forced")
_PREFIX = "vllm_thunder_coordinator:"


@dataclass(frozen=True, slots=True)
class Measurement:
    """One contender with one seed. ``steps`` keeps the first ones of each program."""

    setup: Setup
    contender: Contender
    seed: int
    steps: int | None = None

    @property
    def workload(self) -> Workload:
        return skewed(self.seed, steps=self.steps)

    def path(self, work: Path) -> Path:
        return work / f"{self.setup.name}-{self.contender.label}-seed{self.seed}.json"


class Session(ResumableSession[Measurement]):
    """The engines of a row's contenders are up together; see the module."""

    def __init__(
        self,
        work: Path,
        planned: Sequence[Measurement],
        console: Console,
        *,
        engine_arguments: Sequence[str] = (),
        coordinator_arguments: Sequence[str] = (),
    ):
        super().__init__(work, planned, console)
        self._engine_arguments = tuple(engine_arguments)
        self._coordinator_arguments = tuple(coordinator_arguments)
        self._setup: Setup | None = None

    def _take(self, measurement: Measurement) -> Replay:
        contender, workload = measurement.contender, measurement.workload
        engines = self._engines(measurement)
        for url in engines:
            empty_server(url, contender.kind)
        machine = describe_machine()
        with (
            contextlib.ExitStack() as front,
            RunProgress(self._console, contender.label, workload.steps) as progress,
        ):
            targets = engines
            if contender.coordinated:
                log = measurement.path(self._work).with_suffix(".coordinator.log")
                targets = [
                    front.enter_context(
                        running_coordinator(
                            engines, log, arguments=self._arguments_of_the_coordinator(measurement)
                        )
                    )
                ]
            result = asyncio.run(
                self._replay(measurement, workload, targets, engines, progress.step)
            )
            if contender.kind == "thunder":
                for url in engines:
                    check_drained(url)
        result.about |= {"machine": machine, "server": self._described(measurement)}
        return result

    def _arguments_of_the_coordinator(self, measurement: Measurement) -> list[str]:
        return [*measurement.setup.coordinator_arguments, *self._coordinator_arguments]

    async def _replay(
        self,
        measurement: Measurement,
        workload: Workload,
        targets: Sequence[str],
        engines: Sequence[str],
        on_step: OnStep,
    ) -> Replay:
        contender = measurement.contender
        ids = contender.kind == "thunder"
        options = ClientOptions(
            targets[0],
            program_id_field="program_id" if ids else None,
            release_path="/programs/release" if ids else None,
        )
        client = FleetClient(options, targets, engines, contender.router)
        watch = None
        about: dict[str, Any] = {"engines": len(engines)}
        async with contextlib.AsyncExitStack() as around:
            if contender.coordinated:
                await _all_used(targets[0], len(engines))
                watch = Watch(coordinator_reader(targets[0]), _COORDINATOR_INTERVAL)
            elif contender.kind == "thunder":
                watch = Watch(engine_reader(engines), _ENGINE_INTERVAL)
            if watch is not None:
                await around.enter_async_context(watch)
            result = await replay(
                workload,
                options,
                kind=contender.label,
                on_step=on_step,
                connect=lambda _options: client,
            )
        if contender.coordinated:
            await _no_program_left(targets[0])
            about |= await _coordinator_counters(options)
        else:
            about |= {"moves": client.moves, "calls": client.calls}
        if watch is not None:
            about["imbalance"] = Imbalance.of(watch.samples).to_json()
            samples = measurement.path(self._work).with_suffix(".samples.jsonl")
            lines = [json.dumps(asdict(sample)) for sample in watch.samples]
            samples.write_text("\n".join(lines) + "\n", encoding="utf-8")
        result.about["fleet"] = about
        return result

    def _engines(self, measurement: Measurement) -> list[str]:
        setup, kind = measurement.setup, measurement.contender.kind
        if self._setup != setup or kind not in self._running:
            self.stop_servers()
            self._setup = setup
            kinds = sorted({m.contender.kind for m in self._missing if m.setup == setup} | {kind})
            self._console.print(f"starting {ENGINES} engines each: {', '.join(kinds)}")
            servers = [
                (self._spec(setup, k), self._work / f"server-{setup.name}-{k}-{number}.log")
                for k in kinds
                for number in range(ENGINES)
            ]
            urls = self._servers.enter_context(running_servers(servers))
            self._running = {
                k: urls[index * ENGINES : (index + 1) * ENGINES] for index, k in enumerate(kinds)
            }
        return self._running[kind]

    def _spec(self, setup: Setup, kind: str) -> ServerSpec:
        tiny = TinyModel()
        path = os.pathsep.join(filter(None, (str(_CHECKOUT), os.environ.get("PYTHONPATH"))))
        return ServerSpec(
            kind=kind,
            model=build_tiny_model(default_cache(), tiny),
            usable_blocks=engine_blocks(),
            kv_bytes_per_token=tiny.kv_bytes_per_token,
            max_model_len=tiny.max_position_embeddings,
            extra=(*setup.engine_arguments, *(self._engine_arguments if kind == "thunder" else ())),
            dev_mode=True,
            environment=(("PYTHONPATH", path), *setup.environment),
        )

    def _described(self, measurement: Measurement) -> dict[str, Any]:
        spec = self._spec(measurement.setup, measurement.contender.kind)
        return {
            "kind": spec.kind,
            "engines": ENGINES,
            "usable_blocks": spec.usable_blocks,
            "block_size": spec.block_size,
            "max_num_seqs": spec.max_num_seqs,
            "extra": list(spec.extra),
            "environment": dict(measurement.setup.environment),
        }

    def _identity(self, measurement: Measurement) -> dict[str, Any]:
        contender = measurement.contender
        thunder = contender.kind == "thunder"
        return {
            "seed": measurement.seed,
            "setup": [measurement.setup.name, *measurement.setup.engine_arguments],
            "contender": [contender.label, contender.kind],
            "load": hashlib.sha256(repr(measurement.workload).encode()).hexdigest()[:12],
            "commit": self._commit,
            "engine_arguments": list(self._engine_arguments) if thunder else [],
            "coordinator_arguments": self._arguments_of_the_coordinator(measurement)
            if contender.coordinated
            else [],
        }


async def _all_used(url: str, engines: int, seconds: float = 60.0) -> None:
    """Wait until the coordinator uses all engines."""

    def used(page: dict[str, Any]) -> bool:
        return page["state"] == "ok" and len(page["engines"]) == engines

    page = await _status_when(used, url, seconds)
    if not used(page):
        raise ServerFailed(
            f"the coordinator does not use all {engines} engines within {seconds:g} s: "
            f"{page['state']}, {page['engines']}, {page['unreachable']}"
        )


async def _no_program_left(url: str, seconds: float = 10.0) -> None:
    """Every program was released: the coordinator forgets the last one within ``seconds``."""
    page = await _status_when(lambda page: not page["programs"], url, seconds)
    if page["programs"]:
        raise NotDrained(f"after the run the coordinator still has {page['programs']} programs")


async def _status_when(
    reached: Callable[[dict[str, Any]], bool], url: str, seconds: float
) -> dict[str, Any]:
    """The coordinator's status once it is ``reached``, or after ``seconds``."""
    deadline = time.monotonic() + seconds
    async with aiohttp.ClientSession(raise_for_status=True) as session:
        while True:
            async with session.get(f"{url}/status") as answer:
                page: dict[str, Any] = await answer.json()
            if reached(page) or time.monotonic() > deadline:
                return page
            await asyncio.sleep(0.1)


async def _coordinator_counters(options: ClientOptions) -> dict[str, Any]:
    async with ChatClient(replace(options, model="any")) as coordinator:
        counters = await coordinator.counters()
    return {name: int(counters[f"{_PREFIX}{name}_total"]) for name in _COUNTERS}
