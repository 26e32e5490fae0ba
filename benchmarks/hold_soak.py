"""A soak of the coordinator: thousands of turns held at once, for minutes, in flat memory.

    python -m benchmarks.hold_soak --minutes 10 --json benchmarks/results/hold.json

The real ``vllm_thunder coordinate`` process stands before four engines on loopback that know
programs and are full (:mod:`benchmarks.crowded_engine`). Every program sends a turn of some tens
of kB, every second one asks for a stream, and all are held, but for a trickle: an engine has room
for a few turns, and when one ends, another is placed, and its program comes back with the next.
Half of the programs have a lower priority, so that the trickle never reaches them: their turns are
held from the beginning to the end. Then the engines get room for all. What must hold:

 - at every sample as many turns are held as ``--programs`` says;
 - every turn is run by one engine, once, and answered with exactly that engine's answer;
 - after its release nothing of a program is left, in the coordinator or in an engine, and all
   connections are closed, those of clients and those to engines;
 - the coordinator's resident memory is flat: the least-squares slope over the last two thirds of
   the soak, times the whole of it, is less than 2 % of its level there.
"""

import argparse
import asyncio
import json
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.coordinator_probe import Probe, Sample, drift
from benchmarks.crowded_engine import MODEL, CrowdedEngine, answer_of, events_of
from benchmarks.kill_engines import status, until_up
from benchmarks.proxy_cost import PATH, Caller
from vllm_thunder.program.errors import ConfigError
from vllm_thunder.replay.machine import describe_machine
from vllm_thunder.replay.server import free_ports
from vllm_thunder.replay.words import write_words

__all__ = ["FLAT", "Client", "Load", "left_over", "main", "not_once", "run"]

ENGINES = 4
#: Of the level of resident memory: what it may grow, by its slope, in as long as the soak takes.
FLAT = 0.02
#: Words of a prompt, at least and at most, and of them those that are new in each turn: as many,
#: so that the turns of a program have one size.
_WORDS, _NEW_WORDS = (3_000, 9_000), 100
#: Blocks of an engine's memory: room for two to eight turns; and then, for all.
_FULL, _ROOMY = 2_400, 100_000_000
#: More programs than turns are to be held: some run, and some are between two turns.
_SPARE = 100
#: Seconds for which a turn runs while the engines are full, and then.
_TURN_SECONDS, _LAST_TURN_SECONDS = 0.8, 0.01
#: Seconds between two samples, and between the first turns of two programs.
_SAMPLE_SECONDS, _ARRIVAL_SECONDS = 1.0, 0.002
#: Seconds within which all turns are held, are answered, and nothing is left.
_FILL_SECONDS, _DRAIN_SECONDS, _LEFT_SECONDS = 120.0, 300.0, 30.0


# -- the load ----------------------------------------------------------------------------


class Client(Caller):
    """One connection, and what came on it although nobody had asked."""

    unasked = b""

    def data_received(self, data: bytes) -> None:
        if self._done.done():
            self.unasked += data
        else:
            super().data_received(data)


