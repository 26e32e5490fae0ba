"""The load of a fleet: the preset ``thrash`` for every engine, with skewed lengths."""

import random
from dataclasses import replace

from vllm_thunder.replay.presets import preset
from vllm_thunder.replay.workload import ProgramShape, Workload

__all__ = ["ENGINES", "LONG_OVER_SHORT", "LONG_SHARE", "engine_blocks", "skewed"]

ENGINES = 3
#: The long programs' prompts and observations, as a multiple of the others'.
LONG_OVER_SHORT = 3.0
LONG_SHARE = 1 / 3
_PRESET = "thrash"


def engine_blocks() -> int:
    """Usable blocks of one engine: the preset's."""
    return preset(_PRESET).blocks


def skewed(seed: int, *, steps: int | None = None) -> Workload:
    """``ENGINES`` times the programs of ``thrash``, of which ``LONG_SHARE`` are long.

    Which ones follows from the seed. Lengths are scaled so that the sum of all contexts is about
    what it is without the skew; answers and tool times stay. Ids hold the seed: a hash of them
    spreads the programs otherwise for every seed. ``steps`` keeps the first ones of each program.
    """
    one = preset(_PRESET, seed=seed)
    count = ENGINES * len(one.programs)
    load = preset(_PRESET, seed=seed, programs=count)
    long = set(random.Random(f"{seed}/long").sample(range(count), round(count * LONG_SHARE)))
    short_scale = 1 / (1 + LONG_SHARE * (LONG_OVER_SHORT - 1))
    programs = tuple(
        _scaled(
            replace(program, program_id=f"{seed}-{program.program_id}"),
            short_scale * LONG_OVER_SHORT if index in long else short_scale,
        )
        for index, program in enumerate(load.programs)
    )
    load = replace(
        load, name=f"{_PRESET} × {ENGINES}, skewed", blocks=ENGINES * one.blocks, programs=programs
    )
    return load if steps is None else load.first_steps(steps)


def _scaled(program: ProgramShape, scale: float) -> ProgramShape:
    steps = tuple(
        replace(step, new_input_tokens=round(step.new_input_tokens * scale))
        for step in program.steps
    )
    return replace(program, steps=steps)
