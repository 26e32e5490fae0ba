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
    assert table.tool_times.returning == before
    regulars(table, until=50.0, start=46.0)
    missed = table.tool_times.returning
    assert missed < before - 0.05
    regulars(table, until=80.0, start=52.0)
    assert table.tool_times.returning > missed  # the same ten are not missed again


def test_who_comes_back_late_was_not_lost(table):
    regulars(table, until=40.0)
    turn(table, "late", 40.0)
    regulars(table, until=60.0, start=44.0)
    missed = table.tool_times.returning
    turn(table, "late", 60.0)
    assert table.tool_times.returning > missed


def test_who_is_released_is_not_missed(table):
    regulars(table, until=40.0)
    for n in range(10):
        turn(table, f"done{n}", 40.0)
        table.release(table.get(f"done{n}"))
    before = table.tool_times.returning
    regulars(table, until=60.0, start=44.0)
    assert table.tool_times.returning >= before
