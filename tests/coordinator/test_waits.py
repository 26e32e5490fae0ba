"""How long a call was held is told however it ended, and of model calls only."""

import asyncio

import pytest

from tests.coordinator.fake_engine import FakeEngine, hang
from tests.coordinator.front import CHAT, Client, ask, post, running_front
from tests.coordinator.program_engine import coordinator, get, launch, page, turn, until_up

HELD = 0.3
PREFIX = "vllm_thunder_coordinator:"


def told_of(front):
    """What the last request that is over was told to have waited."""
    (done,) = front.done
    assert done.model_call
    assert done.program_id == "p"
    assert done.queue_seconds <= done.total_seconds
    return done.queue_seconds


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "plain"])
async def test_the_wait_of_a_client_that_leaves(stream):
    async with running_front(max_wait=60.0, keepalive_seconds=0.1) as front:
        front.report(await front.add(FakeEngine()), 0)
        client = await Client.to(front.port)
        client.send(post({"program_id": "p", "stream": stream}))
        await front.until(lambda: front.fleet.queue.held_turns)
        await asyncio.sleep(HELD)
        client.leave()
        await front.until(lambda: front.done)
        assert told_of(front) >= HELD


async def test_the_wait_of_a_turn_that_is_given_up():
    async with running_front(max_wait=HELD) as front:
        answer = await front.ask(post({"program_id": "p"}))
        assert answer.status == 503
        assert told_of(front) >= HELD


async def test_the_wait_of_a_turn_whose_engine_was_lost():
    async with running_front(max_wait=60.0) as front:
        engine = FakeEngine(hang)
        backend = await front.add(engine)
        client = await Client.to(front.port)
        client.send(post({"program_id": "p"}))
        await front.until(lambda: engine.requests)
        await engine.kill()
        await front.until(lambda: not backend.usable and front.fleet.queue.held_turns)
        await asyncio.sleep(HELD)
        client.leave()
        await front.until(lambda: front.done)
        assert told_of(front) >= HELD


async def test_the_wait_of_a_turn_that_is_served_ends_there():
    async def slowly(request, wire):
        await asyncio.sleep(HELD)
        await FakeEngine().answer(request, wire)

    async with running_front(max_wait=60.0) as front:
        await front.add(FakeEngine(slowly))
        assert (await front.ask(post({"program_id": "p"}))).status == 200
        assert told_of(front) < HELD


async def test_other_requests_are_not_counted_as_model_calls(engines):
    async with coordinator(launch(engines)) as (port, control):
        await until_up(control, 2)
        for request in (
            get("/v1/models"),
            get(CHAT),
            post({}, "/tokenize"),
            get("/v1/responses/r"),
            post({}, "/v1/responses/r/cancel"),
        ):
            assert (await ask(port, request)).status == 200
        await ask(port, turn("p"))
        text = (await ask(port, get("/metrics"))).body.decode()
        counts = [line for line in text.splitlines() if line.startswith(PREFIX + "requests_total")]
        assert counts == [f'{PREFIX}requests_total{{outcome="ok",without_program="false"}} 1.0']
        for name in ("request_seconds", "first_byte_seconds", "queue_seconds"):
            assert f"{PREFIX}{name}_count 1.0" in text
        assert (await page(port, "/status"))["waiting"] == []
