"""SIGTERM: with ``--shutdown-timeout`` every turn ends first, held ones too; without it all are
aborted. No turn hangs, whatever the engine does, and the server ends with status 0."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress

import aiohttp
import pytest

from tests.serving.client import CROWDED_OUT, Client, Refused, words
from tests.serving.conftest import KEY, Server, ServeWith

MOST_PROGRAMS = 100
RETENTION = 3.0


@pytest.fixture(scope="module")
def small_server(serve_with: ServeWith) -> Iterator[Server]:
    """Few programs, short retention; the last test of this module ends it."""
    with serve_with(
        "--shutdown-timeout",
        "60",
        "--thunder-max-programs",
        str(MOST_PROGRAMS),
        "--thunder-retention",
        str(RETENTION),
    ) as server:
        yield server


@pytest.fixture
async def small_client(small_server: Server) -> AsyncIterator[Client]:
    async with Client(small_server.url, KEY) as client:
        yield client


async def test_programs_are_bounded(small_client: Client) -> None:
    """Scenario 22 at the bound: the program that is idle longest goes."""
    for start in range(0, 400, 20):
        calls = (
            small_client.complete(words(40, f"{number}"), f"bounded {number}", tokens=1)
            for number in range(start, start + 20)
        )
        await asyncio.gather(*calls)
        assert (await small_client.summary())["programs"] <= MOST_PROGRAMS
    summary = await small_client.summary()
    assert summary["programs_evicted"] >= 400 - MOST_PROGRAMS - summary["programs_expired"]
    await small_client.check_integrity()


async def test_an_idle_engine_forgets_programs(small_client: Client) -> None:
    """Nobody calls: retention ends all the same, and the engine does not have to be woken."""
    await small_client.complete(words(40, "short"), "short", kv_retention_ttl_seconds=0.5)
    await small_client.complete(words(40, "long"), "long", kv_retention_ttl_seconds=600)
    await asyncio.sleep(RETENTION + 1.0)
    assert [p["program_id"] for p in await small_client.programs()] == ["long"]
    await small_client.leave_clean()


async def test_sigterm_drains(small_client: Client, small_server: Server) -> None:
    async with small_client.crowd(tokens=700) as crowd:
        held = [
            asyncio.create_task(
                small_client.complete(words(CROWDED_OUT, f"held {n}"), f"held {n}", tokens=6)
            )
            for n in range(3)
        ]
        fan = asyncio.create_task(
            small_client.complete(words(CROWDED_OUT, "fan"), "fan", n=3, temperature=1)
        )
        await small_client.until(lambda s: s["held_turns"] == 6)
        small_server.process.terminate()
        for stream in crowd:
            events = await stream.rest()
            assert events[-1]["choices"][0]["finish_reason"] == "length"
        for answer in await asyncio.gather(*held):
            assert answer["usage"]["completion_tokens"] == 6
        assert len((await fan)["choices"]) == 3
    assert await ended(small_server) == 0


async def ended(server: Server) -> int | None:
    """The exit status of a server that was told to end."""
    return await asyncio.to_thread(server.process.wait, 60)


async def test_sigterm_while_the_engine_hangs(serve_with: ServeWith) -> None:
    """vLLM kills an engine core that does not end at once: nobody waits for its answers then."""
    with serve_with() as server:
        async with (
            Client(server.url, KEY) as client,
            client.generating(words(50, "labelled"), "labelled") as labelled,
            client.generating(words(50, "unlabelled")) as unlabelled,
        ):
            await labelled.take(1)
            await unlabelled.take(1)
            for core in server.engine_cores:
                core.suspend()
            requests = (("GET", "/programs/labelled"), ("GET", "/programs/changes?after=&wait=60"))
            asked = [asyncio.create_task(client.request(*request)) for request in requests]
            await asyncio.sleep(0.5)
            server.process.terminate()
            async with asyncio.timeout(40):
                for stream in (labelled, unlabelled):
                    assert "error" in (await stream.rest())[-1]
                for status, text in await asyncio.gather(*asked):
                    assert status in (500, 503), text
        assert await ended(server) == 0


async def test_sigterm_without_a_timeout_aborts(ending_server: Server) -> None:
    """Running turns, held ones, and one that arrived while the engine was paused."""
    async with Client(ending_server.url, KEY) as client, client.crowd() as crowd:
        fields = {"tokens": 6, "n": 2, "temperature": 1}
        calls = [asyncio.create_task(client.complete(words(CROWDED_OUT, "held"), "held", **fields))]
        await client.until(lambda s: s["held_turns"] == 2)
        await client.json("POST", "/pause", params={"mode": "keep"})
        calls.append(asyncio.create_task(client.complete(words(50, "late"), "late", **fields)))
        await client.until(lambda s: s["held_turns"] == 4)
        ending_server.process.terminate()
        async with asyncio.timeout(40):
            for stream in crowd:
                with suppress(aiohttp.ClientError):  # closed before the last event
                    events = await stream.rest()
                    # The engine core may be gone before the front end has passed the abort on:
                    # vLLM then ends the stream with an error event.
                    assert "error" in events[-1] or (
                        events[-1]["choices"][0]["finish_reason"] == "abort"
                    )
            await asyncio.wait(calls)
        for call in calls:
            error = call.exception()
            if isinstance(error, Refused):  # the same, before the answer had begun
                assert error.status == 500
                assert "EngineCore encountered an issue" in str(error)
            elif error is not None:
                assert isinstance(error, aiohttp.ClientError), error
            else:
                assert {c["finish_reason"] for c in call.result()["choices"]} == {"abort"}
    assert await ended(ending_server) == 0
