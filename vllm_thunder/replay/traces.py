"""Reads traces of agent runs: one JSON object a line, one program a line.

    {"program_id", "source", "shared_prefix_tokens",
     "steps": [{"new_input_tokens", "output_tokens", "tool", "tool_seconds"[, "dropped_tokens"]}]}

``dropped_tokens`` (context that the client took out again) is checked and then ignored: the
replay only appends. A tool time that a trace does not have is drawn from a published table of
real coding agents, by the class of the tool.
"""

import json
import math
import random
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

from vllm_thunder.program.errors import ConfigError
from vllm_thunder.replay.workload import ProgramShape, StepShape, Workload

__all__ = [
    "TOOL_SECONDS",
    "TraceError",
    "TraceOptions",
    "draw_tool_seconds",
    "read_trace",
    "tool_class",
]


class TraceError(ConfigError):
    """A trace line cannot be used; the message names file, line and field."""


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """How a trace becomes a workload.

    ``scale`` multiplies every token count (at least one token stays), ``tool_scale`` tool times;
    ``max_tool_seconds`` caps what that gives; ``user_seconds`` replaces the time of a ``"user"``
    turn, which is a person's and says nothing about an agent. A program is cut before the step at
    which its context, after scaling, would exceed ``max_context`` tokens, and after ``max_steps``
    steps; programs that lose their first step are left out. ``programs`` keeps that many, spread
    over the file.
    """

    scale: float = 1.0
    tool_scale: float = 1.0
    max_tool_seconds: float = 60.0
    user_seconds: float = 1.0
    max_context: int | None = None
    max_steps: int | None = None
    programs: int | None = None

    def __post_init__(self) -> None:
        for flag, value, low in (
            ("--trace-scale", self.scale, 1e-6),
            ("--trace-tool-scale", self.tool_scale, 0.0),
            ("--trace-max-tool-seconds", self.max_tool_seconds, 0.0),
            ("--trace-user-seconds", self.user_seconds, 0.0),
            ("--trace-max-context", self.max_context, 2),
            ("--trace-max-steps", self.max_steps, 1),
            ("--programs", self.programs, 1),
        ):
            if value is not None and not value >= low:
                raise ConfigError(f"{flag}: {value} is below {low}")


#: Seconds of a tool call at p25, p50, p90 and p99, by class of tool (TraceLab, CC BY 4.0).
TOOL_SECONDS: dict[str, tuple[float, float, float, float]] = {
    "shell": (0.11, 0.85, 22.0, 237.0),
    "edit": (0.038, 0.074, 1.9, 56.0),
    "read": (0.015, 0.043, 0.47, 7.3),
    "agent": (0.048, 0.18, 126.0, 600.0),
    "web": (2.2, 5.9, 62.0, 262.0),
}
_TABLE_QUANTILES = (0.25, 0.50, 0.90, 0.99)

#: Names as the traces write them; the first class with a name that starts the tool's wins.
_CLASS_BY_PREFIX = (
    # tau-bench: calls of a database
    ("read", ("book_", "cancel_", "update_reservation", "send_certificate", "think", "calculate")),
    ("web", ("web", "curl", "wget", "browse")),
    ("agent", ("task", "agent", "subagent", "delegate")),
    ("edit", ("edit", "create", "write", "insert", "str_replace", "todowrite", "update_")),
    ("edit", ("set_cursors", "submit")),
    ("read", ("open", "read", "grep", "glob", "find", "search", "ls", "cat", "view", "scroll")),
    ("read", ("get_", "list_", "goto", "file", "strings")),
)


def tool_class(tool: str) -> str:
    """The row of ``TOOL_SECONDS`` for a tool's name; what is not known runs in a shell."""
    name = tool.lower()
    for row, prefixes in _CLASS_BY_PREFIX:
        if name.startswith(prefixes):
            return row
    return "shell"


def draw_tool_seconds(row: str, rng: random.Random) -> float:
    """One draw from a row of ``TOOL_SECONDS``.

    Between the published quantiles the logarithm of the time is linear in the normal quantile
    (a lognormal in pieces). Below p25 the first piece goes on; above p99 the time is p99's.
    """
    z_known = [NormalDist().inv_cdf(q) for q in _TABLE_QUANTILES]
    log_known = [math.log(seconds) for seconds in TOOL_SECONDS[row]]
    z = min(rng.gauss(0.0, 1.0), z_known[-1])
    piece = next((i for i in range(1, len(z_known) - 1) if z <= z_known[i]), len(z_known) - 1)
    slope = (log_known[piece] - log_known[piece - 1]) / (z_known[piece] - z_known[piece - 1])
    return math.exp(log_known[piece] + slope * (z - z_known[piece]))