class Load:
    """Programs that come back with the next turn as soon as one is answered, until they are told
    to finish; then each releases itself."""

    def __init__(self, session: aiohttp.ClientSession, url: str, programs: int):
        self._session = session
        self._url = url
        self.programs = programs
        self.finishing = False
        self.sent: Counter[str] = Counter()
        self.answered: Counter[str] = Counter()
        self.comments = 0
        self.problems: list[str] = []

    async def run(self) -> None:
        """Returns when every program has ended; what was not as it must be is in ``problems``."""
        async with asyncio.TaskGroup() as tasks:
            for number in range(self.programs):
                tasks.create_task(self._program(number))
                await asyncio.sleep(_ARRIVAL_SECONDS)

    async def _program(self, number: int) -> None:
        program_id, streams, waits = f"program-{number}", number % 2 == 0, number % 4 >= 2
        low, high = _WORDS
        context = write_words(low + number * (high - low) // self.programs, program_id)
        client = await Client.to(int(self._url.rpartition(":")[2]))
        turn = 0
        while True:
            turn += 1
            name = f"{program_id} turn {turn}"
            new = write_words(_NEW_WORDS, name)
            request = _request(program_id, [context, new, name], streams, waits)
            self.sent[name] += 1
            try:
                _, _, body = await client.call(request)
            except ConnectionError as error:
                self.problems.append(f"{name}: {error}")
                return
            self._check(name, streams, body)
            if self.finishing:
                break
        async with self._session.post(
            f"{self._url}/programs/release", json={"program_id": program_id}
        ) as answer:
            told = await answer.json()
            if answer.status != 200 or not told.get("released"):
                self.problems.append(f"{program_id}: its release was answered with {told}")
        if client.unasked:
            self.problems.append(f"{program_id}: unasked {client.unasked[:200]!r}")
        client.close()

    def _check(self, name: str, streams: bool, body: bytes) -> None:
        expected = answer_of(name)
        if streams:
            events = body.split(b"\n\n")
            said = [event for event in events if not event.startswith(b":")]
            self.comments += len(events) - len(said)
            body, expected = b"\n\n".join(said), b"".join(events_of(name))
        if body == expected:
            self.answered[name] += 1
        else:
            self.problems.append(f"{name}: not the engine's answer: {body[:200]!r}")


def _request(program_id: str, contents: list[str], streams: bool, waits: bool) -> bytes:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": content} for content in contents],
        "program_id": program_id,
        "priority": int(waits),
        "stream": streams,
    }
    data = json.dumps(body).encode()
    head = (
        f"POST {PATH} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        f"content-length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


# -- the servers -------------------------------------------------------------------------


@asynccontextmanager
async def _engines() -> AsyncIterator[list[CrowdedEngine]]:
    engines = [CrowdedEngine(_FULL, _TURN_SECONDS) for _ in range(ENGINES)]
    for engine in engines:
        await engine.start()
    try:
        yield engines
    finally:
        for engine in engines:
            await engine.stop()


@asynccontextmanager
async def _coordinator(
    engines: Sequence[CrowdedEngine], arguments: Sequence[str], log: Path
) -> AsyncIterator[tuple[str, int]]:
    """Address and process of a coordinator."""
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "vllm_thunder", "coordinate", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--engines", ",".join(engine.url for engine in engines)]
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *command, *arguments, stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output
        )
    try:
        yield f"http://127.0.0.1:{port}", process.pid
    finally:
        if process.returncode is None:
            process.kill()
        else:
            _show(log)
        await process.wait()


def _show(log: Path) -> None:
    print(f"the coordinator ended by itself:\n{log.read_text()}", file=sys.stderr)


