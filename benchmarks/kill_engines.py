"""Kill -9 of engines under load, one after the other, behind a coordinator.

    python benchmarks/kill_engines.py --kills 10

Programs run their turns in a closed loop, half of them streamed, against ``vllm_thunder
coordinate`` in front of three engines: real servers and engine cores, whose executor takes the time
of a model and computes nothing, so that three of them and one that starts fit on two cores
(``--model``: they compute, and a start beside busy ones takes minutes). Again and again the engine
that has the most turns in flight is killed with its whole process group, and started again. What
must hold: every program finishes every step; no client sees more than one broken stream for each
kill; when all have been released nothing is left, neither in the coordinator nor in an engine.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from vllm_thunder.replay.server import MODEL_NAME, ServerSpec, free_ports, on_cpu, server_command
from vllm_thunder.replay.tiny_model import TinyModel, build_tiny_model
from vllm_thunder.replay.words import write_words

ENGINES = 3
BLOCKS, BLOCK_SIZE = 200, 32
#: An engine that starts beside two that are busy, on two cores, takes minutes.
START_SECONDS = 300.0
_PACED = "benchmarks.fleet.paced_executor.PacedExecutor"


class Processes:
    """The servers, each in a process group of its own."""

    def __init__(self, folder: Path, model: Path, *, paced: bool):
        self.folder = folder
        self._paced = ("--distributed-executor-backend", _PACED) if paced else ()
        self.ports = free_ports(ENGINES + 1)
        self._spec = ServerSpec(
            "thunder",
            model,
            usable_blocks=BLOCKS,
            block_size=BLOCK_SIZE,
            kv_bytes_per_token=TinyModel().kv_bytes_per_token,
            max_model_len=4096,
            extra=self._paced,
        )
        self._running: dict[int, subprocess.Popen[bytes]] = {}

    def url(self, port: int) -> str:
        return f"http://127.0.0.1:{port}"

    def start_engine(self, port: int) -> None:
        environment = {
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            # Each would bind its threads to the same core, and one that starts gets nothing of it.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
        }
        self._start(port, server_command(self._spec, port, cpu=on_cpu()), environment)

    def start_coordinator(self) -> str:
        *engines, port = self.ports
        command = [sys.executable, "-m", "vllm_thunder", "coordinate"]
        command += ["--engines", ",".join(map(self.url, engines))]
        command += ["--host", "127.0.0.1", "--port", str(port), "--engine-timeout", "10"]
        self._start(port, command, {})
        return self.url(port)

    def kill(self, port: int) -> None:
        process = self._running.pop(port)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def stop(self) -> None:
        for port in list(self._running):
            self.kill(port)

    def _start(self, port: int, command: list[str], environment: dict[str, str]) -> None:
        with (self.folder / f"{port}.log").open("ab") as log:
            self._running[port] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                start_new_session=True,
            )


class Load:
    """Programs that run until they are told to finish, and what their clients saw."""

    def __init__(self, session: aiohttp.ClientSession, url: str, programs: int, seed: int):
        self._session = session
        self._url = url
        self._programs = programs
        self._seed = seed
        self.finishing = False
        self.kills = 0
        self.seen: Counter[str] = Counter()
        #: Broken streams by program and by the number of kills before.
        self.broken: Counter[tuple[int, int]] = Counter()
        self.problems: list[str] = []

    async def run(self) -> None:
        await asyncio.gather(*(self._program(number) for number in range(self._programs)))

    async def _program(self, number: int) -> None:
        chance = random.Random(f"{self._seed} {number}")
        life = 0
        while not self.finishing:
            name = f"program {number} life {life}"
            context = write_words(chance.randrange(200, 900), name)
            for step in range(5):
                context += await self._turn(number, name, context, step % 2 == 0)
                context += write_words(chance.randrange(20, 80), f"{name} {step}")
                await asyncio.sleep(chance.expovariate(1.0))
            async with self._session.post(
                f"{self._url}/programs/release", json={"program_id": name}
            ) as answer:
                if answer.status != 200:
                    self.problems.append(f"release was answered with {answer.status}")
            self.seen["programs"] += 1
            life += 1

    async def _turn(self, number: int, name: str, context: str, stream: bool) -> str:
        """One turn, sent again where its stream broke, as its error event says."""
        body = {
            "model": MODEL_NAME,
            "messages": [{"role": "user", "content": context}],
            "max_tokens": 40,
            "ignore_eos": True,
            "program_id": name,
            "stream": stream,
        }
        while True:
            async with self._session.post(f"{self._url}/v1/chat/completions", json=body) as answer:
                text = await answer.text() if answer.status != 200 or not stream else ""
                if answer.status != 200:
                    self.problems.append(f"a turn was answered with {answer.status}: {text[:300]}")
                    return ""
                if not stream:
                    self.seen["answers"] += 1
                    return json.loads(text)["choices"][0]["message"]["content"]
                parts, ended = [], False
                async for line in answer.content:
                    if line.strip() == b"data: [DONE]":
                        ended = True
                    elif line.startswith(b"data:"):
                        event = json.loads(line.removeprefix(b"data:"))
                        if "error" in event:
                            parts.append(None)
                        else:
                            parts.append(event["choices"][0]["delta"].get("content") or "")
                if ended and None not in parts:
                    self.seen["streams"] += 1
                    return "".join(parts)
                if not ended:
                    self.problems.append("a stream ended without an error and without an end")
                self.seen["broken streams"] += 1
                self.broken[number, self.kills] += 1


async def status(session: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    async with session.get(f"{url}/status") as answer:
        return await answer.json()


async def until_up(session: aiohttp.ClientSession, url: str, count: int) -> dict[str, Any]:
    """Wait until so many engines are used."""
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            now = await status(session, url)
            if sum(engine["health"] == "up" for engine in now["engines"]) >= count:
                return now
        except (aiohttp.ClientError, OSError):
            pass
        if time.monotonic() > deadline:
            raise TimeoutError(f"not {count} engines within {START_SECONDS:g} s")
        await asyncio.sleep(0.25)


async def left_over(session: aiohttp.ClientSession, url: str, engines: list[str]) -> list[str]:
    """What is still there although every program was released."""
    found: list[str] = []
    for _ in range(40):
        found = []
        now = await status(session, url)
        found += [
            f"coordinator: {now[name]} {name}" for name in ("programs", "held_turns") if now[name]
        ]
        for engine in engines:
            async with session.get(f"{engine}/programs/summary") as answer:
                said = await answer.json()
            if said["programs"] or said["free_blocks"] != said["total_blocks"]:
                found.append(f"{engine}: {said['programs']} programs, {said['free_blocks']} free")
        if not found:
            return []
        await asyncio.sleep(0.25)
    return found


@asynccontextmanager
async def _processes(folder: Path, paced: bool):
    processes = Processes(folder, build_tiny_model(folder / "model"), paced=paced)
    try:
        yield processes
    finally:
        processes.stop()


async def run(folder: Path, kills: int, programs: int, seed: int, *, paced: bool) -> dict[str, Any]:
    """What happened; ``problems`` is empty if all that must hold did."""
    async with (
        _processes(folder, paced) as processes,
        aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=START_SECONDS),
        ) as session,
    ):
        *engines, _ = processes.ports
        for port in engines:
            processes.start_engine(port)
        url = processes.start_coordinator()
        await until_up(session, url, ENGINES)
        load = Load(session, url, programs, seed)
        running = asyncio.create_task(load.run())
        for _ in range(kills):
            await asyncio.sleep(5.0)
            now = await status(session, url)
            busiest = max(now["engines"], key=lambda e: (e["health"] == "up", e["turns_in_flight"]))
            port = int(busiest["url"].rpartition(":")[2])
            load.kills += 1
            processes.kill(port)
            print(f"killed {busiest['url']} with {busiest['turns_in_flight']} turns", flush=True)
            await asyncio.sleep(2.0)
            processes.start_engine(port)
            await until_up(session, url, ENGINES)
        load.finishing = True
        await running
        left = await left_over(session, url, [processes.url(port) for port in engines])
        worst = max(load.broken.values(), default=0)
        problems = load.problems + left
        if worst > 1:
            problems.append(f"a client saw {worst} broken streams for one kill")
        return {
            "kills": load.kills,
            **load.seen,
            "most broken streams of a client for one kill": worst,
            "problems": problems,
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--programs", type=int, default=18)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", action="store_true", help="engines that compute")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the engines go, too
    with tempfile.TemporaryDirectory() as folder:
        result = asyncio.run(
            run(Path(folder), args.kills, args.programs, args.seed, paced=not args.model)
        )
    print(json.dumps(result, indent=2))
    return 1 if result["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
