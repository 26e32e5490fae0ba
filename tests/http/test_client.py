import asyncio
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.http.driver import FakeCore, RanksCore
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
        "wait": None,
        "deadline_seconds": None,
        "children": [],
        "hit_rate": None,
        "tool": None,
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
    assert await programs.page("", 7) == ([program()], None)
    assert await programs.summary() == {"x": 1, "ranks": 1}
    assert core.calls == [("get", "a"), ("list", "", "8"), ("summary",)]


async def test_a_program_that_one_of_two_ranks_knows():
    programs, _ = programs_with(get=[None, program()], list=[[program("b")], [program()]])
    assert await programs.get("a") == program()
    page, after = await programs.page("", 10)
    assert ([p["program_id"] for p in page], after) == (["a", "b"], None)


@pytest.mark.parametrize(
    ("known", "merged"), [([False], False), ([False, True], True), ([False, False], False)]
)
async def test_a_tool_is_known_where_any_rank_knows_the_program(known, merged):
    answers = [{"program_id": "a", "known": each} for each in known]
    programs, core = programs_with(tool=answers)
    assert await programs.tool("a", "pytest") == {"program_id": "a", "known": merged}
    assert core.calls == [("tool", "a", "pytest")]


async def pages_of(programs, limit, between=lambda: None):
    pages, after = [], ""
    while after is not None:
        page, following = await programs.page(after, limit)
        assert len(page) <= limit
        assert following is None or following == page[-1]["program_id"]
        pages.append(page)
        after = following
        between()
    return pages


IDS = st.text(st.sampled_from("ab\U0001f9f5\xe9\n /"), min_size=1, max_size=4)


@settings(deadline=None)
@given(st.lists(st.sets(IDS, max_size=12), min_size=1, max_size=3), st.integers(1, 5))
def test_the_pages_hold_every_program_of_every_rank_once(ranks, limit):
    core = RanksCore([{name: program(name, turns=1) for name in names} for names in ranks])
    pages = asyncio.run(pages_of(EnginePrograms(SimpleNamespace(engine_core=core)), limit))
    listed = [record for page in pages for record in page]
    assert [record["program_id"] for record in listed] == sorted(set().union(*ranks))
    for record in listed:
        assert record["turns"] == sum(record["program_id"] in names for names in ranks)
    assert all(len(page) == limit for page in pages[:-1])


async def test_pages_go_on_after_programs_that_have_gone():
    names = [f"{number:03}" for number in range(100)]
    rank = {name: program(name) for name in names}
    gone = iter(names[9::10])

    def release_the_last():
        rank.pop(next(gone), None)

    core = RanksCore([rank, {}])
    programs = EnginePrograms(SimpleNamespace(engine_core=core))
    pages = await pages_of(programs, 10, release_the_last)
    assert [p["program_id"] for page in pages for p in page] == names


async def test_a_page_asks_each_rank_for_little():
    ranks = [{f"{n:06}": program(f"{n:06}") for n in range(start, 5000, 2)} for start in (0, 1)]
    core = RanksCore(ranks)
    page, after = await EnginePrograms(SimpleNamespace(engine_core=core)).page("000100", 3)
    assert [p["program_id"] for p in page] == ["000101", "000102", "000103"]
    assert after == "000103"
    assert core.described == 8


async def test_an_unknown_program_is_none():
    programs, _ = programs_with(get=[None, None])
    assert await programs.get("a") is None


def test_a_program_on_two_ranks_adds_up():
    idle = program(
        status="PAUSED",
        context_tokens=400,
        parent_id="p",
        pauses=4,
        deadline_seconds=5.0,
        children=["b", "c"],
        hit_rate=0.75,
        tool="pytest",
    )
    busy = program(
        phase="REASONING",
        turns_in_flight=2,
        held_turns=1,
        idle_seconds=0.0,
        waited_seconds=3.0,
        longest_wait_seconds=3.0,
        wait={"blocks_needed": 9, "position": 2, "expected_seconds": None, "reason": "no memory"},
        group="g",
        priority=-1,
        deadline_seconds=30.0,
        children=["c", "a"],
        hit_rate=0.25,
        tool="bash",
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
        wait={"blocks_needed": 9, "position": 2, "expected_seconds": None, "reason": "no memory"},
        deadline_seconds=5.0,
        children=["a", "b", "c"],
        hit_rate=0.25,
        tool="bash",
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


WAITS = {"blocks_needed": 1, "blocks_short": 1, "position": 1, "expected_seconds": 2.0}


@pytest.mark.parametrize(
    ("one", "other", "merged"),
    [
        # None of the ranks tells.
        ({}, {}, {"wait": None, "hit_rate": None, "tool": None, "deadline_seconds": None}),
        # A rank that waits is heard, also when it has just begun to.
        ({"waited_seconds": 0.0, "wait": WAITS}, {}, {"wait": WAITS}),
        # The latest turn counts, and an older one where the latest has no rate yet.
        ({"hit_rate": 0.1, "idle_seconds": 5.0}, {"hit_rate": 0.9}, {"hit_rate": 0.1}),
        ({"hit_rate": None, "idle_seconds": 0.0}, {"hit_rate": 0.9}, {"hit_rate": 0.9}),
        ({"hit_rate": 0.0, "idle_seconds": 0.0}, {"hit_rate": 0.9}, {"hit_rate": 0.0}),
        # No tool runs where the program has a turn.
        ({"tool": None, "idle_seconds": 0.0}, {"tool": "bash"}, {"tool": None}),
        ({"deadline_seconds": 3.0}, {}, {"deadline_seconds": 3.0}),
    ],
)
def test_what_is_told_of_a_program_on_two_ranks(one, other, merged):
    for lists in ([[program(**one)], [program(**other)]], [[program(**other)], [program(**one)]]):
        (found,) = merge_programs(lists)
        assert {name: found[name] for name in merged} == merged


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
        "ranks": 2,
    }


async def test_a_summary_counts_more_programs_than_one_call_describes():
    names = [f"{number:05}" for number in range(2500)]
    core = RanksCore([{n: program(n) for n in names}, {"x": program("x", status="PAUSED")}])
    core.answers["summary"] = [summary(), summary()]
    found = await EnginePrograms(SimpleNamespace(engine_core=core)).summary()
    assert found["programs"] == 2501
    assert found["by_status"] == {"ACTIVE": 2500, "PAUSED": 1, "TERMINATED": 0}


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
