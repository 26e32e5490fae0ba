"""Turns that end in unusual ways, and turns that overlap."""

import asyncio

import pytest

from tests.serving.client import CROWDED_OUT, Client, completion, words

CHAT = "/v1/chat/completions"


async def test_streams_cut_after_three_chunks(client: Client) -> None:
    """Scenario 1, on two endpoints, some with several choices."""
    before = await client.summary()
    for number in range(50):
        body = completion(words(100, f"cut {number}"), f"cut {number % 7}", tokens=500)
        path = "/v1/completions"
        if number % 2:
            path = CHAT
            body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
        if number % 5 == 0:
            body["n"] = 2
            body["temperature"] = 1
        async with client.stream(path, body) as stream:
            await stream.take(3)
            stream.cut()
    after = await client.until_idle()
    assert after["free_blocks"] == before["free_blocks"] == before["total_blocks"]
    assert after["programs"] == 7
    assert after["turns"] - before["turns"] == 50
    assert after["held_turns"] == 0


async def test_all_streams_cut_at_once(client: Client) -> None:
    """More than fit in memory, so that some are held, some waiting and some running."""
    before = await client.summary()

    async def cut(number: int) -> None:
        body = completion(words(800, f"many {number}"), f"many {number}", tokens=1000)
        async with client.stream("/v1/completions", body) as stream:
            await asyncio.sleep(1.0 + 0.02 * number)
            stream.cut()

    streams = [asyncio.create_task(cut(number)) for number in range(16)]
    await client.until(lambda s: s["held_turns"] > 0)
    await asyncio.gather(*streams)
    after = await client.until_idle()
    assert after["free_blocks"] == after["total_blocks"]
    assert after["turns"] - before["turns"] == 16


async def test_one_of_eight_turns_ends(client: Client) -> None:
    """Scenario 9: turns of one program are counted."""
    started, stop = asyncio.Barrier(8), asyncio.Event()

    async def turn(number: int, tokens: int) -> None:
        async with client.generating(words(60, f"{number}"), "eight", tokens=tokens) as stream:
            if tokens < 10:
                await stream.rest()
            else:
                await stream.take(1)
                await started.wait()
                await stop.wait()
                stream.cut()

    turns = [asyncio.create_task(turn(number, 3000)) for number in range(7)]
    async with asyncio.timeout(120):  # it ends a hang; how long a busy machine takes says nothing
        await started.wait()
    assert (await client.program("eight"))["turns_in_flight"] == 7
    await turn(7, 5)
    program = await client.program("eight")
    assert (program["phase"], program["turns_in_flight"], program["turns"]) == ("REASONING", 7, 1)
    stop.set()
    await asyncio.gather(*turns)
    await client.until_idle()
    program = await client.program("eight")
    assert (program["phase"], program["turns_in_flight"], program["turns"]) == ("ACTING", 0, 8)


async def test_a_held_turn_is_cancelled_and_sent_again(client: Client) -> None:
    """Scenario 4."""
    prompt = words(CROWDED_OUT, "wanted")
    async with client.crowd() as crowd:
        for _ in range(3):
            held = asyncio.create_task(client.complete(prompt, "wanted"))
            await client.until(lambda s: s["held_turns"] == 1)
            program = await client.program("wanted")
            assert (program["phase"], program["status"]) == ("REASONING", "PAUSED")
            assert program["wait"]["reason"]
            held.cancel()
            with pytest.raises(asyncio.CancelledError):
                await held
            await client.until(lambda s: s["held_turns"] == 0)
            assert (await client.program("wanted"))["turns_in_flight"] == 0
        again = asyncio.create_task(client.complete(prompt, "wanted", tokens=3))
        await client.until(lambda s: s["held_turns"] == 1)
        assert (await client.program("wanted"))["turns_in_flight"] == 1
        crowd[0].cut()
        answer = await again
    assert answer["usage"]["completion_tokens"] == 3
    await client.until_idle()
    program = await client.program("wanted")
    assert (program["turns"], program["restores"], program["held_turns"]) == (4, 1, 0)


