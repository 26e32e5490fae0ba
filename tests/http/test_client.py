import asyncio
from types import SimpleNamespace

import pytest

from tests.http.driver import FakeCore
from vllm_thunder.engine.client import (
    EnginePrograms,
    FreshAnswer,
    merge_metrics,
    merge_programs,
)


def program(program_id="a", **fields):
    record = {
        "program_id": program_id,
        "phase": "ACTING",
        "status": "ACTIVE",
        "context_tokens": 100,
        "unique_blocks": 3,
        "shared_blocks": 1,
        "resident_blocks": 2,
        "turns_in_flight": 0,
        "held_turns": 0,
        "turns": 5,
        "parent_id": None,
        "group": None,
        "priority": 0,
        "idle_seconds": 9.0,
        "waited_seconds": 0.0,
        "longest_wait_seconds": 1.0,
        "wait_reason": None,
        "pauses": 1,
        "restores": 1,
    }
    return {**record, **fields}


def programs_with(**answers):
    core = FakeCore(answers)
    return EnginePrograms(SimpleNamespace(engine_core=core)), core


async def test_one_rank_is_passed_on_as_it_is():
    programs, core = programs_with(get=[program()], list=[[program()]], summary=[{"x": 1}])
    assert await programs.get("a") == program()
    assert await programs.list() == [program()]
    assert await programs.summary() == {"x": 1}
    assert core.calls == [("get", "a"), ("list",), ("summary",)]


async def test_a_program_that_one_of_two_ranks_knows():
    programs, _ = programs_with(get=[None, program()], list=[[program("b")], [program()]])
    assert await programs.get("a") == program()
    assert [p["program_id"] for p in await programs.list()] == ["b", "a"]


async def test_an_unknown_program_is_none():
    programs, _ = programs_with(get=[None, None])
    assert await programs.get("a") is None


def test_a_program_on_two_ranks_adds_up():
    idle = program(status="PAUSED", context_tokens=400, parent_id="p", pauses=4)
    busy = program(
        phase="REASONING",
        turns_in_flight=2,
        held_turns=1,
        idle_seconds=0.0,
        waited_seconds=3.0,
        longest_wait_seconds=3.0,
        wait_reason="no memory",
        group="g",
        priority=-1,
    )
    expected = program(
        phase="REASONING",
        status="ACTIVE",
        context_tokens=400,
        unique_blocks=6,
        shared_blocks=2,
        resident_blocks=4,
        turns_in_flight=2,
        held_turns=1,
        turns=10,
        parent_id="p",
        group="g",
        priority=-1,
        idle_seconds=0.0,
        waited_seconds=3.0,
        longest_wait_seconds=3.0,
        wait_reason="no memory",
        pauses=5,
        restores=2,
    )
    assert merge_programs([[idle], [busy]]) == [expected]
    assert merge_programs([[busy], [idle]]) == [expected]


@pytest.mark.parametrize(
    ("states", "merged"),
    [
        ([("ACTING", "ACTIVE"), ("ACTING", "PAUSED")], ("ACTING", "PAUSED")),
        ([("ACTING", "ACTIVE"), ("ACTING", "ACTIVE")], ("ACTING", "ACTIVE")),
        ([("REASONING", "ACTIVE"), ("ACTING", "PAUSED")], ("REASONING", "ACTIVE")),
        ([("REASONING", "PAUSED"), ("ACTING", "ACTIVE")], ("REASONING", "PAUSED")),
        ([("REASONING", "PAUSED"), ("REASONING", "ACTIVE")], ("REASONING", "PAUSED")),
    ],
)
def test_the_rank_with_the_turns_decides_the_status(states, merged):
    lists = [[program(phase=phase, status=status)] for phase, status in states]
    (found,) = merge_programs(lists)
    assert (found["phase"], found["status"]) == merged


def summary(**fields):
    return {
        "policy": "thunder",
        "capacity_known": True,
        "programs": 2,
        "by_phase": {"REASONING": 1, "ACTING": 1},
        "by_status": {"ACTIVE": 2, "PAUSED": 0, "TERMINATED": 0},
        "total_blocks": 100,
        "longest_wait_seconds": 2.0,
        **fields,
    }


async def test_a_summary_counts_a_program_on_two_ranks_once():
    programs, _ = programs_with(
        summary=[summary(), summary(capacity_known=False, longest_wait_seconds=5.0)],
        list=[
            [program("a"), program("b", phase="REASONING")],
            [program("a"), program("c", status="PAUSED")],
        ],
    )
    assert await programs.summary() == {
        "policy": "thunder",
        "capacity_known": False,
        "programs": 3,
        "by_phase": {"REASONING": 1, "ACTING": 2},
        "by_status": {"ACTIVE": 2, "PAUSED": 1, "TERMINATED": 0},
        "total_blocks": 200,
        "longest_wait_seconds": 5.0,
    }


def metrics(scale=1.0, bounds=(0.1, 1.0)):
    return {
        "gauges": {"held_turns": scale, "longest_wait_seconds": 10.0 * scale},
        "labelled_gauges": {"programs": [[{"phase": "ACTING", "status": "ACTIVE"}, scale]]},
        "counters": {"pauses": 2.0 * scale},
        "labelled_counters": {"evicted_blocks": [[{"class": "blank"}, scale]]},
        "histograms": {
            "wait_seconds": {"bounds": list(bounds), "counts": [1, 2, 3], "sum": 4.0 * scale}
        },
    }


def test_metrics_add_up_except_waits():
    other = metrics(3.0)
    other["labelled_counters"]["evicted_blocks"].append([{"class": "shared"}, 7.0])
    assert merge_metrics([metrics(), other]) == {
        "gauges": {"held_turns": 4.0, "longest_wait_seconds": 30.0},
        "labelled_gauges": {"programs": [[{"phase": "ACTING", "status": "ACTIVE"}, 4.0]]},
        "counters": {"pauses": 8.0},
        "labelled_counters": {
            "evicted_blocks": [[{"class": "blank"}, 4.0], [{"class": "shared"}, 7.0]]
        },
        "histograms": {"wait_seconds": {"bounds": [0.1, 1.0], "counts": [2, 4, 6], "sum": 16.0}},
    }


def test_histograms_with_other_bounds_do_not_add_up():
    with pytest.raises(ValueError, match="bounds"):
        merge_metrics([metrics(), metrics(bounds=(0.2, 1.0))])


async def test_a_question_that_timed_out_is_not_asked_again():
    asked = []
    answer = asyncio.Event()

    async def ask():
        asked.append(1)
        await answer.wait()
        return len(asked)

    fresh = FreshAnswer(ask, limit=0.02)
    for _ in range(3):
        with pytest.raises(TimeoutError):
            await fresh.get()
    assert len(asked) == 1
    answer.set()
    assert await fresh.get() == 1
    assert await fresh.get() == 2


async def test_a_failed_question_is_asked_again_and_its_error_is_nobodys_surprise():
    async def ask():
        raise RuntimeError("gone")

    fresh = FreshAnswer(ask, limit=1.0)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="gone"):
            await fresh.get()
