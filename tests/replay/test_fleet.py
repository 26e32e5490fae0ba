"""The benchmark of a fleet: its load, who chooses an engine, and how its figures come about."""

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from benchmarks.fleet.client import FleetClient
from benchmarks.fleet.load import ENGINES, engine_blocks, skewed
from benchmarks.fleet.routers import One, PrefixHash, Sticky
from benchmarks.fleet.watch import (
    Imbalance,
    Sample,
    Watch,
    coordinator_reader,
    engine_reader,
    pooled,
)
from tests.replay.fake_server import FakeServer
from vllm_thunder.replay.client import CallFailed, ClientOptions
from vllm_thunder.replay.driver import replay
from vllm_thunder.replay.presets import preset
from vllm_thunder.replay.records import Replay, StepRecord
from vllm_thunder.replay.server import ServerFailed, running_coordinator
from vllm_thunder.replay.workload import ProgramShape, StepShape, Workload

SEEDS = range(5)


# -- the load -----------------------------------------------------------------------------


def test_the_load_follows_from_the_seed() -> None:
    assert skewed(3) == skewed(3)
    contexts = {tuple(p.context_tokens for p in skewed(seed).programs) for seed in SEEDS}
    assert len(contexts) == len(SEEDS)


def test_a_third_of_the_programs_is_three_times_as_long() -> None:
    for seed in SEEDS:
        load = skewed(seed)
        prompts = sorted(
            sum(step.new_input_tokens for step in program.steps) for program in load.programs
        )
        short, long = prompts[:48], prompts[48:]
        assert len(long) == 24
        assert sum(long) / 24 == pytest.approx(3 * sum(short) / 48, rel=0.2)


def test_the_skew_changes_neither_the_sum_nor_answers_and_tools() -> None:
    for seed in SEEDS:
        load, plain = skewed(seed), preset("thrash", seed=seed, programs=72)
        assert load.distinct_tokens == pytest.approx(plain.distinct_tokens, rel=0.07)
        for one, other in zip(load.programs, plain.programs, strict=True):
            for step, was in zip(one.steps, other.steps, strict=True):
                assert step.output_tokens == was.output_tokens
                assert step.tool_seconds == was.tool_seconds
            assert one.shared_prefix_tokens < one.steps[0].new_input_tokens


def test_every_context_fits_into_one_engine() -> None:
    for seed in SEEDS:
        load = skewed(seed)
        assert load.blocks == ENGINES * engine_blocks()
        template = 16 * (1 + 2 * len(load.programs[0].steps))
        assert load.longest_context + template < engine_blocks() * load.block_size


def test_which_programs_are_long_has_nothing_to_do_with_the_hash() -> None:
    """Over many seeds an engine gets a third of the long programs; in one seed it may be half."""
    counts: Counter[int] = Counter()
    for seed in range(40):
        load = skewed(seed, steps=1)
        median = sorted(p.context_tokens for p in load.programs)[47]
        for program in load.programs:
            if program.context_tokens > median:
                counts[Sticky().choose(program.program_id, [], [0] * ENGINES)] += 1
    total = sum(counts.values())
    assert all(count / total == pytest.approx(1 / 3, abs=0.05) for count in counts.values())


# -- who chooses --------------------------------------------------------------------------


def text(words: int, seed: int = 0) -> list[dict[str, str]]:
    rng = random.Random(seed)
    return [{"role": "user", "content": " ".join(str(rng.random()) for _ in range(words))}]


def test_sticky_is_the_program_whatever_it_says_and_whoever_is_busy() -> None:
    router = Sticky()
    chosen = {router.choose("p7", text(n), [n, 0, 50]) for n in range(20)}
    assert len(chosen) == 1
    spread = Counter(router.choose(f"p{n}", [], [0, 0, 0]) for n in range(3000))
    assert all(count == pytest.approx(1000, abs=120) for count in spread.values())


def test_the_prefix_is_256_words_over_all_messages() -> None:
    router, loads = PrefixHash(), [0] * 101
    context = text(300)
    chosen = router.choose("a", context, loads)
    assert router.choose("b", [*context, {"role": "user", "content": "more"}], loads) == chosen
    longer = [{"role": "user", "content": context[0]["content"] + " and more"}]
    assert router.choose("a", longer, loads) == chosen
    system, own = text(200, 1), text(100, 2)
    first = {router.choose("a", [*system, *text(100, n)], loads) for n in range(20)}
    assert len(first) > 10  # what comes after a shared head of 200 words counts
    same = {router.choose("a", [*system, *own, *text(9, n)], loads) for n in range(20)}
    assert len(same) == 1


