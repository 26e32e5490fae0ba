"""What became of no use at an engine while it was down, it hears when it is back."""

import asyncio

import pytest

from tests.coordinator.fake_engine import hang, whole
from tests.coordinator.front import ask, post
from tests.coordinator.program_engine import (
    ProgramEngine,
    coordinator,
    launch,
    turn,
    until,
    until_up,
)
from vllm_thunder.coordinator.config import CoordinatorConfig
from vllm_thunder.coordinator.dispatcher import _MOST_OWED, Dispatcher
from vllm_thunder.coordinator.engines import feed
from vllm_thunder.coordinator.fleet.backend import Backend
from vllm_thunder.coordinator.fleet.fleet import Fleet
from vllm_thunder.program.report import ProgramReport


@pytest.fixture
async def engines(monkeypatch):
    monkeypatch.setattr(feed, "_LONG_POLL", 0.2)
    made = [ProgramEngine(), ProgramEngine()]
    for engine in made:
        await engine.start()
    yield made
    for engine in made:
        await engine.kill()


async def released(port, program_id="p"):
    return await ask(port, post({"program_id": program_id}, "/programs/release"))


async def is_released(port, control, engine):
    assert (await released(port)).json()["released"] is True


async def is_released_before_it_is_known_to_hang(port, control, engine):
    assert (await released(port)).status == 502


async def goes_on_elsewhere(port, control, engine):
    assert (await ask(port, turn("p"))).status == 200


async def ends_elsewhere(port, control, engine):
    assert (await ask(port, turn("p", is_last_step=True))).status == 200
    engine.tell(gone="p")
    await until(lambda: control.fleet.get("p") is None)


async def is_released_and_begins_anew(port, control, engine):
    await released(port)
    assert (await ask(port, turn("p"))).status == 200


async def is_released_after_it_moved(port, control, engine):
    assert (await ask(port, turn("p"))).status == 200
    await until(lambda: engine.calls)
    assert (await released(port)).json()["released"] is True


STAYS = (goes_on_elsewhere, is_released_and_begins_anew)
EVENTS = (
    is_released,
    is_released_before_it_is_known_to_hang,
    goes_on_elsewhere,
    ends_elsewhere,
    is_released_and_begins_anew,
    is_released_after_it_moved,
)


async def hangs_with_a_program(control, home):
    """``home`` has told of the program p, which acts, and answers no more."""
    await until_up(control, 2)
    home.tell(ProgramReport("p", 160, 10, True))
    await until(lambda: control.fleet.get("p"))
    home.silent = True
    home.tell()


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.__name__)
async def test_a_program_that_rests_at_an_engine_that_hangs(engines, event):
    home, other = engines
    async with coordinator(launch(engines)) as (port, control):
        await hangs_with_a_program(control, home)
        if event is not is_released_before_it_is_known_to_hang:
            await until_up(control, 1)
        await event(port, control, other)
        await until_up(control, 1)
        assert home.released == []
        home.silent = False
        await until(lambda: "p" not in home.programs)
        await until_up(control, 2)
        program = control.fleet.get("p")
        if event in STAYS:
            assert program.home.url == other.url
        else:
            assert program is None
        assert home.released == ["p"]


@pytest.mark.parametrize("how", ["released", "goes on"])
async def test_a_program_that_runs_at_an_engine_that_hangs(engines, how):
    async with coordinator(launch(engines)) as (port, control):
        await until_up(control, 2)
        for engine in engines:
            engine.chat = hang
        running = asyncio.create_task(ask(port, turn("p")))
        await until(lambda: any(engine.calls for engine in engines))
        home, other = sorted(engines, key=lambda engine: not engine.calls)
        other.chat = whole(b"{}")
        home.tell(ProgramReport("p", 160, 10, True, 1))
        if how == "released":
            assert (await released(port)).json()["pending"] is True
        home.silent = True
        home.tell()
        assert (await running).status == 200
        assert len(other.calls) == 1
        home.silent = False
        await until(lambda: "p" not in home.programs)
        program = control.fleet.get("p")
        assert program is None if how == "released" else program.home.url == other.url


async def test_an_engine_that_hangs_when_it_is_to_hear_it_hears_it_later(engines):
    home, _ = engines
    async with coordinator(launch(engines)) as (port, control):
        await hangs_with_a_program(control, home)
        await until_up(control, 1)
        await is_released(port, control, home)
        routed = home.answer

        async def until_it_hears(request, wire):
            if request.target == b"/programs/release":
                home.silent = True
                home.tell()
            await routed(request, wire)

        home.answer, home.silent = until_it_hears, False
        await until(lambda: home.silent)
        await until_up(control, 1)
        home.answer, home.silent = routed, False
        await until(lambda: "p" not in home.programs)
        await until(lambda: control.fleet.get("p") is None)


async def test_what_is_kept_for_an_engine_is_bounded_and_goes_with_it():
    dispatcher = Dispatcher(Fleet(CoordinatorConfig()), asyncio.get_running_loop().time)
    backend = Backend("e")
    dispatcher.owe("p", backend)  # it was taken out
    assert not dispatcher._owed
    dispatcher.fleet.joined(backend)
    for number in range(_MOST_OWED + 10):
        dispatcher.owe(f"p{number}", backend)
    assert list(dispatcher._owed[backend]) == [f"p{n + 10}" for n in range(_MOST_OWED)]
    dispatcher.went_down(backend)
    dispatcher.removed(backend)
    assert not dispatcher._owed
