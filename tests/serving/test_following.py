"""Following a real server of two ranks: each tells what happens there, when it happens."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import pytest

from tests.serving.client import CROWDED_OUT, Client, Refused, completion, words
from tests.serving.conftest import BLOCK_SIZE, BLOCKS, KEY, Server, ServeWith


@pytest.fixture(scope="module")
def ranks(serve_with: ServeWith) -> Iterator[Server]:
    """The last test of this module ends it."""
    with serve_with("--data-parallel-size", "2") as server:
        yield server


@pytest.fixture
async def rank_client(ranks: Server) -> AsyncIterator[Client]:
    async with Client(ranks.url, KEY) as client:
        yield client
        await client.leave_clean()


async def changes(client: Client, rank: int, after: str = "", wait: float = 0) -> dict[str, Any]:
    params = {"rank": str(rank), "after": after, "wait": str(wait)}
    return await client.json("GET", "/programs/changes", params=params)


async def settled(client: Client, rank: int) -> str:
    """A cursor after which the rank has nothing to tell, not even that a claim lapses."""
    cursor = (await changes(client, rank))["cursor"]
    while True:
        asked = time.monotonic()
        cursor = (await changes(client, rank, cursor, 2.0))["cursor"]
        if time.monotonic() - asked >= 2.0:
            return cursor


def turn(client: Client, program_id: str, rank: int, words_of_it: int = 200, **headers: str) -> Any:
    return client.json(
        "POST",
        "/v1/completions",
        json=completion(words(words_of_it, program_id), program_id),
        headers={"X-data-parallel-rank": str(rank), **headers},
    )


async def test_an_idle_rank_tells_of_a_turn_when_it_arrives(rank_client: Client) -> None:
    assert (await rank_client.summary())["ranks"] == 2
    cursors = [await settled(rank_client, rank) for rank in (0, 1)]
    asked = [
        asyncio.create_task(changes(rank_client, rank, cursors[rank], 20.0)) for rank in (0, 1)
    ]
    await asyncio.sleep(0.5)
    assert not any(question.done() for question in asked)
    began = time.monotonic()
    answer = asyncio.create_task(turn(rank_client, "p", 1))
    report = await asked[1]
    assert time.monotonic() - began < 5.0
    assert [p["program_id"] for p in report["programs"]] == ["p"]
    assert report["memory"]["capacity_blocks"] == BLOCKS
    assert report["memory"]["context_groups"] == [[BLOCK_SIZE, None]]
    await answer
    while report["programs"] == [] or report["programs"][0]["turns_in_flight"]:
        report = await changes(rank_client, 1, report["cursor"], 20.0)
    (program,) = report["programs"]
    assert program["context_tokens"] == 204
    assert program["resident_blocks"] == 203 // BLOCK_SIZE
    assert program["claimed"] is True
    assert report["memory"]["prefill_seconds_per_token"] is not None
    await rank_client.release("p")
    while report["gone"] != ["p"]:
        report = await changes(rank_client, 1, report["cursor"], 20.0)
    nothing = await asked[0]  # the other rank has had nothing to say
    assert (nothing["programs"], nothing["gone"], nothing["cursor"]) == ([], [], cursors[0])


async def test_questions_that_are_cut_off_do_no_harm(rank_client: Client) -> None:
    cursor = await settled(rank_client, 0)
    for _ in range(80):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(changes(rank_client, 0, cursor, 60.0), 0.02)
    await turn(rank_client, "after that", 0)
    report = await changes(rank_client, 0, cursor, 20.0)
    assert [p["program_id"] for p in report["programs"]] == ["after that"]


async def test_a_turn_that_has_waited_elsewhere_is_due_at_once(rank_client: Client) -> None:
    bodies = [completion(words(2000, f"crowd {n}"), f"crowd {n}", tokens=2000) for n in (1, 2)]
    on_rank = {"headers": {"X-data-parallel-rank": "0"}}
    async with (
        rank_client.stream("/v1/completions", bodies[0], **on_rank) as one,
        rank_client.stream("/v1/completions", bodies[1], **on_rank) as two,
    ):
        await one.take(1)
        await two.take(1)
        waited = {"X-Program-Waited": "45"}
        held = asyncio.create_task(turn(rank_client, "held", 0, CROWDED_OUT, **waited))
        await rank_client.until(lambda s: s["held_turns"] == 1)
        program = await rank_client.program("held")
        assert program["waited_seconds"] >= 45
        assert "is due" in program["wait"]["reason"]
        one.cut()
        two.cut()
        await held


async def test_sigterm_does_not_wait_for_those_who_follow(ranks: Server) -> None:
    async with Client(ranks.url, KEY) as client:
        cursors = [await settled(client, rank) for rank in (0, 1)]
        asked = [
            asyncio.create_task(changes(client, rank, cursors[rank], 60.0)) for rank in (0, 0, 1, 1)
        ]
        await asyncio.sleep(0.5)
        began = time.monotonic()
        ranks.process.terminate()
        assert await asyncio.to_thread(ranks.process.wait, 50) == 0
        assert time.monotonic() - began < 30.0
        for question in asked:
            try:
                report = await question
            except (aiohttp.ClientError, Refused):
                continue
            assert report["programs"] == []
