"""While weights are updated no model call reaches an engine, and that has an end."""

import asyncio
import logging

import pytest

from tests.coordinator.fake_engine import hang
from tests.coordinator.front import Client, ask, post
from tests.coordinator.program_engine import (
    coordinator,
    get,
    launch,
    page,
    until,
    until_up,
)
from vllm_thunder.coordinator.config import CoordinatorConfig

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/embeddings", "/generate")


def reached(engines):
    """Model calls that came to an engine."""
    return [r for each in engines for r in each.requests if r.target.decode() in PATHS]


async def begin(port):
    assert (await ask(port, post({}, "/weight_sync/begin"))).status == 200


@pytest.mark.parametrize("named", [{}, {"program_id": "p"}], ids=["without program", "program"])
@pytest.mark.parametrize("path", PATHS)
async def test_every_model_call_waits(engines, path, named):
    async with coordinator(launch(engines)) as (port, control):
        await until_up(control, 2)
        await begin(port)
        request = post({"model": "m", **named}, path)
        calls = [asyncio.create_task(ask(port, request)) for _ in range(2)]
        await until(lambda: control.fleet.queue.held_turns == 2)
        await begin(port)  # again is no error
        await asyncio.sleep(0.05)
        assert not reached(engines)
        control.fleet.check_integrity()
        assert (await ask(port, post({}, "/weight_sync/end"))).status == 200
        assert [answer.status for answer in await asyncio.gather(*calls)] == [200, 200]
        assert control.fleet.queue.held_turns == control.fleet.queue.held_bytes == 0


async def test_what_computes_nothing_does_not_wait(engines):
    async with coordinator(launch(engines)) as (port, control):
        await until_up(control, 2)
        await begin(port)
        assert (await ask(port, get("/v1/models"))).status == 200
        assert (await ask(port, post({}, "/tokenize"))).status == 200
        assert (await page(port, "/status"))["weights_are_updated"] is True


async def test_an_update_whose_end_nobody_tells_ends_by_itself(engines, caplog):
    config = CoordinatorConfig(engine_timeout=1.0, weight_sync_timeout=0.3)
    async with coordinator(launch(engines, config)) as (port, control):
        await until_up(control, 2)
        began = asyncio.get_running_loop().time()
        await begin(port)
        with caplog.at_level(logging.ERROR):
            calls = [post({"model": "m", **named}) for named in ({}, {"program_id": "p"})]
            answers = await asyncio.gather(*(ask(port, call) for call in calls))
        assert [answer.status for answer in answers] == [200, 200]
        assert asyncio.get_running_loop().time() - began >= 0.3
        assert "weights was not ended within 0.3 seconds" in caplog.text
        assert (await page(port, "/status"))["weights_are_updated"] is False
        # One that is ended in time ends once.
        caplog.clear()
        await begin(port)
        await ask(port, post({}, "/weight_sync/end"))
        await asyncio.sleep(0.4)
        assert not caplog.text


async def test_calls_without_a_program_that_wait_are_limited_and_may_leave(engines):
    config = CoordinatorConfig(engine_timeout=1.0, max_held_turns=2)
    async with coordinator(launch(engines, config)) as (port, control):
        await until_up(control, 2)
        await begin(port)
        clients = [await Client.to(port) for _ in range(2)]
        for client in clients:
            client.send(post({"model": "m"}))
        await until(lambda: control.fleet.queue.held_turns == 2)
        assert control.fleet.queue.held_bytes == 2 * len(b'{"model": "m"}')
        for named in ({}, {"program_id": "p"}):
            refused = await ask(port, post({"model": "m", **named}))
            assert refused.status == 429
            assert "2 turns wait" in refused.json()["error"]["message"]
        for client in clients:
            client.leave()
        await until(lambda: control.fleet.queue.held_turns == 0)
        assert control.fleet.queue.held_bytes == 0
        await ask(port, post({}, "/weight_sync/end"))
        assert not reached(engines)


async def test_a_call_that_is_sent_again_waits_too(engines):
    async with coordinator(launch(engines)) as (port, control):
        await until_up(control, 2)
        for engine in engines:
            engine.chat = hang
        call = asyncio.create_task(ask(port, post({"model": "m"})))
        await until(lambda: reached(engines))
        lost, other = sorted(engines, key=lambda engine: not engine.calls)
        await begin(port)
        await lost.kill()
        await until(lambda: control.fleet.queue.held_turns == 1)
        assert not other.calls
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await until(lambda: control.fleet.queue.held_turns == 0)