def read_trace(
    path: Path,
    options: TraceOptions | None = None,
    *,
    seed: int = 0,
    blocks: int,
    block_size: int = 32,
) -> Workload:
    """The workload of a trace file, for a KV cache of ``blocks`` x ``block_size`` tokens.

    Raises TraceError for a file that is not there, a line that does not fit the format, a
    program id that comes twice, or when no program is left.
    """
    options = options or TraceOptions()
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: cannot be read: {error}") from error
    programs, seen = [], set()
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        program = _read_line(line, f"{path}:{number}", options, seed)
        if program.program_id in seen:
            raise TraceError(f"{path}:{number}: program_id {program.program_id!r} comes twice")
        seen.add(program.program_id)
        if program.steps:
            programs.append(program)
    if not programs:
        raise TraceError(f"{path}: no program is left to replay")
    if options.programs is not None and options.programs < len(programs):
        stride = len(programs) / options.programs
        programs = [programs[int(index * stride)] for index in range(options.programs)]
    return Workload(path.stem, seed, blocks, block_size, tuple(programs))


def _read_line(line: str, where: str, options: TraceOptions, seed: int) -> ProgramShape:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise TraceError(f"{where}: not JSON: {error}") from error
    if not isinstance(record, dict):
        raise TraceError(f"{where}: not a JSON object")
    program_id = _text(record, "program_id", where)
    source = _text(record, "source", where)
    shared = _count(record, "shared_prefix_tokens", where, low=0)
    steps = record.get("steps")
    if not isinstance(steps, list) or not steps:
        raise TraceError(f"{where}: steps: not a list with at least one step")
    rng = random.Random(f"{seed}/tools/{program_id}")
    shapes = [
        _read_step(step, f"{where}: steps[{index}]", options, rng)
        for index, step in enumerate(steps)
    ]
    kept = list(_cut(shapes, options))
    if kept:
        kept[-1] = replace(kept[-1], tool_seconds=0.0)  # nothing follows
        shared = min(_scaled(shared, options.scale), kept[0].new_input_tokens - 1)
    return ProgramShape(program_id, source, shared, tuple(kept))


def _read_step(step: Any, where: str, options: TraceOptions, rng: random.Random) -> StepShape:
    if not isinstance(step, dict):
        raise TraceError(f"{where}: not a JSON object")
    tool, seconds = step.get("tool"), step.get("tool_seconds")
    if tool is not None and (not isinstance(tool, str) or not tool):
        raise TraceError(f"{where}.tool: {tool!r} is neither a name nor null")
    if seconds is not None and (
        isinstance(seconds, bool)
        or not isinstance(seconds, int | float)
        or not 0 <= seconds < math.inf
    ):
        raise TraceError(f"{where}.tool_seconds: {seconds!r} is neither seconds nor null")
    if "dropped_tokens" in step:
        _count(step, "dropped_tokens", where, low=0)
    # Drawn for every step, so that a time filled into the trace changes no other one.
    drawn = draw_tool_seconds(tool_class(tool or ""), rng)
    if tool == "user":
        seconds = options.user_seconds
    else:
        seconds = options.tool_scale * (drawn if seconds is None else seconds)
    return StepShape(
        new_input_tokens=_scaled(_count(step, "new_input_tokens", where, low=1), options.scale),
        output_tokens=_scaled(_count(step, "output_tokens", where, low=1), options.scale),
        tool=tool,
        tool_seconds=min(float(seconds), options.max_tool_seconds),
    )


def _cut(steps: Iterable[StepShape], options: TraceOptions) -> Iterable[StepShape]:
    context = 0
    for index, step in enumerate(steps):
        context += step.new_input_tokens + step.output_tokens
        if options.max_context is not None and context > options.max_context:
            return
        if options.max_steps is not None and index >= options.max_steps:
            return
        yield step


def _scaled(tokens: int, scale: float) -> int:
    return max(1, round(tokens * scale))


def _text(record: dict[str, Any], field: str, where: str) -> str:
    value = record.get(field)
    if not isinstance(value, str) or not value:
        raise TraceError(f"{where}: {field}: {value!r} is not a text")
    return value


def _count(record: dict[str, Any], field: str, where: str, *, low: int) -> int:
    value = record.get(field)
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise TraceError(f"{where}: {field}: {value!r} is not a number of tokens, {low} or more")
    return value
