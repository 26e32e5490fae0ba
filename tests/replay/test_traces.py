"""Trace files: what is read, how it is cut, and what an error says."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from vllm_thunder.program.errors import ConfigError
from vllm_thunder.replay.arguments import DEMO_TRACE, trace_directory
from vllm_thunder.replay.traces import (
    TOOL_SECONDS,
    TraceError,
    TraceOptions,
    draw_tool_seconds,
    read_trace,
    tool_class,
)
from vllm_thunder.replay.workload import Workload


def step(new: int = 100, out: int = 10, tool: str | None = "bash", seconds: float | None = 1.0):
    return {"new_input_tokens": new, "output_tokens": out, "tool": tool, "tool_seconds": seconds}


def program(name: str = "p", *steps: dict[str, Any], shared: int = 40) -> dict[str, Any]:
    return {
        "program_id": name,
        "source": "test",
        "shared_prefix_tokens": shared,
        "steps": list(steps) or [step(), step(50, 5)],
    }


def read(tmp_path: Path, *records: Any, seed: int = 0, **options: Any) -> Workload:
    path = tmp_path / "t.jsonl"
    lines = [r if isinstance(r, str) else json.dumps(r) for r in records]
    path.write_text("\n".join(lines))
    return read_trace(path, TraceOptions(**options), seed=seed, blocks=100)


def test_reads_programs_in_order(tmp_path: Path) -> None:
    load = read(tmp_path, program("a"), "", program("b/slash\n", step(7, 3, None, None)))
    assert load.name == "t"
    assert [p.program_id for p in load.programs] == ["a", "b/slash\n"]
    first, second = load.programs[0].steps
    assert (first.new_input_tokens, first.output_tokens) == (100, 10)
    assert (first.tool, first.tool_seconds) == ("bash", 1.0)
    assert second.tool_seconds == 0, "nothing follows the last step"
    assert load.programs[0].context_tokens == 165


def test_scale_keeps_at_least_a_token_and_a_private_part(tmp_path: Path) -> None:
    load = read(tmp_path, program("a", step(100, 1), step(30, 10), shared=100), scale=0.1)
    shape = load.programs[0]
    assert [(s.new_input_tokens, s.output_tokens) for s in shape.steps] == [(10, 1), (3, 1)]
    assert shape.shared_prefix_tokens == 9


def test_tool_times_are_capped_and_a_users_are_replaced(tmp_path: Path) -> None:
    steps = [step(seconds=500.0), step(tool="user", seconds=9.0), step(tool="user", seconds=None)]
    load = read(tmp_path, program("a", *steps, step()), max_tool_seconds=60, user_seconds=2.5)
    assert [s.tool_seconds for s in load.programs[0].steps] == [60.0, 2.5, 2.5, 0.0]
    load = read(tmp_path, program("a", *steps, step()), tool_scale=0.1, user_seconds=2.5)
    assert [s.tool_seconds for s in load.programs[0].steps] == [50.0, 2.5, 2.5, 0.0]


def test_contexts_and_steps_are_cut_and_an_empty_program_is_left_out(tmp_path: Path) -> None:
    long, short = program("long", step(1000, 1), step()), program("short", step(), step(), step())
    load = read(tmp_path, long, short, max_context=250)
    assert [(p.program_id, len(p.steps)) for p in load.programs] == [("short", 2)]
    assert load.programs[0].steps[-1].tool_seconds == 0
    assert len(read(tmp_path, short, max_steps=1).programs[0].steps) == 1
    with pytest.raises(TraceError, match="no program is left"):
        read(tmp_path, long, max_context=500)


def test_programs_are_spread_over_the_file(tmp_path: Path) -> None:
    records = [program(str(number)) for number in range(10)]
    load = read(tmp_path, *records, programs=3)
    assert [p.program_id for p in load.programs] == ["0", "3", "6"]


def test_unknown_times_are_drawn_by_seed_and_a_known_one_changes_no_other(tmp_path: Path) -> None:
    unknown = [step(seconds=None) for _ in range(5)]
    times = [s.tool_seconds for s in read(tmp_path, program("a", *unknown)).programs[0].steps]
    again = read(tmp_path, program("a", *unknown)).programs[0].steps
    assert [s.tool_seconds for s in again] == times
    assert len(set(times)) == 5
    other = read(tmp_path, program("a", *unknown), seed=1).programs[0].steps
    assert [s.tool_seconds for s in other] != times
    known = [step(seconds=3.0), *unknown[1:]]
    filled = read(tmp_path, program("a", *known)).programs[0].steps
    assert [s.tool_seconds for s in filled] == [3.0, *times[1:]]


@pytest.mark.parametrize("row", TOOL_SECONDS)
def test_draws_follow_the_published_quantiles(row: str) -> None:
    rng = random.Random(1)
    draws = sorted(draw_tool_seconds(row, rng) for _ in range(20_000))
    for quantile, seconds in zip((0.25, 0.5, 0.9), TOOL_SECONDS[row], strict=False):
        assert draws[int(quantile * len(draws))] == pytest.approx(seconds, rel=0.15)
    assert draws[-1] == pytest.approx(TOOL_SECONDS[row][-1])


@pytest.mark.parametrize(
    ("tool", "row"),
    [
        ("bash", "shell"),
        ("edit", "edit"),
        ("grep", "read"),
        ("websearch", "web"),
        ("get_user_details", "read"),
        ("book_reservation", "read"),
        ("Task", "agent"),
        ("python", "shell"),
        ("", "shell"),
    ],
)
def test_tools_have_a_class(tool: str, row: str) -> None:
    assert tool_class(tool) == row


BROKEN = [
    ("{", "t.jsonl:2: not JSON"),
    ("[]", "t.jsonl:2: not a JSON object"),
    ({**program("b"), "program_id": 7}, "t.jsonl:2: program_id: 7 is not a text"),
    ({**program("b"), "source": None}, "t.jsonl:2: source: None is not a text"),
    ({**program("b"), "shared_prefix_tokens": -1}, "shared_prefix_tokens: -1 is not a number"),
    ({**program("b"), "shared_prefix_tokens": True}, "shared_prefix_tokens: True is not a number"),
    ({**program("b"), "steps": []}, "t.jsonl:2: steps: not a list with at least one step"),
    (program("b", step(), 3), r"t.jsonl:2: steps\[1\]: not a JSON object"),
    (program("b", step(0)), r"t.jsonl:2: steps\[0\]: new_input_tokens: 0 is not a number"),
    (program("b", step(out=1.5)), r"t.jsonl:2: steps\[0\]: output_tokens: 1.5 is not a number"),
    (program("b", step(tool=4)), r"t.jsonl:2: steps\[0\].tool: 4 is neither a name nor null"),
    (program("b", step(seconds="1")), r"steps\[0\].tool_seconds: '1' is neither seconds nor null"),
    (program("b", step(seconds=-1)), r"steps\[0\].tool_seconds: -1 is neither"),
    (program("b", step(seconds=float("nan"))), r"steps\[0\].tool_seconds: nan is neither"),
    (program("b", {**step(), "dropped_tokens": "x"}), r"steps\[0\]: dropped_tokens: 'x' is not"),
    (program("a"), "t.jsonl:2: program_id 'a' comes twice"),
]


@pytest.mark.parametrize(("line", "message"), BROKEN)
def test_an_error_names_file_line_and_field(tmp_path: Path, line: Any, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        read(tmp_path, program("a"), line)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"nothing\.jsonl: cannot be read"):
        read_trace(tmp_path / "nothing.jsonl", blocks=1)
    binary = tmp_path / "binary.jsonl"
    binary.write_bytes(b"\xff\xfe")
    with pytest.raises(TraceError, match="cannot be read"):
        read_trace(binary, blocks=1)


@pytest.mark.parametrize(
    ("name", "value"),
    [("scale", 0.0), ("scale", float("nan")), ("max_tool_seconds", -1.0), ("max_steps", 0)],
)
def test_options_have_ranges(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match="--trace-" + name.replace("_", "-")):
        TraceOptions(**{name: value})


@pytest.mark.parametrize(("name", "steps"), [("tau_airline", 288), ("sweagent", 238)])
def test_the_benchmarks_traces_leave_tool_times_to_the_seed(name: str, steps: int) -> None:
    path = trace_directory() / f"{name}.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert all(found["tool_seconds"] is None for record in records for found in record["steps"])
    first, other = (read_trace(path, seed=seed, blocks=266) for seed in (0, 1))
    assert (len(first.programs), first.steps) == (24, steps)
    assert first.programs != other.programs


def test_the_committed_trace_is_small_and_holds_numbers_only() -> None:
    path = trace_directory() / f"{DEMO_TRACE}.jsonl"
    load = read_trace(path, blocks=353)
    assert (len(load.programs), load.steps) == (24, 186)
    assert load.longest_context < 4000
    assert path.stat().st_size < 20_000
    names = {"program_id", "source", "shared_prefix_tokens", "steps"}
    fields = {"new_input_tokens", "output_tokens", "tool", "tool_seconds"}
    for line in path.read_text().splitlines():
        record = json.loads(line)
        assert record.keys() == names
        assert all(found.keys() == fields for found in record["steps"])
