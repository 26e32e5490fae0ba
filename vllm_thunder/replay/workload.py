"""What is replayed: programs with their steps, from a preset or from a trace file.

A workload holds numbers only. The driver writes the text (:mod:`vllm_thunder.replay.words`).
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from vllm_thunder.program.errors import ConfigError

__all__ = ["PRESETS", "ProgramShape", "StepShape", "Workload", "preset"]


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


@dataclass(frozen=True, slots=True)
class _Chat:
    """A synthetic load of chat agents: ranges are inclusive and uniform, tools lognormal."""

    programs: int
    steps: int
    first_prompt: tuple[int, int]
    shared: int
    observation: tuple[int, int]
    output: tuple[int, int]
    tool_mu: float
    tool_sigma: float
    blocks: int
    block_size: int = 32


#: ``thrash`` is the load that the package's claims are measured on: about four times the
#: contexts that fit. ``roomy`` is the same load with memory for all of it. ``smoke`` is small
#: enough for a test.
PRESETS: dict[str, _Chat] = {
    "thrash": _Chat(
        programs=24,
        steps=8,
        first_prompt=(1000, 3000),
        shared=200,
        observation=(100, 500),
        output=(24, 64),
        tool_mu=0.3,
        tool_sigma=0.8,
        blocks=750,
    ),
    "roomy": _Chat(
        programs=24,
        steps=8,
        first_prompt=(1000, 3000),
        shared=200,
        observation=(100, 500),
        output=(24, 64),
        tool_mu=0.3,
        tool_sigma=0.8,
        blocks=4500,
    ),
    "smoke": _Chat(
        programs=6,
        steps=3,
        first_prompt=(120, 300),
        shared=64,
        observation=(20, 60),
        output=(4, 8),
        tool_mu=-2.0,
        tool_sigma=0.5,
        blocks=40,
    ),
}


def preset(name: str, *, seed: int = 0, programs: int | None = None) -> Workload:
    """The named synthetic load. ``programs`` changes how many there are.

    The first programs of two loads that differ only in their number are the same. An unknown
    name raises ConfigError.
    """
    if name not in PRESETS:
        raise ConfigError(f"--workload: no preset {name!r}; known: {', '.join(sorted(PRESETS))}")
    chat = PRESETS[name]
    count = chat.programs if programs is None else programs
    if count < 1:
        raise ConfigError(f"--programs: {count} is below 1")
    rng = random.Random(f"{seed}/chat")
    return Workload(
        name=name,
        seed=seed,
        blocks=chat.blocks,
        block_size=chat.block_size,
        programs=tuple(_chat_program(chat, index, rng) for index in range(count)),
    )


def _chat_program(chat: _Chat, index: int, rng: random.Random) -> ProgramShape:
    def tokens(bounds: tuple[int, int]) -> Callable[[], int]:
        return lambda: rng.randint(*bounds)

    first, later, output = tokens(chat.first_prompt), tokens(chat.observation), tokens(chat.output)
    steps = tuple(
        StepShape(
            new_input_tokens=first() if step == 0 else later(),
            output_tokens=output(),
            tool=None if step == chat.steps - 1 else "tool",
            tool_seconds=0.0
            if step == chat.steps - 1
            else rng.lognormvariate(chat.tool_mu, chat.tool_sigma),
        )
        for step in range(chat.steps)
    )
    return ProgramShape(f"chat-{index:03d}", "chat", chat.shared, steps)
