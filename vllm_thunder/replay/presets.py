"""Synthetic loads of chat agents, by name."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from vllm_thunder.program.errors import ConfigError
from vllm_thunder.replay.workload import ProgramShape, StepShape, Workload

__all__ = ["BUILD_SECONDS", "PRESETS", "draw_build_seconds", "preset"]

#: Tool times of agents that build C++: quantiles 0, 0.05, ... 1 of the 355 tool calls in
#: asb_cpp_builds (agentic-swarm-bench 4.0.9, Apache-2.0), in seconds, divided by ten so that the
#: longest, ten minutes there, is one minute.
BUILD_SECONDS = (
    *(0.0002, 0.001, 0.0013, 0.0016, 0.0019, 0.00255, 0.0042, 0.0055, 0.00714, 0.0107, 0.0203),
    *(0.0388, 0.0426, 0.0581, 0.141, 0.346, 0.881, 2.23, 35.4, 60.0, 60.0),
)


@dataclass(frozen=True, slots=True)
class _Chat:
    """Ranges are inclusive and uniform. Tool times are lognormal, or what ``tools`` draws."""

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
    tools: Callable[[random.Random], float] | None = None


def draw_build_seconds(rng: random.Random) -> float:
    """One draw from ``BUILD_SECONDS``, whose logarithm is linear between two quantiles."""
    place, part = divmod(rng.random() * (len(BUILD_SECONDS) - 1), 1.0)
    low, high = (math.log(seconds) for seconds in BUILD_SECONDS[int(place) : int(place) + 2])
    return math.exp(low + part * (high - low))


_THRASH = _Chat(
    programs=24,
    steps=8,
    first_prompt=(1000, 3000),
    shared=200,
    observation=(100, 500),
    output=(24, 64),
    tool_mu=0.3,
    tool_sigma=0.8,
    blocks=750,
)

#: ``thrash`` is the load that the package's claims are measured on: about four times the
#: contexts that fit. ``heavy`` has the same contexts and tools with a heavy tail: one call in ten
#: takes more than half a minute. ``roomy`` is ``thrash`` with memory for all of it. ``shared``
#: fits only because the 1,800 tokens that start its 100 contexts are kept once: added up they are
#: one and a half times the memory. ``smoke`` is small enough for a test.
PRESETS: dict[str, _Chat] = {
    "thrash": _THRASH,
    "heavy": replace(_THRASH, tools=draw_build_seconds),
    "roomy": replace(_THRASH, blocks=4500),
    "shared": _Chat(
        programs=100,
        steps=3,
        first_prompt=(2000, 2000),
        shared=1800,
        observation=(30, 90),
        output=(8, 16),
        tool_mu=-0.5,
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
        programs=tuple(_chat_program(chat, index, seed, rng) for index in range(count)),
    )


def _chat_program(chat: _Chat, index: int, seed: int, rng: random.Random) -> ProgramShape:
    program_id = f"chat-{index:03d}"
    own = random.Random(f"{seed}/tools/{program_id}")

    def tokens(bounds: tuple[int, int]) -> Callable[[], int]:
        return lambda: rng.randint(*bounds)

    def tool_seconds() -> float:
        # Drawn in any case, so that loads that differ in their tools alone have equal contexts.
        lognormal = rng.lognormvariate(chat.tool_mu, chat.tool_sigma)
        return lognormal if chat.tools is None else chat.tools(own)

    first, later, output = tokens(chat.first_prompt), tokens(chat.observation), tokens(chat.output)
    steps = tuple(
        StepShape(
            new_input_tokens=first() if step == 0 else later(),
            output_tokens=output(),
            tool=None if step == chat.steps - 1 else "tool",
            tool_seconds=0.0 if step == chat.steps - 1 else tool_seconds(),
        )
        for step in range(chat.steps)
    )
    return ProgramShape(program_id, "chat", chat.shared, steps)
