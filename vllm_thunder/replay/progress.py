"""Shows a long measurement as it goes: a bar on a terminal, a line now and then in a log."""

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from vllm_thunder.replay.records import StepRecord

__all__ = ["RunProgress"]

_LOG_SECONDS = 15.0


class RunProgress:
    """Progress of one run: first the server's start, then the workload's steps."""

    def __init__(self, console: Console, label: str, steps: int):
        self._console = console
        self._label = label
        self._steps = steps
        self._done = self._failed = 0
        self._started_at: float | None = None
        self._last_line = time.monotonic()
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}", style="dim", markup=False),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task: TaskID = self._bar.add_task(f"{label}: starting", total=None, note="")

    def __enter__(self) -> Self:
        self._bar.start()
        if not self._console.is_terminal:
            self._console.print(f"{self._label}: starting")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def starting(self, seconds: float, last_line: str) -> None:
        """The server is not up yet; ``last_line`` of its log says what it is doing."""
        self._bar.update(self._task, note=last_line[-60:])
        self._log(f"{self._label}: starting for {seconds:.0f} s")

    def step(self, record: StepRecord) -> None:
        """A model call ended."""
        if self._started_at is None:
            self._started_at = time.monotonic() - record.latency_seconds
        if record.error is None:
            self._done += 1
        else:
            self._failed += 1
        elapsed = max(time.monotonic() - self._started_at, 1e-3)
        note = f"{60 * self._done / elapsed:.0f} steps/min"
        if self._failed:
            note += f", {self._failed} failed"
        self._bar.update(
            self._task,
            description=f"{self._label}: replaying",
            total=self._steps,
            completed=self._done,
            note=note,
        )
        self._log(f"{self._label}: {self._done} of {self._steps} steps, {note}")

    def _log(self, line: str) -> None:
        now = time.monotonic()
        if not self._console.is_terminal and now - self._last_line >= _LOG_SECONDS:
            self._last_line = now
            self._console.print(line, markup=False)
