"""What a replay measured: plain records that go to JSON and come back."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["ProgramRecord", "Replay", "StepRecord"]


@dataclass(slots=True)
class StepRecord:
    """One model call. Times are seconds; ``started_at`` counts from the start of the run.

    The *step latency* (``latency_seconds``) is the model call's whole time as its agent sees it:
    from just before the request is sent until the end of the streamed answer has been read. All
    waiting on the server's side is in it: queued, held, paused, preempted. Not in it: the tool's
    time, and ``queue_seconds``, for which the program waited on the client's side for one of
    ``max_concurrent_programs`` slots (its first step only).

    ``first_token_seconds`` is the part of the latency until the first piece of text came. Token
    counts are the server's own; None where it does not send them. ``error`` is None for a call
    that succeeded.
    """

    program_id: str
    step: int
    labelled: bool
    started_at: float
    queue_seconds: float = 0.0
    first_token_seconds: float | None = None
    latency_seconds: float = 0.0
    tool_seconds: float = 0.0
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    finish_reason: str | None = None
    error: str | None = None


@dataclass(slots=True)
class ProgramRecord:
    """One program, offered at the start of the run. ``ended_at``: seconds from then until its
    last call ended, so the time for which it waited to be started counts. ``error`` says why it
    failed, ``release_error`` why its release did. A program that the end of the run's window cut
    short has not failed."""

    program_id: str
    labelled: bool
    planned_steps: int
    finished_steps: int = 0
    ended_at: float = 0.0
    error: str | None = None
    release_error: str | None = None

    @property
    def complete(self) -> bool:
        return self.error is None and self.finished_steps == self.planned_steps


@dataclass(slots=True)
class Replay:
    """One run of a workload against one server.

    ``seconds`` is the time from the first call's start to the last call's end. ``engine`` holds
    the change of the server's counters over the run by Prometheus name, empty where it has no
    ``/metrics``; ``decisions`` the change of the counters in ``GET /programs/summary`` (pauses,
    restores and so on) and ``summary`` what that said after the run, None where the server has
    no such page. ``about`` says what ran where: workload, client options, server, machine.
    """

    kind: str
    seconds: float = 0.0
    programs: list[ProgramRecord] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)
    engine: dict[str, float] = field(default_factory=dict)
    decisions: dict[str, float] = field(default_factory=dict)
    summary: dict[str, Any] | None = None
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def errors(self) -> list[str]:
        """Every failure of a program or a release, as ``program: what``."""
        return [
            f"{program.program_id}: {text}"
            for program in self.programs
            for text in (program.error, program.release_error)
            if text is not None
        ]

    def save(self, path: Path) -> None:
        """Write the JSON; the file appears only when it is complete."""
        unfinished = path.with_name(f".{path.name}.unfinished")
        unfinished.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        unfinished.replace(path)

    @classmethod
    def load(cls, path: Path) -> "Replay":
        values = json.loads(path.read_text(encoding="utf-8"))
        values["programs"] = [ProgramRecord(**program) for program in values["programs"]]
        values["steps"] = [StepRecord(**step) for step in values["steps"]]
        return cls(**values)
