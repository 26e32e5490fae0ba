"""What counts as conforming, and what the reader is told."""

import json
from pathlib import Path

import pytest

from scripts.conformance.__main__ import CORE, LONG, RUNS, conclude, selection
from scripts.conformance.outcomes import Outcome, compare, read_outcomes, report

PASSED = Outcome("passed")
OURS = Outcome("passed", built=("ProgramScheduler",))
FAILED = Outcome("failed", "12: assert 1 == 2")


def test_all_that_passes_with_theirs_has_to_pass_with_ours() -> None:
    result = compare({"a": PASSED, "b": PASSED}, {"a": OURS, "b": OURS})
    assert result.conforms
    assert (result.total, result.passed_theirs, result.passed_ours) == (2, 2, 2)
    assert result.reached_ours == 2


@pytest.mark.parametrize("ours", [FAILED, Outcome("skipped", "not on this host"), None])
def test_a_test_that_does_not_pass_with_ours_is_named(ours: Outcome | None) -> None:
    result = compare({"a": PASSED, "b": PASSED}, {"a": OURS, **({"b": ours} if ours else {})})
    assert not result.conforms
    assert list(result.failing) == ["b"]
    lines = report("Title", result, required=True)
    assert "  1 pass with vLLM's and fail with ours:" in lines
    assert "    b" in lines


def test_what_fails_with_theirs_is_not_asked_of_ours() -> None:
    result = compare({"a": FAILED, "b": Outcome("skipped")}, {"a": FAILED, "b": FAILED})
    assert result.conforms
    assert (result.passed_theirs, result.passed_ours) == (0, 0)


def test_books_that_do_not_agree_are_a_failure() -> None:
    broken = Outcome("passed", built=("ProgramScheduler",), problems=("a block is free twice",))
    result = compare({"a": PASSED}, {"a": broken})
    assert not result.conforms
    lines = report("Title", result, required=True)
    assert lines[-3:] == [
        "  1 leave books that do not agree:",
        "    a",
        "        a block is free twice",
    ]


def test_the_report_gives_both_counts() -> None:
    result = compare({"a": PASSED, "b": FAILED}, {"a": OURS, "b": PASSED})
    assert report("Title", result, required=True) == [
        "Title",
        "  vLLM's   1 of 2 pass",
        "  ours     2 of 2 pass; 1 build our scheduler, manager or pool",
    ]


def test_outcomes_are_read_as_the_plugin_writes_them(tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    record = {"id": "a", "outcome": "failed", "message": "m", "built": ["X"], "problems": ["p"]}
    file.write_text(json.dumps(record) + "\n")
    assert read_outcomes(file) == {"a": Outcome("failed", "m", ("X",), ("p",))}


def test_a_run_without_a_test_is_no_success(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no test ran"):
        read_outcomes(tmp_path / "never-written.jsonl")


def everywhere(outcome: Outcome) -> dict[str, dict[str, Outcome]]:
    return {run.name: {"a": outcome} for run in RUNS}


@pytest.mark.parametrize("run", [run for run in RUNS if run.against], ids=lambda run: run.name)
def test_the_exit_code_follows_the_required_runs(run, capsys: pytest.CaptureFixture[str]) -> None:
    assert conclude(everywhere(OURS), long=False) == 0
    assert conclude({**everywhere(OURS), run.name: {"a": FAILED}}, long=False) == run.required
    assert FAILED.message in capsys.readouterr().out


def test_every_run_is_compared_with_one_of_vllms() -> None:
    stock = {run.name for run in RUNS if run.against is None}
    assert {run.against for run in RUNS if run.against} == stock


def test_long_tests_are_left_out_unless_asked_for() -> None:
    (test,) = LONG
    assert f"--deselect={CORE}/{test}" in selection(False, "")
    assert f"--deselect={CORE}/{test}" not in selection(True, "")
    assert selection(True, "a or b")[-3:] == ["-k", "a or b", CORE]
