"""Soft demotion and the boost of turns that were held: what an engine is told of them."""

import asyncio

import pytest

from tests.coordinator.front import ask
from tests.coordinator.program_engine import (
    ProgramEngine,
    coordinator,
    launch,
    turn,
    until,
    until_up,
)
from vllm_thunder.coordinator.config import CoordinatorConfig
from vllm_thunder.program.report import ProgramReport

SET = {
    "soft_demote_threshold": 0.5,
    "soft_demote_priority_jump": -3.0,
    "resume_priority_boost": 7.0,
}


async def waits_told(settings, claimed):
    """What an engine with such a share of claims hears of a new program's turn, of a turn of a
    program that has its claim there, and of one that was held, and for how long that was."""
    engine = ProgramEngine()
    engine.claimed = 1000 * claimed
    await engine.start()
    config = CoordinatorConfig(engine_timeout=1.0, **settings)
    async with coordinator(launch([engine], config)) as (port, control):
        await until_up(control, 1)
        await ask(port, turn("p"))
        engine.tell(ProgramReport("p", 160, 10, True))
        await until(lambda: control.fleet.get("p").claimed)
        await ask(port, turn("p"))
        engine.room = -1.0
        engine.tell()
        backend = next(iter(control.fleet.backends.values()))
        await until(lambda: backend.room < 0)
        began = asyncio.get_running_loop().time()
        held = asyncio.create_task(ask(port, turn("q")))
        await until(lambda: control.fleet.queue.held_turns)
        await asyncio.sleep(0.2)
        engine.room = 1000.0
        engine.tell()
        await held
        longest = asyncio.get_running_loop().time() - began
    await engine.kill()
    told = [call.values(b"x-program-waited") for call in engine.calls]
    return [float(values[0]) if values else 0.0 for values in told], longest


@pytest.mark.parametrize(
    ("settings", "claimed", "at_once", "boost"),
    [
        ({}, 0.9, 0.0, 0.0),
        (SET, 0.4, 0.0, 7.0),
        (SET, 0.6, -3.0, 7.0),
    ],
    ids=["by default", "below the threshold", "above the threshold"],
)
async def test_what_an_engine_is_told(settings, claimed, at_once, boost):
    (new, goes_on, held), longest = await waits_told(settings, claimed)
    # Where nothing is added, a new program's turn has waited for the moment of its placement.
    assert new == pytest.approx(at_once, abs=0.1)
    assert goes_on == at_once
    assert boost + 0.2 <= held <= boost + longest
