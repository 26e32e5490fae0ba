"""The queue in an event loop: turns wake when they are placed, and leave nothing behind."""

import asyncio

import pytest

from vllm_thunder.coordinator.config import CoordinatorConfig
from vllm_thunder.coordinator.dispatcher import Dispatcher
from vllm_thunder.coordinator.fleet.backend import Backend
from vllm_thunder.coordinator.fleet.dispatch import Unavailable
from vllm_thunder.coordinator.fleet.fleet import Fleet
from vllm_thunder.program.report import EngineReport, MemoryReport
from vllm_thunder.program.turn import Turn


@pytest.fixture
def fleet():
    fleet = Fleet(CoordinatorConfig(max_wait=0.2))
    yield fleet
    fleet.check_integrity()
    assert fleet.queue.held_turns == 0
    assert not any(program.in_flight for program in fleet)


def add_engine(dispatcher, name, room):
    backend = Backend(name)
    dispatcher.fleet.joined(backend)
    report(dispatcher, backend, room)
    return backend


def report(dispatcher, backend, room):
    memory = MemoryReport(1000, room, 64, [(16, None)])
    dispatcher.reported(backend, EngineReport("c", False, True, memory, [], []))


async def test_turns_that_arrive_together_are_placed_together(fleet):
    dispatcher = Dispatcher(fleet, asyncio.get_running_loop().time)
    add_engine(dispatcher, "small", 60)
    add_engine(dispatcher, "smaller", 35)
    first, second = await asyncio.gather(
        dispatcher.place(Turn("a", "t1"), 30 * 16), dispatcher.place(Turn("b", "t2"), 60 * 16)
    )
    assert (first.backend.backend_id, second.backend.backend_id) == ("smaller", "small")
    dispatcher.ended(first)
    dispatcher.ended(second)


async def test_a_turn_waits_for_a_report(fleet):
    dispatcher = Dispatcher(fleet, asyncio.get_running_loop().time)
    backend = add_engine(dispatcher, "e", 10)
    waiting = asyncio.create_task(dispatcher.place(Turn("a", "t1"), 30 * 16))
    await asyncio.sleep(0.02)
    assert not waiting.done()
    report(dispatcher, backend, 50)
    dispatcher.ended(await waiting)


async def test_a_due_turn_goes_although_nobody_reports(fleet):
    dispatcher = Dispatcher(fleet, asyncio.get_running_loop().time)
    add_engine(dispatcher, "e", 10)
    dispatch = await asyncio.wait_for(dispatcher.place(Turn("a", "t1"), 30 * 16), timeout=1.0)
    assert 0.1 <= dispatch.waited < 0.3
    dispatcher.ended(dispatch)


async def test_a_turn_does_not_wait_for_ever_for_an_engine(fleet):
    dispatcher = Dispatcher(fleet, asyncio.get_running_loop().time)
    with pytest.raises(Unavailable, match="no engine"):
        # At max_wait, however long the interval between decisions is.
        await asyncio.wait_for(dispatcher.place(Turn("a", "t1"), 30 * 16), timeout=1.0)
    assert fleet.queue.held_turns == 0


@pytest.mark.parametrize("placed", [False, True], ids=["while it waits", "as it is placed"])
async def test_a_client_that_leaves_leaves_nothing(fleet, placed):
    dispatcher = Dispatcher(fleet, asyncio.get_running_loop().time)
    backend = add_engine(dispatcher, "e", 10)
    waiting = asyncio.create_task(dispatcher.place(Turn("a", "t1"), 30 * 16))
    await asyncio.sleep(0.01)
    if placed:
        report(dispatcher, backend, 50)
        dispatcher._decide()
        assert fleet.queue.held_turns == 0
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_a_turn_that_an_engine_did_not_take_goes_elsewhere(fleet):
    dispatcher = Dispatcher(fleet, asyncio.get_running_loop().time)
    engines = {name: add_engine(dispatcher, name, 50) for name in ("a", "b")}
    first = await dispatcher.place(Turn("p", "t1"), 30 * 16)
    dispatcher.went_down(first.backend)
    second = await dispatcher.place_again(first)
    assert {first.backend, second.backend} == set(engines.values())
    dispatcher.ended(second)