def _allow_open_files(count: int) -> None:
    """Raises ConfigError where this user may not open so many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < count:
        raise ConfigError(f"--programs: needs {count} open files, this user may have {hard}")
    if soft != resource.RLIM_INFINITY and soft < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))


# -- all of it ---------------------------------------------------------------------------


async def run(programs: int, seconds: float) -> dict[str, Any]:
    """What happened; ``problems`` is empty if nothing was lost and nothing is left."""
    everybody = programs + _SPARE
    _allow_open_files(2 * everybody + 500)
    arguments = ["--max-wait", str(10 * (seconds + _FILL_SECONDS + _DRAIN_SECONDS))]
    arguments += ["--max-held-turns", str(2 * everybody), "--max-programs", str(2 * everybody)]
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        engines = await stack.enter_async_context(_engines())
        url, pid = await stack.enter_async_context(
            _coordinator(engines, arguments, folder / "coordinator.log")
        )
        session = await stack.enter_async_context(
            aiohttp.ClientSession(
                # One connection for each question: none is left open between two.
                connector=aiohttp.TCPConnector(limit=16, force_close=True),
                timeout=aiohttp.ClientTimeout(total=_DRAIN_SECONDS),
            )
        )
        await until_up(session, url, ENGINES)
        await asyncio.sleep(0.5)  # the connections of those questions are gone
        probe = Probe(session, url, pid)
        at_rest = await probe.sample()
        load = Load(session, url, everybody)
        running = asyncio.create_task(load.run())
        try:
            samples = await _soak(probe, load, running, seconds)
            served = sum(load.answered.values())
            load.finishing = True
            for engine in engines:
                engine.capacity_blocks = _ROOMY
                engine.turn_seconds = _LAST_TURN_SECONDS
                engine.tell()
            async with asyncio.timeout(_DRAIN_SECONDS):
                await running
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        problems = [*load.problems, *not_once(load, engines)]
        problems += await left_over(session, url, engines, probe, at_rest.open_files)
        await asyncio.sleep(0.5)
        after = await probe.sample()
        least = min(sample.held_turns for sample in samples)
        if least < programs:
            problems.append(f"only {least} turns were held at a sample, not {programs}")
        return {
            "programs": everybody,
            "seconds": seconds,
            "turns": sum(load.sent.values()),
            "turns served while the others were held": served,
            "keep-alive comments": load.comments,
            "problems": problems,
            "summary": _summary(samples),
            "at rest before": asdict(at_rest),
            "at rest after": asdict(after),
            "samples": [asdict(sample) for sample in samples],
        }


async def _soak(
    probe: Probe, load: Load, running: "asyncio.Task[None]", seconds: float
) -> list[Sample]:
    """From when every program has come."""
    async with asyncio.timeout(_FILL_SECONDS):
        while (await probe.sample()).held_turns < load.programs - _SPARE:
            await asyncio.sleep(0.1)
            if running.done():
                await running
    samples = [await probe.sample()]
    began = time.monotonic()
    for number in range(1, max(round(seconds / _SAMPLE_SECONDS), 2) + 1):
        await asyncio.sleep(began + number * _SAMPLE_SECONDS - time.monotonic())
        samples.append(await probe.sample())
        if running.done():
            await running
    return samples


def not_once(load: Load, engines: Sequence[CrowdedEngine]) -> list[str]:
    """Turns that were not sent once, run once and answered once."""
    ran = sum((engine.ran for engine in engines), Counter[str]())
    return [
        f"{name}: run {ran[name]} times, answered {load.answered[name]} times"
        for name in load.sent | ran
        if (load.sent[name], ran[name], load.answered[name]) != (1, 1, 1)
    ]


async def left_over(
    session: aiohttp.ClientSession,
    url: str,
    engines: Sequence[CrowdedEngine],
    probe: Probe,
    open_files: int,
) -> list[str]:
    """What is still there although every program was released. ``open_files``: how many the
    coordinator had before the first turn."""
    found: list[str] = []
    deadline = time.monotonic() + _LEFT_SECONDS
    while time.monotonic() < deadline:
        now = await status(session, url)
        found = [f"coordinator: {now[n]} {n}" for n in ("programs", "held_turns") if now[n]]
        for engine in now["engines"]:
            if engine["turns_in_flight"] or engine["programs"]:
                found.append(f"coordinator: has turns or programs at {engine}")
        for each in engines:
            if each.context_tokens or each.running:
                found.append(f"{each.url}: {len(each.context_tokens)} programs, {each.running}")
        if (still := probe.open_files()) > open_files:
            found.append(f"coordinator: {still} open files, {open_files} before the first turn")
        if not found:
            return []
        await asyncio.sleep(0.25)
    return found


def _summary(samples: Sequence[Sample]) -> dict[str, Any]:
    told: dict[str, Any] = {}
    for name in ("rss_mib", "open_files", "cpu_share", "decision_ms", "held_turns"):
        values = sorted(getattr(sample, name) for sample in samples)
        told[name] = {
            "least": values[0],
            "median": values[len(values) // 2],
            "p99": values[min(len(values) * 99 // 100, len(values) - 1)],
            "most": values[-1],
        }
    return told


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.hold_soak", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="(%(default)s)")
    parser.add_argument(
        "--programs", type=int, default=2000, help="turns that are held at once (%(default)s)"
    )
    parser.add_argument("--json", type=Path, help="write the results here")
    args = parser.parse_args(arguments)
    if args.programs < 1 or args.minutes <= 0:
        parser.error("--programs must be at least 1 and --minutes more than 0")
    machine = describe_machine()
    for name in ("aiohttp", "httptools", "msgspec", "uvicorn", "uvloop"):
        machine[name] = metadata.version(name)
    result = asyncio.run(run(args.programs, 60 * args.minutes))
    grows = drift([Sample(**sample) for sample in result["samples"]])
    report = {
        "bars": {
            "memory_drift": {"bar": FLAT, "value": round(grows, 5), "holds": grows < FLAT},
            "problems": {
                "bar": 0,
                "value": len(result["problems"]),
                "holds": not result["problems"],
            },
        },
        **result,
        "machine": machine,
    }
    print(json.dumps({name: told for name, told in report.items() if name != "samples"}, indent=1))
    flat = "flat" if grows < FLAT else "NOT flat"
    print(f"resident memory: {grows:+.2%} of its level over the soak (bar: {FLAT:.0%}): {flat}")
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0 if all(bar["holds"] for bar in report["bars"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
