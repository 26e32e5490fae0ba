"""Two API servers before two engine cores: one truth, whichever process is asked."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator

import pytest

from tests.serving.client import CROWDED_OUT, ENDPOINTS, Client, call_body, completion, words
from tests.serving.conftest import BLOCKS, KEY, Server, ServeWith


def on_rank(rank: int) -> dict[str, dict[str, str]]:
    return {"headers": {"X-data-parallel-rank": str(rank)}}


@pytest.fixture(scope="module")
def ranks(serve_with: ServeWith) -> Iterator[Server]:
    with serve_with("--data-parallel-size", "2") as server:
        yield server


@pytest.fixture
async def rank_client(ranks: Server) -> AsyncIterator[Client]:
    async with Client(ranks.url, KEY) as client:
        yield client
        await client.leave_clean()


async def turn(client: Client, program_id: str, rank: int, **fields) -> dict:
    body = completion(words(200, program_id), program_id, **fields)
    return await client.json("POST", "/v1/completions", json=body, **on_rank(rank))


async def ask(client: Client, path: str) -> str:
    status, text = await client.request("GET", path, own_connection=True)
    assert status == 200
    return text


async def test_one_truth(ranks: Server, rank_client: Client) -> None:
    """Programs of both ranks, asked for on connections that reach both API servers."""
    assert len(ranks.engine_cores) == 2
    for number in range(6):
        await turn(rank_client, f"p {number}", number % 2)
    await turn(rank_client, "p 0", 1)  # known to both ranks from now on
    await rank_client.until_idle()
    pids, lists, totals = set(), set(), set()
    for _ in range(64):
        pids.add(await rank_client.check_integrity())
        programs = json.loads(await ask(rank_client, "/programs"))["programs"]
        lists.add(tuple(sorted((p["program_id"], p["turns"]) for p in programs)))
        summary = json.loads(await ask(rank_client, "/programs/summary"))
        totals.add((summary["programs"], summary["turns"], summary["total_blocks"]))
        if len(pids) == 2 and len(lists) > 20:
            break
    assert len(pids) == 2, "every connection reached the same API server"
    assert lists == {(("p 0", 2), *((f"p {n}", 1) for n in range(1, 6)))}
    assert totals == {(6, 7, 2 * BLOCKS)}


async def test_metrics_of_every_server_are_the_same(rank_client: Client) -> None:
    await turn(rank_client, "measured", 0)
    await turn(rank_client, "measured too", 1)
    await rank_client.until_idle()
    pages = [await ask(rank_client, "/metrics") for _ in range(16)]
    ours = {
        tuple(
            line
            for line in page.splitlines()
            if line.startswith("vllm_thunder:") and "_created" not in line
        )
        for page in pages
    }
    assert len(ours) == 1
    (lines,) = ours
    assert "vllm_thunder:up 1.0" in lines
    assert f"vllm_thunder:total_blocks {2.0 * BLOCKS}" in lines
    assert 'vllm_thunder:programs{phase="ACTING",status="ACTIVE"} 2.0' in lines
    assert any(line.startswith("vllm:num_requests_running") for line in pages[0].splitlines())


async def test_a_release_reaches_both_ranks(rank_client: Client) -> None:
    await turn(rank_client, "both", 0)
    await turn(rank_client, "both", 1)
    program = await rank_client.program("both")
    assert (program["turns"], program["unique_blocks"]) == (2, 12)
    assert (await rank_client.release("both"))["released"] is True
    assert await rank_client.programs() == []
    assert (await rank_client.release("both"))["released"] is False


async def test_turns_that_fan_out_end_on_their_rank(rank_client: Client) -> None:
    """The front end tells all ranks that a call is over, and its children may be anywhere."""
    prompts = [words(40, f"fan {number}") for number in range(8)]
    for _ in range(4):
        await rank_client.complete(prompts, "fan", n=2, temperature=1)
    body = completion(prompts, "fan", tokens=1500, n=2, temperature=1)
    async with rank_client.stream("/v1/completions", body) as stream:
        await stream.take(4)
        assert (await rank_client.program("fan"))["phase"] == "REASONING"
        stream.cut()
    await rank_client.until_idle()
    program = await rank_client.program("fan")
    assert (program["phase"], program["turns_in_flight"]) == ("ACTING", 0)


async def test_the_turns_of_a_program_stay_on_one_rank(rank_client: Client) -> None:
    """Without the client naming one, whichever API server gets them, on every endpoint."""
    prompt = words(600, "stays")
    for number in range(8):
        body = completion(prompt, f"stays {number}")
        await rank_client.json("POST", "/v1/completions", json=body)
        prompt_again = prompt + words(20, f"{number}")
        for path in ENDPOINTS:
            call = call_body(path, prompt_again, program_id=f"stays {number}")
            headers = {"X-Program-ID": f"stays {number}", "Connection": "close"}
            await rank_client.json("POST", path, json=call, headers=headers)
    await rank_client.until_idle()
    ranks = [(await _changes(rank_client, rank))["programs"] for rank in range(2)]
    at = [{p["program_id"] for p in programs if p["context_tokens"]} for programs in ranks]
    assert not at[0] & at[1]
    assert len(at[0] | at[1]) == 8
    assert at[0], "all programs went to one rank"
    assert at[1], "all programs went to one rank"


async def _changes(client: Client, rank: int) -> dict:
    return await client.json("GET", f"/programs/changes?rank={rank}&wait=0")


async def test_a_rank_that_holds_does_not_stall_the_other(rank_client: Client) -> None:
    """Scenario 6, dense: the ranks are independent engines."""
    body = completion(words(2000, "crowd"), "crowd", tokens=2000)
    body2 = completion(words(2000, "crowd 2"), "crowd 2", tokens=2000)
    async with (
        rank_client.stream("/v1/completions", body, **on_rank(0)) as one,
        rank_client.stream("/v1/completions", body2, **on_rank(0)) as two,
    ):
        await one.take(1)
        await two.take(1)
        wanted = completion(words(CROWDED_OUT, "held"), "held")
        held = asyncio.create_task(
            rank_client.json("POST", "/v1/completions", json=wanted, **on_rank(0))
        )
        await rank_client.until(lambda s: s["held_turns"] == 1)
        async with asyncio.timeout(20):
            await turn(rank_client, "elsewhere", 1)
        assert not held.done()
        one.cut()
        two.cut()
        assert (await held)["usage"]["completion_tokens"] == 4


async def test_sigterm_ends_all_processes(ranks: Server) -> None:
    processes = [ranks.process, *ranks.process.children(recursive=True)]
    async with Client(ranks.url, KEY) as client, client.crowd():
        ranks.process.terminate()
        assert await asyncio.to_thread(ranks.process.wait, 60) == 0
    for process in processes[1:]:
        await asyncio.to_thread(process.wait, 30)
