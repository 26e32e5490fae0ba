"""What is replayed: programs with their steps, from a preset or from a trace file.

A workload holds numbers only. The driver writes the text (:mod:`vllm_thunder.replay.words`).
"""

from dataclasses import dataclass, replace

__all__ = ["ProgramShape", "StepShape", "Workload"]


@dataclass(frozen=True, slots=True)
class StepShape:
    """One model call of a program and what its agent does afterwards.

    ``new_input_tokens`` are appended to the context before the call (the first step: the whole
    first prompt). ``tool_seconds`` pass between the end of the call and the next one.
    """

    new_input_tokens: int
    output_tokens: int
    tool: str | None
    tool_seconds: float


@dataclass(frozen=True, slots=True)
class ProgramShape:
    """One growing context. ``shared_prefix_tokens``: the head of its first prompt that all
    programs of the same ``source`` share."""

    program_id: str
    source: str
    shared_prefix_tokens: int
    steps: tuple[StepShape, ...]

    @property
    def context_tokens(self) -> int:
        """Tokens of the context after the last step."""
        return sum(step.new_input_tokens + step.output_tokens for step in self.steps)


@dataclass(frozen=True, slots=True)
class Workload:
    """Programs that all start at once, each making its steps one after the other.

    ``blocks`` x ``block_size`` tokens is the KV cache that the load is meant for.
    """

    name: str
    seed: int
    blocks: int
    block_size: int
    programs: tuple[ProgramShape, ...]

    @property
    def steps(self) -> int:
        return sum(len(program.steps) for program in self.programs)

    @property
    def longest_context(self) -> int:
        """Tokens of the longest context at its end, without what a chat template adds."""
        return max(program.context_tokens for program in self.programs)

    @property
    def pressure(self) -> float:
        """All contexts at their ends, over the KV cache: above 1 they do not fit at once."""
        return self.distinct_tokens / (self.blocks * self.block_size)

    @property
    def distinct_tokens(self) -> int:
        """Tokens of all contexts at their ends, a prefix that programs share counted once."""
        shared: dict[str, int] = {}
        own = 0
        for program in self.programs:
            own += program.context_tokens - program.shared_prefix_tokens
            shared[program.source] = max(
                program.shared_prefix_tokens, shared.get(program.source, 0)
            )
        return own + sum(shared.values())

    def resized(self, blocks: int | None) -> "Workload":
        """The same load on another KV cache; None leaves it as it is."""
        return self if blocks is None else replace(self, blocks=blocks)

    def first_steps(self, count: int) -> "Workload":
        """The same load with the first ``count`` steps of each program; no tool follows the last.

        Raises ValueError for a count below 1.
        """
        if count < 1:
            raise ValueError(f"{count} steps are no program")
        return replace(self, programs=tuple(_first_steps(p, count) for p in self.programs))


def _first_steps(program: ProgramShape, count: int) -> ProgramShape:
    if count >= len(program.steps):
        return program
    *kept, last = program.steps[:count]
    return replace(program, steps=(*kept, replace(last, tool=None, tool_seconds=0.0)))
