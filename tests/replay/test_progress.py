"""A long measurement is seen to move, on a terminal and in a log."""

import io

import pytest
from rich.console import Console

from vllm_thunder.replay import progress as progress_module
from vllm_thunder.replay.progress import RunProgress
from vllm_thunder.replay.records import StepRecord


def record(error: str | None = None) -> StepRecord:
    return StepRecord("p", 0, True, 0.0, latency_seconds=0.1, error=error)


def test_a_log_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_module, "_LOG_SECONDS", 0.0)
    out = io.StringIO()
    with RunProgress(Console(file=out, width=100), "stock", 3) as progress:
        progress.starting(2.0, "loading")
        progress.step(record())
        progress.step(record("failed"))
    lines = out.getvalue().splitlines()
    assert lines[:2] == ["stock: starting", "stock: starting for 2 s"]
    assert lines[2].startswith("stock: 1 of 3 steps, ")
    assert lines[3].endswith(", 1 failed")


def test_a_log_gets_few_lines() -> None:
    out = io.StringIO()
    with RunProgress(Console(file=out, width=100), "stock", 3) as progress:
        for _ in range(50):
            progress.step(record())
    assert out.getvalue().splitlines() == ["stock: starting"]


def test_a_terminal_gets_a_bar_and_a_log_line_is_no_markup() -> None:
    out = io.StringIO()
    console = Console(file=out, width=160, force_terminal=True)
    with RunProgress(console, "stock", 3) as progress:
        progress.starting(2.0, "[/weights] loading [red")
        progress._bar.refresh()
        assert "[/weights] loading [red" in out.getvalue()
        progress.step(record())
        progress._bar.refresh()
    assert "1/3" in out.getvalue()