def test_loads_are_bounded() -> None:
    router = PrefixHash()
    prompts = [text(20, seed) for seed in range(200)]
    home = [router.choose("", prompt, [0, 0, 0]) for prompt in prompts]
    assert set(home) == {0, 1, 2}
    for prompt, first in zip(prompts, home, strict=True):
        # 17 in flight, this one is the 18th: the bound is 1.25 * 18 / 3 = 7.5
        loads = [5, 5, 5]
        loads[first] = 7
        assert router.choose("", prompt, loads) == first
        others = [index for index in range(3) if index != first]
        loads[first], loads[others[0]], loads[others[1]] = 8, 5, 4
        assert router.choose("", prompt, loads) == others[1]


def test_bounded_loads_stay_bounded() -> None:
    """However uneven the hash: no engine gets more than the bound and one."""
    router, loads = PrefixHash(), [0, 0, 0]
    same = text(20)
    for _ in range(300):
        loads[router.choose("", same, loads)] += 1
    assert max(loads) <= 1.25 * sum(loads) / 3 + 1


def test_behind_a_coordinator_there_is_one_server() -> None:
    assert One().choose("p", text(3), [4]) == 0


# -- the client of several servers ---------------------------------------------------------


def workload(programs: int = 6, steps: int = 3) -> Workload:
    shape = tuple(StepShape(40 if n == 0 else 20, 4, "bash", 0.0) for n in range(steps))
    return Workload(
        name="test",
        seed=0,
        blocks=10,
        block_size=16,
        programs=tuple(ProgramShape(f"p/{i}", "test", 10, shape) for i in range(programs)),
    )


class Turns:
    """Round robin."""

    def __init__(self) -> None:
        self.loads: list[list[int]] = []

    def choose(self, program_id: str, messages: Any, loads: Any) -> int:
        self.loads.append(list(loads))
        return (len(self.loads) - 1) % len(loads)


@contextlib.asynccontextmanager
async def serving(*servers: FakeServer) -> AsyncIterator[list[str]]:
    async with contextlib.AsyncExitStack() as stack:
        for server in servers:
            await stack.enter_async_context(server.serving())
        yield [server.url for server in servers]


async def run(urls: list[str], router: Any, load: Workload) -> tuple[Replay, FleetClient]:
    options = ClientOptions(urls[0])
    client = FleetClient(options, urls, urls, router)
    return await replay(load, options, connect=lambda _: client), client


async def test_a_program_stays_and_is_released_where_it_was() -> None:
    servers = [FakeServer() for _ in range(3)]
    async with serving(*servers) as urls:
        result, client = await run(urls, Sticky(), workload(programs=12))
    assert not result.errors
    assert client.moves == 0
    seen = [{request["program_id"] for request in server.requests} for server in servers]
    assert sum(map(len, seen)) == len(set().union(*seen)) == 12
    for server, programs in zip(servers, seen, strict=True):
        assert sorted(server.released) == sorted(programs)
    assert client.calls == [len(server.requests) for server in servers]


async def test_a_program_that_moved_is_released_everywhere() -> None:
    servers = [FakeServer() for _ in range(3)]
    async with serving(*servers) as urls:
        result, client = await run(urls, Turns(), workload(programs=1, steps=3))
    assert client.moves == 2
    assert [server.released for server in servers] == [["p/0"]] * 3
    assert result.programs[0].release_error is None


async def test_calls_in_flight_are_counted_and_failures_end() -> None:
    router = Turns()
    servers = [FakeServer(fail_at={0: "500"}), FakeServer()]
    async with serving(*servers) as urls:
        result, _ = await run(urls, router, workload(programs=4, steps=1))
        assert router.loads == [[0, 0], [1, 0], [1, 1], [2, 1]]
        assert len(result.errors) == 1
        again = FleetClient(ClientOptions(urls[0]), urls, urls, router)
        async with again:
            record = StepRecord("p", 0, True, 0.0)
            messages = [{"role": "user", "content": "a b"}] * 2
            for _ in range(4):
                await again.step(record, messages, 1, final=False)
        assert router.loads[-4:] == [[0, 0]] * 4


