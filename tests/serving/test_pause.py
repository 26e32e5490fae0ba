"""vLLM's own pause, sleep, and cache resets while programs are tracked, held and running."""

import asyncio
import time
from collections.abc import AsyncIterator

import psutil
import pytest

from tests.serving.client import CROWDED_OUT, Client, words
from tests.serving.conftest import Server

#: Share of a core that an engine with nothing to run may use.
IDLE_SHARE = 0.02
IDLE_SECONDS = 30.0
#: Times that the engine's main thread may wake up in one second of these.
IDLE_WAKES = 20


@pytest.fixture(autouse=True)
async def resumed(client: Client) -> AsyncIterator[None]:
    yield
    await client.json("POST", "/wake_up")
    await client.json("POST", "/resume")


async def pause(client: Client, mode: str, clear_cache: bool = True) -> None:
    query = {"mode": mode, "clear_cache": str(clear_cache).lower()}
    await client.json("POST", "/pause", params=query)


async def idle_share(server: Server) -> tuple[float, float]:
    """Share of a core that the engine core uses, and wake-ups of its main thread per second."""
    (core,) = server.engine_cores
    used, switches, start = _used(core), core.num_ctx_switches().voluntary, time.monotonic()
    await asyncio.sleep(IDLE_SECONDS)
    seconds = time.monotonic() - start
    wakes = (core.num_ctx_switches().voluntary - switches) / seconds
    return (_used(core) - used) / seconds, wakes