async def test_release_while_a_stream_is_in_flight(client: Client) -> None:
    """Scenario 13, twice: the release answers at once, is idempotent, and waits for the end."""
    async with client.generating(words(200, "release"), "going", tokens=300) as stream:
        await stream.take(1)
        for _ in range(2):
            answer = await client.release("going")
            assert answer == {"program_id": "going", "released": True, "pending": True}
        assert (await client.program("going"))["phase"] == "REASONING"
        events = await stream.rest()
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    await client.until(lambda s: s["programs"] == 0)
    assert await client.release("going") == {"program_id": "going", "released": False}


async def test_release_while_a_turn_is_held(client: Client) -> None:
    async with client.crowd() as crowd:
        held = asyncio.create_task(client.complete(words(CROWDED_OUT, "held"), "held"))
        await client.until(lambda s: s["held_turns"] == 1)
        assert (await client.release("held"))["pending"] is True
        assert not held.done()
        crowd[0].cut()
        assert (await held)["usage"]["completion_tokens"] == 4
    await client.until_idle()
    assert await client.program("held") is None


async def test_the_last_turn_says_that_it_is_the_last(client: Client) -> None:
    fields = {"job_id": "job", "is_last_step": False}
    await client.complete(words(50, "job"), **fields)
    assert (await client.program("job"))["turns"] == 1
    await client.complete(words(50, "job"), **{**fields, "is_last_step": True})
    assert await client.program("job") is None


async def test_several_choices_and_a_disconnect(client: Client) -> None:
    """Scenario 14: no child is left, and the program is counted once."""
    before = await client.summary()
    body = completion(words(500, "fan"), "fan", tokens=1000, n=4, temperature=1)
    async with client.stream("/v1/completions", body) as stream:
        await stream.take(8)
        program = await client.program("fan")
        assert (program["turns_in_flight"], program["held_turns"]) == (1, 0)
        stream.cut()
    after = await client.until_idle()
    program = await client.program("fan")
    assert (program["phase"], program["turns"]) == ("ACTING", 1)
    assert after["turns"] - before["turns"] == 1
    assert after["free_blocks"] == after["total_blocks"]
    assert (await client.metrics())["vllm:num_requests_running"] == 0


async def test_several_held_choices_and_a_disconnect(client: Client) -> None:
    body = completion(words(CROWDED_OUT, "fan"), "fan", tokens=1000, n=4, temperature=1)
    async with client.crowd():
        call = asyncio.create_task(client.request("POST", "/v1/completions", json=body))
        await client.until(lambda s: s["held_turns"] == 4)
        assert (await client.program("fan"))["turns_in_flight"] == 1
        call.cancel()
        await client.until(lambda s: s["held_turns"] == 0)
        await client.until(lambda s: s["by_phase"]["REASONING"] == 2)
        program = await client.program("fan")
        assert (program["phase"], program["status"], program["turns"]) == ("ACTING", "PAUSED", 1)


async def test_list_prompts_and_beams_are_one_turn(client: Client) -> None:
    prompts = [words(40, f"list {number}") for number in range(6)]
    answer = await client.complete(prompts, "list", tokens=2, n=2, temperature=1)
    assert len(answer["choices"]) == 12
    beams = await client.complete(prompts[0], "list", tokens=3, use_beam_search=True, n=3)
    assert len(beams["choices"]) == 3
    await client.until_idle()
    program = await client.program("list")
    assert (program["turns"], program["turns_in_flight"]) == (2, 0)


async def test_a_stop_string_ends_a_turn_and_not_the_program(client: Client) -> None:
    """The engine sees an abort (vLLM finds stop strings in the front end)."""
    prompt = words(80, "stop")
    text = (await client.complete(prompt, "stop", tokens=12))["choices"][0]["text"]
    word = text.split()[4]
    answer = await client.complete(prompt, "stop", tokens=500, stop=[word])
    assert answer["choices"][0]["finish_reason"] == "stop"
    await client.until_idle()
    program = await client.program("stop")
    assert (program["turns"], program["phase"]) == (2, "ACTING")
    again = await client.complete(prompt, "stop", tokens=12)
    assert again["choices"][0]["text"] == text