async def test_counters_and_summaries_are_sums() -> None:
    servers = [FakeServer(), FakeServer(), FakeServer()]
    async with serving(*servers) as urls:
        result, _ = await run(urls, Sticky(), workload(programs=9))
    queried = sum(server.queried for server in servers)
    assert result.engine["vllm:prefix_cache_queries_total"] == queried > 0


def test_a_coordinator_that_has_no_engine_is_stopped_again(tmp_path: Path) -> None:
    nobody = "http://127.0.0.1:9"
    with (
        pytest.raises(ServerFailed, match="did not answer within 5 s"),
        running_coordinator([nobody], tmp_path / "log", start_timeout=5.0),
    ):
        pass
    left = [path for path in Path("/proc").glob("[0-9]*/cmdline") if runs(path, nobody)]
    assert not left


def runs(cmdline: Path, engine: str) -> bool:
    try:
        return f"coordinate\0--engines\0{engine}".encode() in cmdline.read_bytes()
    except OSError:
        return False


# -- memory -------------------------------------------------------------------------------


def sample(imbalance: float, waiting: int) -> Sample:
    return Sample(0.0, (), imbalance, waiting)


def test_only_while_something_waits_is_the_imbalance_counted() -> None:
    found = Imbalance.of([sample(0.9, 0), sample(0.1, 3), sample(0.3, 1), sample(0.5, 0)])
    assert found.points == pytest.approx(20.0)
    assert found.worst_points == pytest.approx(30.0)
    assert (found.while_waiting, found.samples) == (2, 4)
    assert Imbalance.of([sample(0.9, 0)]).points is None


def test_runs_are_pooled_by_their_samples() -> None:
    runs = [
        Imbalance.of([sample(0.1, 1)] * 30).to_json(),
        Imbalance.of([sample(0.4, 1)] * 10).to_json(),
        Imbalance.of([sample(0.9, 0)] * 10).to_json(),
    ]
    assert pooled(runs) == pytest.approx(17.5)
    assert pooled(runs[2:]) is None


@contextlib.asynccontextmanager
async def pages(answers: dict[str, Any]) -> AsyncIterator[str]:
    async def answer(request: web.Request) -> web.Response:
        found = answers[request.path]
        return web.json_response(found(request) if callable(found) else found)

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def watched(watch: Watch, at_least: int) -> list[Sample]:
    async with asyncio.timeout(10), watch:
        await asyncio.sleep(0.3)
    assert len(watch.samples) >= at_least
    return watch.samples


async def test_what_the_coordinator_says() -> None:
    engines = [{"room_blocks": room, "capacity_blocks": 100, "url": "u"} for room in (10, 40, -20)]
    status = {"memory_imbalance": 0.6, "held_turns": 4, "engines": engines}
    async with pages({"/status": status}) as url:
        found = await watched(Watch(coordinator_reader(url), 0.01), 3)
    assert found[0].taken == pytest.approx((0.9, 0.6, 1.2))
    assert (found[0].imbalance, found[0].waiting) == (0.6, 4)
    assert found[0].seconds < found[1].seconds < found[2].seconds


async def test_what_engines_say_of_themselves() -> None:
    asked: list[str] = []

    def memory(**blocks: float) -> dict[str, float]:
        return {"capacity_blocks": 100, **blocks}

    def changes(request: web.Request) -> dict[str, Any]:
        asked.append(request.query.get("after", "the beginning"))
        return {"cursor": "c1", "memory": memory(room_blocks=25.0, claimed_blocks=70.0)}

    full = {"cursor": "x", "memory": memory(room_blocks=-50.0, claimed_blocks=101.0)}
    one = {"/programs/changes": changes, "/programs/summary": {"held_turns": 2}}
    other = {"/programs/changes": full, "/programs/summary": {"held_turns": 1}}
    async with pages(one) as first, pages(other) as second:
        found = await watched(Watch(engine_reader([first, second]), 0.01), 2)
    assert found[0].taken == pytest.approx((0.75, 1.5))
    assert found[0].imbalance == pytest.approx(0.31)
    assert found[0].waiting == 3
    assert asked[:2] == ["the beginning", "c1"]


async def test_a_fleet_that_cannot_be_watched_fails_the_run() -> None:
    async with pages({"/status": {"nothing": 1}}) as url:
        with pytest.raises(CallFailed, match="could not be watched"):
            async with Watch(coordinator_reader(url), 0.01):
                await asyncio.sleep(0.2)
