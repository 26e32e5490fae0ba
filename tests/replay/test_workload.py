"""The synthetic loads are what the claims are measured on: their numbers are pinned here."""

import math
import random
import statistics

import pytest

from vllm_thunder.program.errors import ConfigError
from vllm_thunder.replay.presets import BUILD_SECONDS, PRESETS, draw_build_seconds, preset
from vllm_thunder.replay.words import LEXICON_SIZE, lexicon, write_words
from vllm_thunder.replay.workload import ProgramShape, StepShape, Workload


def test_thrash_is_the_load_of_the_claims() -> None:
    load = preset("thrash")
    assert (len(load.programs), load.steps) == (24, 192)
    assert (load.blocks, load.block_size) == (750, 32)
    firsts = [program.steps[0].new_input_tokens for program in load.programs]
    later = [s.new_input_tokens for program in load.programs for s in program.steps[1:]]
    outputs = [step.output_tokens for program in load.programs for step in program.steps]
    assert 1000 <= min(firsts) < 1300
    assert 2700 < max(firsts) <= 3000
    assert 100 <= min(later) < 120
    assert 480 < max(later) <= 500
    assert 24 <= min(outputs) < 26
    assert 62 < max(outputs) <= 64
    assert {program.shared_prefix_tokens for program in load.programs} == {200}
    assert load.pressure > 4


def test_tool_times_are_lognormal_and_the_last_step_has_none() -> None:
    load = preset("thrash", programs=400)
    times = [step.tool_seconds for program in load.programs for step in program.steps[:-1]]
    standard = [(math.log(seconds) - 0.3) / 0.8 for seconds in times]
    quantiles = [statistics.NormalDist().cdf(z) for z in standard]  # uniform, if the claim holds
    assert statistics.mean(quantiles) == pytest.approx(0.5, abs=0.02)
    assert statistics.pstdev(quantiles) == pytest.approx(12**-0.5, abs=0.02)
    assert all(program.steps[-1].tool_seconds == 0 for program in load.programs)
    assert all(program.steps[-1].tool is None for program in load.programs)


def test_roomy_is_thrash_with_memory_for_all() -> None:
    assert preset("roomy").programs == preset("thrash").programs
    assert preset("roomy").pressure < 0.8


def contexts(load: Workload) -> list[list[tuple[int, int]]]:
    return [[(s.new_input_tokens, s.output_tokens) for s in p.steps] for p in load.programs]


def test_heavy_is_thrash_with_tools_that_build() -> None:
    for seed in range(3):
        heavy, thrash = preset("heavy", seed=seed), preset("thrash", seed=seed)
        assert contexts(heavy) == contexts(thrash)
        assert (heavy.blocks, heavy.block_size) == (thrash.blocks, thrash.block_size)
        assert all(program.steps[-1].tool_seconds == 0 for program in heavy.programs)
    times = [s.tool_seconds for p in preset("heavy", programs=400).programs for s in p.steps[:-1]]
    assert max(times) == pytest.approx(60.0)
    assert sum(seconds > 30 for seconds in times) / len(times) == pytest.approx(0.1, abs=0.02)


def test_build_times_follow_their_quantiles() -> None:
    rng = random.Random(1)
    draws = sorted(draw_build_seconds(rng) for _ in range(20_000))
    for index, seconds in enumerate(BUILD_SECONDS[1:-1], start=1):
        place = index * len(draws) // (len(BUILD_SECONDS) - 1)
        low, high = draws[place - 200], draws[place + 200]
        assert low * 0.999 <= seconds <= high * 1.001


def test_shared_fits_only_because_its_prefix_is_kept_once() -> None:
    load = preset("shared")
    assert len(load.programs) == 100
    for program in load.programs:
        assert program.shared_prefix_tokens == 0.9 * program.steps[0].new_input_tokens
    assert sum(p.context_tokens for p in load.programs) > 1.4 * load.blocks * load.block_size
    assert load.pressure < 0.5


def test_the_first_steps_of_a_load() -> None:
    load = preset("thrash")
    cut = load.first_steps(3)
    assert contexts(cut) == [steps[:3] for steps in contexts(load)]
    assert cut.programs[0].steps[:2] == load.programs[0].steps[:2]
    assert (cut.programs[0].steps[2].tool, cut.programs[0].steps[2].tool_seconds) == (None, 0.0)
    assert load.first_steps(8) == load
    with pytest.raises(ValueError, match="0 steps"):
        load.first_steps(0)


@pytest.mark.parametrize("name", PRESETS)
def test_a_seed_fixes_a_load_and_another_one_changes_it(name: str) -> None:
    assert preset(name, seed=3) == preset(name, seed=3)
    assert preset(name, seed=3).programs != preset(name, seed=4).programs
    assert len({program.program_id for program in preset(name).programs}) == len(
        preset(name).programs
    )


def test_more_programs_keep_the_first_ones() -> None:
    assert preset("thrash", programs=30).programs[:24] == preset("thrash").programs


def test_context_and_pressure() -> None:
    load = preset("smoke")
    lengths = [
        sum(s.new_input_tokens + s.output_tokens for s in program.steps)
        for program in load.programs
    ]
    assert load.longest_context == max(lengths)
    assert load.pressure == pytest.approx((sum(lengths) - 5 * 64) / (40 * 32))
    assert load.resized(80).pressure == pytest.approx(load.pressure / 2)
    assert load.resized(None) is load


@pytest.mark.parametrize(
    ("name", "programs", "message"),
    [
        ("thrush", None, "no preset 'thrush'; known: heavy, roomy, shared, smoke, thrash"),
        ("smoke", 0, "below 1"),
    ],
)
def test_what_is_not_a_load_is_refused(name: str, programs: int | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        preset(name, programs=programs)


def test_words_depend_on_the_seed_alone() -> None:
    assert len(set(lexicon())) == LEXICON_SIZE
    assert all(word.isalpha() and word.islower() for word in lexicon())
    assert write_words(50, "a") == write_words(50, "a")
    assert write_words(50, "a") != write_words(50, "b")
    assert len(write_words(50, "a").split(" ")) == 50
    assert write_words(0, "a") == ""


def test_a_shared_prefix_takes_memory_once_a_source() -> None:
    steps = (StepShape(100, 20, None, 0.0),)
    programs = [ProgramShape(str(i), "one", 60, steps) for i in range(5)]
    programs.append(ProgramShape("other", "two", 0, steps))
    load = Workload("w", 0, blocks=10, block_size=16, programs=tuple(programs))
    assert load.distinct_tokens == 60 + 5 * 60 + 120
    assert load.pressure == pytest.approx(480 / 160)
