"""Figures that no replay tells: what the scheduler costs, from scripts without a model."""

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_thunder.program.errors import ConfigError, ThunderError
from vllm_thunder.replay.machine import describe_machine
from vllm_thunder.replay.records import Replay, StepRecord

__all__ = ["ROOMY_COST", "SCHEDULER_COST", "Script", "ScriptFailed", "busy_seconds", "step_seconds"]

_BENCHMARKS = Path(__file__).resolve().parents[1]
_STEPS = "vllm:iteration_tokens_total_count"

Runs = Mapping[str, Sequence[Replay]]


class ScriptFailed(ThunderError):
    """A script ended with an error, which it has printed."""


@dataclass(frozen=True, slots=True)
class Script:
    """A script of ``benchmarks/`` that writes a report to the file after ``--json``, and what to
    take from it, given the row's runs. ``seconds`` is about what it takes."""

    file: str
    arguments: tuple[str, ...]
    seconds: float
    figures: Callable[[dict[str, Any], Runs], dict[str, float]]

    def path(self, work: Path) -> Path:
        return work / Path(self.file).with_suffix(".json").name

    def run(self, runs: Runs, work: Path) -> dict[str, float]:
        """The figures; the script runs only if ``work`` has no report of it.

        Raises ScriptFailed, and ConfigError when the report is of another commit.
        """
        path = self.path(work)
        if not path.is_file():
            command = [sys.executable, str(_BENCHMARKS / self.file), *self.arguments]
            found = subprocess.run([*command, "--json", str(path)], check=False)
            if found.returncode != 0 or not path.is_file():
                raise ScriptFailed(f"{self.file} ended with status {found.returncode}")
        report = json.loads(path.read_text(encoding="utf-8"))
        commit = describe_machine()["commit"]
        if report["machine"]["commit"] != commit:
            raise ConfigError(
                f"{path} is of commit {report['machine']['commit']}, not {commit}: use --fresh"
            )
        return self.figures(report, runs)


def step_seconds(runs: Sequence[Replay]) -> float | None:
    """Mean seconds of an engine step: the time in which any call was in flight, over the engine's
    own count of steps. None where the server does not count them."""
    if any(_STEPS not in run.engine for run in runs):
        return None
    steps = sum(run.engine[_STEPS] for run in runs)
    return sum(busy_seconds(run.steps) for run in runs) / steps if steps else None


def busy_seconds(steps: Sequence[StepRecord]) -> float:
    """Seconds in which at least one call was in flight."""
    total = end = 0.0
    for step in sorted(steps, key=lambda step: step.started_at):
        done = step.started_at + step.latency_seconds
        total += max(0.0, done - max(end, step.started_at))
        end = max(end, done)
    return total


def _roomy_figures(report: dict[str, Any], runs: Runs) -> dict[str, float]:
    seconds = step_seconds(runs["stock"])
    if seconds is None:
        return {}
    return {
        "step_ms": 1e3 * seconds,
        **{f"{name}_us": 1e6 * extra for name, extra in report["extra_seconds"].items()},
        **{f"{name}_share": extra / seconds for name, extra in report["extra_seconds"].items()},
    }


def _instruction_figures(report: dict[str, Any], _runs: Runs) -> dict[str, float]:
    return {
        "overhead": report["overhead"],
        **{
            f"{kind}_instructions": report[kind]["instructions_per_step"]
            for kind in ("stock", "thunder")
        },
    }


ROOMY_COST = Script("roomy_cost.py", (), seconds=20, figures=_roomy_figures)
SCHEDULER_COST = Script(
    "scheduler_instructions.py",
    ("--steps", "2000"),
    seconds=290,
    figures=_instruction_figures,
)
