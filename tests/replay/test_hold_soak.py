"""The soak of held turns: it runs, it sees what is lost, and it knows what is flat."""

import aiohttp
import pytest

from benchmarks import hold_soak
from benchmarks.coordinator_probe import Sample, drift
from benchmarks.crowded_engine import CrowdedEngine
from benchmarks.hold_soak import FLAT, Load, not_once, run

PROGRAMS = 40


async def test_all_are_held_while_a_trickle_is_served_and_nothing_is_left(monkeypatch):
    monkeypatch.setattr(hold_soak, "_SPARE", 70)  # as many as the engines run at once, and again
    monkeypatch.setattr(hold_soak, "_TURN_SECONDS", 0.2)
    result = await run(PROGRAMS, 3.0)
    assert result["problems"] == []
    assert len(result["samples"]) == 4
    assert all(sample["held_turns"] >= PROGRAMS for sample in result["samples"])
    assert all(sample["rss_mib"] > 10 for sample in result["samples"])
    assert result["turns served while the others were held"] > 20
    # Half of the programs were never reached by the trickle: theirs are first turns.
    assert result["turns"] > result["programs"]
    assert result["at rest after"]["open_files"] <= result["at rest before"]["open_files"]


async def load_of(engine, programs):
    async with aiohttp.ClientSession() as session:
        load = Load(session, engine.url, programs)
        load.finishing = True
        await load.run()
    return load


@pytest.fixture
async def engine():
    engine = CrowdedEngine(1000, 0.0)
    await engine.start()
    yield engine
    await engine.stop()


async def test_turns_that_are_answered_by_their_engine_are_no_problem(engine):
    load = await load_of(engine, 8)
    assert load.problems == not_once(load, [engine]) == []
    assert len(engine.ran) == 8
    assert not engine.context_tokens


@pytest.mark.parametrize("number", [1, 2], ids=["plain", "stream"])
async def test_an_answer_that_is_not_the_engines_is_seen(engine, monkeypatch, number):
    name = f"program-{number} turn 1"
    for of in ("answer_of", "events_of"):
        true, other = getattr(hold_soak, of), getattr(hold_soak, of)("another")
        monkeypatch.setattr(
            hold_soak, of, lambda n, true=true, other=other: other if n == name else true(n)
        )
    load = await load_of(engine, 4)
    assert [problem.partition(":")[0] for problem in load.problems] == [name]
    assert not_once(load, [engine]) == [f"{name}: run 1 times, answered 0 times"]


async def test_a_turn_that_was_run_twice_or_never_is_seen(engine):
    load = await load_of(engine, 4)
    engine.ran["program-1 turn 1"] += 1
    del engine.ran["program-2 turn 1"]
    assert not_once(load, [engine]) == [
        "program-1 turn 1: run 2 times, answered 1 times",
        "program-2 turn 1: run 0 times, answered 1 times",
    ]


def samples(memory):
    return [Sample(float(at), rss, 10, 0.1, 0.1, 5) for at, rss in enumerate(memory)]


@pytest.mark.parametrize(
    ("memory", "flat"),
    [
        ([100.0] * 600, True),
        ([100.0 + at * 0.001 for at in range(600)], True),  # 0.6 MiB in all
        ([100.0 + at * 0.01 for at in range(600)], False),
        ([100.0 + min(at, 200) for at in range(600)], True),  # it warms up
        ([100.0 + (at % 7) for at in range(600)], True),  # it swings
        ([100.0 + (at % 7) + at * 0.01 for at in range(600)], False),
    ],
)
def test_memory_is_flat_when_its_slope_is_small(memory, flat):
    assert (drift(samples(memory)) < FLAT) is flat


def test_the_drift_is_of_the_whole_soak():
    assert drift(samples([200.0 + at * 0.01 for at in range(601)])) == pytest.approx(
        6.0 / 204.0, rel=0.01
    )


@pytest.mark.parametrize("arguments", [["--programs", "0"], ["--minutes", "0"]])
def test_what_cannot_be_run_is_refused(arguments, capsys):
    with pytest.raises(SystemExit):
        hold_soak.main(arguments)
    assert "--programs must be at least 1" in capsys.readouterr().err