def _used(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


async def test_held_turns_on_an_idle_engine_cost_nothing(client: Client, server: Server) -> None:
    """Turns stay held with nothing running only while the engine is paused: without a pause
    nothing is held for longer than a second."""
    await pause(client, "keep")
    turns = [
        asyncio.create_task(client.complete(words(100, f"held {n}"), f"held {n}"))
        for n in range(10)
    ]
    await client.until(lambda s: s["held_turns"] == 10)
    share, wakes = await idle_share(server)
    print(f"\n10 held turns, paused: {share:.2%} of a core, {wakes:.1f} wake-ups a second")
    assert share <= IDLE_SHARE
    assert wakes <= IDLE_WAKES
    assert (await client.summary())["held_turns"] == 10
    await client.json("POST", "/resume")
    answers = await asyncio.gather(*turns)
    assert {answer["usage"]["completion_tokens"] for answer in answers} == {4}


async def test_acting_programs_on_an_idle_engine_cost_nothing(
    client: Client, server: Server
) -> None:
    for number in range(50):
        await client.complete(words(150, f"idle {number}"), f"idle {number}", tokens=1)
    await client.until_idle()
    share, wakes = await idle_share(server)
    async with client.crowd():  # a measurement that would see work
        (core,) = server.engine_cores
        before = _used(core)
        await asyncio.sleep(0.5)
        assert _used(core) - before > IDLE_SHARE * 0.5
    print(f"\n50 acting programs: {share:.2%} of a core, {wakes:.1f} wake-ups a second")
    assert share <= IDLE_SHARE
    assert wakes <= IDLE_WAKES


async def test_pause_that_keeps(client: Client) -> None:
    """Running, held and new turns freeze, and all go on."""
    async with client.generating(words(2000, "kept 1"), "runs", tokens=400) as stream:
        await stream.take(1)
        async with client.generating(words(2000, "kept 2"), "runs 2", tokens=400) as second:
            await second.take(1)
            held = asyncio.create_task(client.complete(words(CROWDED_OUT, "held"), "held"))
            await client.until(lambda s: s["held_turns"] == 1)
            await pause(client, "keep")
            new = asyncio.create_task(client.complete(words(50, "new"), "new"))
            other = asyncio.create_task(client.complete(words(50, "other")))
            await client.until(lambda s: s["held_turns"] == 2)
            turns = (await client.summary())["turns"]
            await asyncio.sleep(1.5)
            summary = await client.summary()
            assert (summary["held_turns"], summary["turns"]) == (2, turns)
            assert not any(turn.done() for turn in (held, new, other))
            await client.json("POST", "/resume")
            for open_stream in (stream, second):
                events = await open_stream.rest()
                assert events[-1]["choices"][0]["finish_reason"] == "length"
    for answer in await asyncio.gather(held, new, other):
        assert answer["usage"]["completion_tokens"] == 4


async def test_pause_that_waits(client: Client) -> None:
    """Returns when the running turns have ended; held turns do not count, and go on later."""
    async with client.generating(words(2000, "waits 1"), "runs", tokens=600) as stream:
        await stream.take(1)
        async with client.generating(words(2000, "waits 2"), "runs 2", tokens=600) as second:
            await second.take(1)
            held = asyncio.create_task(client.complete(words(CROWDED_OUT, "held"), "held"))
            await client.until(lambda s: s["held_turns"] == 1)
            paused = asyncio.create_task(pause(client, "wait"))
            events = await stream.rest()
            assert events[-1]["choices"][0]["finish_reason"] == "length"
            await second.rest()
            async with asyncio.timeout(20):
                await paused
    summary = await client.summary()
    assert (summary["held_turns"], summary["free_blocks"]) == (1, summary["total_blocks"])
    # The pause has cleared the cache: nothing is resident, all programs are still known.
    assert sum(p["resident_blocks"] for p in await client.programs()) == 0
    assert summary["programs"] == 3
    await client.check_integrity()
    assert not held.done()
    await client.json("POST", "/resume")
    assert (await held)["usage"]["completion_tokens"] == 4


async def test_pause_that_aborts(client: Client) -> None:
    """Running and held turns end with vLLM's reason; their programs live on."""
    async with client.crowd() as crowd:
        held = asyncio.create_task(client.complete(words(CROWDED_OUT, "held"), "held"))
        fan = asyncio.create_task(
            client.complete(words(CROWDED_OUT, "fan"), "fan", n=3, temperature=1)
        )
        await client.until(lambda s: s["held_turns"] == 4)
        await pause(client, "abort")
        for stream in crowd:
            events = await stream.rest()
            assert events[-1]["choices"][0]["finish_reason"] == "abort"
    for answer in await asyncio.gather(held, fan):
        assert {choice["finish_reason"] for choice in answer["choices"]} == {"abort"}
    summary = await client.until_idle()
    assert (summary["programs"], summary["held_turns"]) == (4, 0)
    await client.json("POST", "/resume")
    for program_id in ("held", "fan", "crowd 1"):
        answer = await client.complete(words(CROWDED_OUT, program_id), program_id)
        assert answer["usage"]["completion_tokens"] == 4


async def test_release_and_cancel_while_paused(client: Client) -> None:
    await pause(client, "keep")
    turns = {
        name: asyncio.create_task(client.complete(words(50, name), name))
        for name in ("cancelled", "released", "stays")
    }
    await client.until(lambda s: s["held_turns"] == 3)
    turns["cancelled"].cancel()
    await client.until(lambda s: s["held_turns"] == 2)
    assert (await client.release("cancelled")) == {"program_id": "cancelled", "released": True}
    assert (await client.release("released"))["pending"] is True
    await client.json("POST", "/resume")
    assert (await turns["released"])["choices"]
    assert (await turns["stays"])["choices"]
    await client.until_idle()
    assert [p["program_id"] for p in await client.programs()] == ["stays"]


async def test_cache_reset_while_programs_act(client: Client) -> None:
    """Scenario 23, idle: residency is dropped, and the next turn computes again."""
    prompts = {f"reset {n}": words(300, f"reset {n}") for n in range(4)}
    for program_id, prompt in prompts.items():
        first = await client.complete(prompt, program_id, tokens=8)
    assert sum(p["resident_blocks"] for p in await client.programs()) == 4 * 9
    assert (await client.json("POST", "/reset_prefix_cache"))["success"] is True
    programs = await client.programs()
    assert [p["resident_blocks"] for p in programs] == [0] * 4
    assert {p["context_tokens"] for p in programs} == {308}
    await client.check_integrity()
    again = await client.complete(prompts["reset 3"], "reset 3", tokens=8)
    assert (again["usage"]["prompt_tokens_details"] or {}).get("cached_tokens", 0) in (0, None)
    assert again["choices"][0]["text"] == first["choices"][0]["text"]


async def test_cache_reset_while_turns_run_and_are_held(client: Client) -> None:
    """Scenario 23 under load, as a weight update does it: vLLM starts running turns anew."""
    prompt = words(CROWDED_OUT, "held")
    async with client.crowd() as crowd:
        held = asyncio.create_task(client.complete(prompt, "held", tokens=8))
        await client.until(lambda s: s["held_turns"] == 1)
        for number in range(3):
            query = {"reset_running_requests": "true"}
            answer = await client.json("POST", "/reset_prefix_cache", params=query)
            assert answer["success"] is True
            await client.check_integrity()
            await crowd[number % 2].take(5)
        crowd[1].cut()
        text = (await held)["choices"][0]["text"]
    await client.until_idle()
    await client.json("POST", "/reset_prefix_cache")
    assert (await client.complete(prompt, "held", tokens=8))["choices"][0]["text"] == text


@pytest.mark.parametrize("level", [0, 1, 2])
async def test_sleep_and_wake_up(client: Client, level: int) -> None:
    """As the CPU worker has it: no memory is given back, the caches are dropped from level 1."""
    await client.complete(words(300, "sleeper"), "sleeper")
    await client.json("POST", "/sleep", params={"level": str(level), "mode": "abort"})
    held = asyncio.create_task(client.complete(words(350, "sleeper"), "sleeper"))
    new = asyncio.create_task(client.complete(words(350, "new"), "new"))
    await client.until(lambda s: s["programs"] == 2 and s["by_phase"]["REASONING"] == 2)
    await asyncio.sleep(0.5)
    assert not held.done()
    assert not new.done()
    await client.check_integrity()
    await client.json("POST", "/wake_up")
    await client.json("POST", "/resume")
    for answer in (await held, await new):
        assert answer["usage"]["completion_tokens"] == 4
