"""What is counted as what: every way in which a program or a turn can end."""

import asyncio
from dataclasses import asdict

import pytest

from tests.coordinator.desk import Desk
from tests.coordinator.fake_engine import chunked, hang, whole
from tests.coordinator.front import Client, ask, post
from tests.coordinator.program_engine import (
    coordinator,
    get,
    launch,
    page,
    turn,
    until,
    until_up,
)
from vllm_thunder.coordinator.config import CoordinatorConfig


def counted(fleet):
    """What is not zero, without how often what was placed where."""
    counts = asdict(fleet.counts)
    return {n: c for n, c in counts.items() if c and n not in ("placements", "moves")}


def finished(desk, name="p", **turn):
    """A program one turn of which an engine has answered."""
    desk.send(name, 10, **turn)
    desk.decide()
    desk.end(name)


def test_a_turn_that_is_placed_at_once_was_not_paused():
    desk = Desk([100])
    finished(desk)
    assert counted(desk.fleet) == {"programs_created": 1, "turns_admitted": 1}


def test_a_turn_that_waits_is_paused_and_then_resumed():
    desk = Desk([0])
    desk.send("p", 10)
    for _ in range(3):
        desk.decide()
    assert counted(desk.fleet) == {"programs_created": 1, "turns_paused": 1}
    desk.report("e0", 100)
    desk.decide()
    assert counted(desk.fleet) == {
        "programs_created": 1,
        "turns_admitted": 1,
        "turns_paused": 1,
        "turns_resumed": 1,
    }


def test_a_due_turn_is_forced():
    desk = Desk([0], max_wait=10.0)
    desk.send("p", 10)
    desk.decide()
    desk.now = 6.0
    desk.decide()
    counts = counted(desk.fleet)
    assert (counts["forced"], counts["turns_resumed"]) == (1, 1)


def test_a_release_is_an_end():
    desk = Desk([100])
    finished(desk)
    desk.fleet.release("p")
    assert desk.fleet.release("p") is None
    assert desk.fleet.counts.programs_ended == 1


@pytest.mark.parametrize("told_first", [True, False])
@pytest.mark.parametrize("final", [True, False])
def test_a_last_step_is_an_end_and_what_an_engine_forgets_has_expired(final, told_first):
    """The engine may tell that it has forgotten the program before its answer has ended here."""
    desk = Desk([100])
    finished(desk)
    desk.told("e0", "p", 10, 10, claimed=True)
    desk.send("p", 10, final=final)
    if told_first:
        desk.say("e0", gone=["p"])
    desk.end("p")
    if not told_first:
        desk.say("e0", gone=["p"])
    if told_first and not final:  # it may have been lost there: it can come back
        assert len(desk.fleet) == 1
        desk.now += 1800.0
        desk.decide()
    assert len(desk.fleet) == 0
    counts = desk.fleet.counts
    assert (counts.programs_ended, counts.programs_expired) == (final, not final)
    desk.fleet.check_integrity()


def test_a_last_step_that_no_engine_had_is_no_end():
    desk = Desk([100])
    finished(desk)
    desk.report("e0", -10)
    desk.send("p", 10, final=True)
    desk.decide()
    program = desk.fleet.get("p")
    desk.fleet.ended(program, next(iter(program.waiting)), desk.now, cancelled=True)
    desk.say("e0", gone=["p"])
    assert (desk.fleet.counts.programs_ended, desk.fleet.counts.programs_expired) == (0, 1)


def test_a_program_that_comes_back_after_its_last_step_goes_on():
    desk = Desk([100])
    finished(desk, final=True)
    finished(desk)
    desk.say("e0", gone=["p"])
    assert (desk.fleet.counts.programs_ended, desk.fleet.counts.programs_expired) == (0, 1)


def test_after_retention_and_in_favour_of_a_new_one_are_counted_apart():
    desk = Desk([100], retention=100.0, max_programs=1)
    finished(desk, "a")
    finished(desk, "b")
    desk.fleet.went_down(desk.fleet.backends["e0"], desk.now)
    desk.now = 100.0
    desk.decide()
    counts = desk.fleet.counts
    assert (counts.programs_evicted, counts.programs_expired, counts.programs_ended) == (1, 1, 0)
    assert counts.programs_created == 2


# -- over HTTP -------------------------------------------------------------------------


async def test_a_client_that_goes_away_is_counted_where_its_turn_was(engines):
    async with coordinator(launch(engines[:1])) as (port, control):
        await until_up(control, 1)
        counts = control.fleet.counts
        engines[0].chat = hang
        at_engine = await Client.to(port)
        at_engine.send(turn("runs"))
        await until(lambda: engines[0].calls)
        engines[0].room = -10.0
        engines[0].tell()
        await until(lambda: control.fleet.backends[engines[0].url].room < 0)
        held = await Client.to(port)
        held.send(turn("waits"))
        await until(lambda: counts.turns_paused == 1)
        held.leave()
        await until(lambda: counts.turns_cancelled == 1)
        assert counts.turns_cancelled_held == 1
        at_engine.leave()
        await until(lambda: counts.turns_cancelled == 2)
        assert (counts.turns_cancelled_held, counts.turns_admitted) == (1, 1)


async def test_a_turn_that_no_engine_can_take_is_given_up_and_not_cancelled(engines):
    config = CoordinatorConfig(max_wait=0.2, interval=0.05, engine_timeout=1.0)
    async with coordinator(launch([], config)) as (port, control):
        assert (await ask(port, turn("p"))).status == 503
        await until(lambda: control.fleet.counts.turns_given_up == 1)
        assert control.fleet.counts.turns_cancelled == 0


@pytest.mark.parametrize(
    "answer",
    [
        whole(b'{"choices": []}'),
        whole(b'{"error": {"message": "no"}}', b"400 Bad Request"),
        chunked(b"data: 1\n\n", end=lambda wire: wire.reset()),
    ],
    ids=["answered", "refused", "cut"],
)
async def test_what_ends_in_another_way_is_not_cancelled(engines, answer):
    async with coordinator(launch(engines[:1])) as (port, control):
        await until_up(control, 1)
        engines[0].chat = answer
        await ask(port, turn("p", stream=True))
        await asyncio.sleep(0.05)
        counts = control.fleet.counts
        assert (counts.turns_admitted, counts.turns_cancelled) == (1, 0)


async def test_both_pages_have_every_counter(engines):
    async with coordinator(launch(engines)) as (port, control):
        await until_up(control, 2)
        await ask(port, turn("p"))
        await ask(port, turn("q"))
        await ask(port, post({"program_id": "p"}, "/programs/release"))
        expected = asdict(control.fleet.counts)
        assert (expected["programs_created"], expected["programs_ended"]) == (2, 1)
        as_json = await page(port, "/metrics", b"accept: application/json\r\n")
        assert as_json["counters"] == expected
        text = (await ask(port, get("/metrics"))).body.decode()
        for name, count in expected.items():
            assert f"vllm_thunder_coordinator:{name}_total {float(count)}\n" in text
