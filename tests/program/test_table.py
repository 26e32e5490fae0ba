"""What the table learns from who comes back and who does not."""

import pytest

from vllm_thunder.program.config import ThunderConfig
from vllm_thunder.program.table import ProgramTable
from vllm_thunder.program.turn import Turn


@pytest.fixture
def table():
    table = ProgramTable(ThunderConfig())
    yield table
    table.check_integrity()


def turn(table, program_id, start, seconds=1.0):
    """One turn from its arrival to its end; returns when it ended."""
    program = table.turn_arrived(Turn(program_id, f"at {start}"), 100, start)
    table.request_runs(program, f"at {start}")
    table.request_ended(program, f"at {start}", start + seconds)
    return start + seconds


def regulars(table, until, start=0.0, programs=4):
    """Programs whose tools take a second."""
    at = dict.fromkeys((f"regular{n}" for n in range(programs)), start)
    while min(at.values()) < until:
        program_id = min(at, key=at.get)
        at[program_id] = turn(table, program_id, at[program_id]) + 1.0


def test_who_does_not_come_back_is_missed_once(table):
    regulars(table, until=40.0)
    before = table.tool_times.returning
    for n in range(10):
        turn(table, f"silent{n}", 40.0, seconds=0.1)
        turn(table, f"silent{n}", 40.2, seconds=0.1)
    assert table.tool_times.returning == before
    regulars(table, until=50.0, start=46.0)
    missed = table.tool_times.returning
    assert missed < before - 0.05
    regulars(table, until=80.0, start=52.0)
    assert table.tool_times.returning > missed  # the same ten are not missed again


def test_who_comes_back_late_was_not_lost(table):
    regulars(table, until=40.0)
    turn(table, "late", 40.0, seconds=0.1)
    turn(table, "late", 40.2, seconds=0.1)
    regulars(table, until=60.0, start=44.0)
    missed = table.tool_times.returning
    turn(table, "late", 60.0)
    assert table.tool_times.returning > missed


def test_who_is_released_is_not_missed(table):
    regulars(table, until=40.0)
    for n in range(10):
        turn(table, f"done{n}", 40.0, seconds=0.1)
        turn(table, f"done{n}", 40.2, seconds=0.1)
        table.release(table.get(f"done{n}"))
    before = table.tool_times.returning
    regulars(table, until=60.0, start=44.0)
    assert table.tool_times.returning >= before


def test_programs_of_one_turn_say_nothing_about_agents(table):
    regulars(table, until=40.0)
    before = table.tool_times.returning
    for n in range(100):
        turn(table, f"once{n}", 40.0, seconds=0.1)
    regulars(table, until=80.0, start=46.0)
    assert table.tool_times.returning >= before
    assert table.returning(table.get("regular0")) == table.tool_times.returning
    assert table.returning(table.get("once0")) == table.returns.value


def test_a_turn_that_was_only_held_is_no_turn_and_its_retry_no_tool(table):
    """A client under pressure gives up and tries again at once, over and over."""
    for n in range(20):
        program = table.turn_arrived(Turn("p", f"held{n}"), 100, n * 30.0)
        table.request_held(program, f"r{n}", n * 30.0)
        table.request_unheld(program, f"r{n}", n * 30.0 + 29.9)
        assert table.request_ended(program, f"held{n}", n * 30.0 + 29.9)
    assert table.get("p").turns_run == 0
    turn(table, "p", 600.0)
    for n in range(20):
        program = table.turn_arrived(Turn("p", f"again{n}"), 100, 604.0 + n)
        table.request_held(program, f"s{n}", 604.0 + n)
        table.request_unheld(program, f"s{n}", 604.9 + n)
        table.request_ended(program, f"again{n}", 604.9 + n)
    assert table.get("p").turns_run == 1
    assert table.tool_times.samples == 1  # 601 to 604
    assert table.returns.value == 1.0


def test_a_second_turn_that_is_withdrawn_has_come_back(table):
    turn(table, "p", 0.0)
    program = table.turn_arrived(Turn("p", "second"), 100, 2.0)
    table.activate(program, 2.0)
    table.pause(program)
    assert table.returns.value == 1.0
    table.request_ended(program, "second", 3.0)
