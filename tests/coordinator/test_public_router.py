"""Answers by the names of the public ThunderAgent router, as its clients read them."""

import asyncio

import pytest

from tests.coordinator.desk import Desk
from tests.coordinator.fake_engine import hang
from tests.coordinator.front import ask, post
from tests.coordinator.program_engine import (
    ProgramEngine,
    coordinator,
    delete,
    launch,
    page,
    turn,
    until,
    until_up,
)
from vllm_thunder.coordinator.describe import public_engine, public_phases
from vllm_thunder.coordinator.fleet.backend import Backend
from vllm_thunder.program.report import ProgramReport


def test_an_engines_programs_by_phase_and_their_tokens():
    desk = Desk([100.0])
    at = desk.fleet.backends["e0"]
    for name, blocks in (("acts", 10), ("reasons", 20), ("waits", 30)):
        desk.send(name, blocks)
        desk.decide()
        desk.end(name)
        desk.told("e0", name, blocks, blocks, claimed=name != "waits")
    desk.report("e0", -1.0)
    desk.send("reasons", 20)
    desk.send("waits", 30)
    assert public_phases(at) == {
        "total": 2,
        "reasoning": 1,
        "acting": 1,
        "paused": 1,
        "marked_for_pause": 0,
        "future_paused_tokens": 0,
    }
    assert public_engine(at) == {
        "healthy": True,
        "active_program_tokens": 30 * 16,
        "reasoning_program_tokens": 20 * 16,
        "acting_program_tokens": 10 * 16,
        "total_program_tokens": 60 * 16,
        "active_program_count": 2,
        "reasoning_program_count": 1,
        "acting_program_count": 1,
        "paused_program_count": 1,
        "future_paused_tokens": 0,
        "cache_config": {
            "block_size": 16,
            "num_gpu_blocks": 1000,
            "total_tokens_capacity": 16_000,
        },
    }


def test_an_engine_that_has_said_nothing():
    said = public_engine(Backend("e"))
    assert (said["healthy"], said["cache_config"]) == (False, None)
    assert said["total_program_tokens"] == said["paused_program_count"] == 0


async def test_health_and_metrics_tell_it_of_each_backend():
    engine = ProgramEngine()
    await engine.start()
    async with coordinator(launch([engine])) as (port, control):
        await until_up(control, 1)
        await ask(port, turn("p"))
        engine.tell(ProgramReport("p", 160, 10, True))
        await until(lambda: control.fleet.get("p").claimed)
        health = await page(port, "/health")
        assert health["per_backend"] == {
            engine.url: {
                "total": 1,
                "reasoning": 0,
                "acting": 1,
                "paused": 0,
                "marked_for_pause": 0,
                "future_paused_tokens": 0,
            }
        }
        metrics = await page(port, "/metrics", b"accept: application/json\r\n")
        backend = metrics["backends"][engine.url]
        assert (backend["url"], backend["healthy"]) == (engine.url, True)
        assert backend["acting_program_tokens"] == backend["total_program_tokens"] == 160
        assert backend["cache_config"]["total_tokens_capacity"] == 16_000
    await engine.kill()


@pytest.mark.parametrize("path", ["/add_worker", "/workers"])
async def test_a_worker_that_is_there_is_not_added_and_that_is_no_error(engines, path):
    first, second = engines
    async with coordinator(launch([first])) as (port, control):
        await until_up(control, 1)
        for url, added in ((second.url, True), (second.url, False), (first.url + "/", False)):
            answer = await ask(port, post({"url": url}, path))
            said = answer.json()
            assert (answer.status, said["status"], said["added"]) == (200, "success", added)
            assert list(control.fleet.backends) == [first.url, second.url]


async def test_a_worker_that_leaves_is_not_taken_for_one_that_stays(engines):
    first, second = engines
    async with coordinator(launch(engines)) as (port, control):
        await until_up(control, 2)
        for engine in engines:
            engine.chat = hang
        running = asyncio.create_task(ask(port, turn("p")))
        await until(lambda: first.calls or second.calls)
        home = first if first.calls else second
        await ask(port, delete(f"/workers/{home.url}"))
        answer = await ask(port, post({"url": home.url}, "/add_worker"))
        assert answer.json().get("added") is not False
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
