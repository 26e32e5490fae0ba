"""Faults that users of other systems have met, as scenarios on the real scheduler."""

import random
from statistics import mean
from typing import Any

import pytest
from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalKwargsItem, PlaceholderRange
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import Request, RequestStatus

from tests.engine.agents import Agent, Loop
from tests.engine.harness import BLOCK, text
from tests.engine.worker import WINDOW, WorkedEngine, answer, attention, sliding_window


@pytest.fixture
def make_worked(tiny_model):
    """Builds :class:`WorkedEngine`; the books of each are checked at the end of the test."""
    engines = []

    def make(**kwargs: Any) -> WorkedEngine:
        engines.append(WorkedEngine(tiny_model, **kwargs))
        return engines[-1]

    yield make
    for engine in engines:
        engine.check()


def counters(engine: WorkedEngine) -> dict[str, float]:
    return engine.scheduler.programs("metrics")["counters"]


def status(engine: WorkedEngine, program_id: str) -> dict[str, Any]:
    return engine.scheduler.programs("get", program_id)


def test_scenario_2_pauses_race_turns_in_flight(make_worked):
    """64 programs at a time, 10,000 turns, and memory for a fifth of them: programs are paused
    and restored in nearly every step of 10 ms. Every turn ends as it must, with its text."""
    engine = make_worked(blocks=110, max_wait=0.4, idle_grace=0.05, max_num_batched_tokens=1024)
    rng = random.Random(2)
    prefix = text(0, 2 * BLOCK)
    turns = 0
    for generation in range(20):
        agents = [
            Agent(
                f"program {slot}",
                prefix + text(1000 * generation + slot, rng.randrange(20, 140)),
                turns=8,
                output=rng.randrange(1, 4),
                growth=rng.randrange(1, 12),
                tool_seconds=rng.choice([0.0, 0.01, 0.03, 0.1]),
            )
            for slot in range(64)
        ]
        loop = Loop(engine, agents)
        loop.run(lambda prefill: 0.01, most_steps=3000)
        turns += loop.turns
        engine.check()
        assert not engine.scheduler.status.list()
        assert engine.free_blocks == 110
    assert turns == 64 * 8 * 20
    assert engine.scheduler.status.longest_wait < 1.0
    assert counters(engine)["pauses"] > 2000
    assert counters(engine)["restores"] > 5000


@pytest.fixture(scope="module")
def burst(tiny_model) -> list[Agent]:
    """64 programs with prompts of 1k to 8k tokens at once, in memory for a third of them; what
    they waited, the smallest program first. The longest wait is set to 30 s."""
    engine = WorkedEngine(tiny_model, blocks=6000, max_wait=30.0, max_num_seqs=128)
    sizes = [1000 + 100 * i for i in range(64)]
    agents = [
        Agent(f"p{size}", text(i, size), turns=4, output=12, growth=70, tool_seconds=0.5)
        for i, size in enumerate(sizes)
    ]
    random.Random(3).shuffle(agents)
    Loop(engine, agents).run(lambda prefill: 0.01 + prefill / 20_000, most_steps=20_000)
    engine.check()
    return sorted(agents, key=lambda agent: len(agent.prompt))


def test_scenario_3_the_longest_wait_of_a_burst_is_bounded(burst):
    assert max(max(agent.waits) for agent in burst) <= 30.0


def test_scenario_3_waiting_does_not_grow_with_size(burst):
    waited = [mean(agent.waits) for agent in burst]
    assert mean(waited[-16:]) <= 1.5 * mean(waited[:16])


@pytest.mark.parametrize("arrival", ["at once", "one by one"])
def test_scenario_8_a_shared_prefix_counts_once(make_worked, arrival):
    """100 programs with a 90 % shared prefix that fit: none is paused, none waits."""
    prefix = text(0, 27 * BLOCK)
    engine = make_worked(blocks=27 + 100 * 4, max_num_seqs=256)
    agents = [
        Agent(
            f"p{i}",
            prefix + text(100 + i, 3 * BLOCK - 20),
            turns=4,
            output=4,
            growth=4,
            tool_seconds=3.0,
        )
        for i in range(100)
    ]
    if arrival == "at once":
        Loop(engine, agents).run(lambda prefill: 0.01, most_steps=5000)
    else:
        loop = Loop(engine, [])
        for agent in agents:
            loop.agents.append(agent)
            agent.at = engine.now
            for _ in range(5):
                loop._advance(agent)
                loop._step(lambda prefill: 0.01)
        loop.run(lambda prefill: 0.01, most_steps=5000)
    assert counters(engine)["pauses"] == 0
    assert max(max(agent.waits) for agent in agents) < 0.5


def test_scenario_18_a_first_line_that_changes_every_turn(make_worked):
    engine = make_worked(blocks=400)
    contexts = {name: text(n, 10 * BLOCK) for n, name in enumerate(("steady", "clock"))}
    for turn in range(12):
        for name, context in contexts.items():
            if name == "clock" and turn >= 4:
                context = text(100 + turn, 8) + context[8:]
            contexts[name] = engine.turn(context + text(200 + turn, 20), name, max_tokens=4)
        engine.now += 1.0
        if turn == 3:
            assert status(engine, "clock")["hit_rate"] > 0.5
            assert counters(engine)["program_hit_rate_collapses"] == 0
    assert status(engine, "steady")["hit_rate"] > 0.5
    assert status(engine, "clock")["hit_rate"] < 0.2
    assert counters(engine)["program_hit_rate_collapses"] >= 1


def test_scenario_20_sliding_window_residency_is_not_token_count(make_worked):
    """What a program has in memory is what the pool has of its content, at every step."""
    engine = make_worked(
        blocks=80,
        groups=[attention(), sliding_window()],
        max_num_batched_tokens=96,
        max_num_seqs=16,
    )

    def in_memory(request: Request, groups: tuple[int, ...] = (0, 1)) -> int:
        cached = engine.pool.cached_block_hash_to_block
        keys = (make_block_hash_with_group_id(h, g) for h in request.block_hashes for g in groups)
        return sum(cached.get_one_block(key) is not None for key in keys)

    context = text(1, 20 * BLOCK)
    for turn in range(6):
        request = engine.send(context + text(10 + turn, 30), "p", max_tokens=8)
        while not request.is_finished():
            engine.step(0.01)
            if not turn:
                assert status(engine, "p")["resident_blocks"] == in_memory(request)
        context = list(request.all_token_ids)
        program = status(engine, "p")
        # All of the one group, and at least what the window of the other has to see.
        low = (len(context) - 1) // BLOCK + WINDOW // BLOCK
        assert low <= program["resident_blocks"] <= in_memory(request)
        assert program["resident_blocks"] <= program["unique_blocks"]
        assert program["context_tokens"] == len(context)
    for size in (20, 40, 60):
        before = program["resident_blocks"]
        engine.run(engine.send(text(size, size * BLOCK)))
        program = status(engine, "p")
        assert in_memory(request, (0,)) <= program["resident_blocks"] <= in_memory(request)
    assert program["resident_blocks"] < before


def test_scenario_20_windows_that_have_passed_claim_nothing(make_worked):
    """Two contexts of 30 blocks, in a group that keeps all and one that keeps 4: 2 * 35 blocks."""
    engine = make_worked(blocks=80, groups=[attention(), sliding_window()])
    agents = [
        Agent(f"p{i}", text(i, 28 * BLOCK), turns=3, output=4, growth=4, tool_seconds=0.5)
        for i in range(2)
    ]
    Loop(engine, agents).run(lambda prefill: 0.01, most_steps=500)
    assert counters(engine)["pauses"] == 0
    assert max(max(agent.waits) for agent in agents) < 0.5


@pytest.mark.parametrize("stop", ["token", "string"])
def test_scenario_21_finish_reason_stop_is_not_the_end(make_worked, stop):
    """A text-action agent never calls a tool; all its turns stop. A stop string reaches the
    engine as an abort."""
    engine = make_worked(blocks=100)
    context = text(1, 6 * BLOCK)
    for turn in range(8):
        prompt = context + text(20 + turn, 7)
        says = answer(prompt, 5)
        sampling = {"stop_token_ids": [says[-1]]} if stop == "token" else {}
        request = engine.send(prompt, "agent", max_tokens=50, sampling=sampling)
        if stop == "token":
            engine.run(request)
            assert request.status is RequestStatus.FINISHED_STOPPED
        else:
            while request.num_output_tokens < 5:
                engine.step(0.01)
            engine.abort(request)
        assert list(request.output_token_ids) == says[: len(request.output_token_ids)]
        if turn:
            assert request.prefill_stats is None or request.num_cached_tokens
        context = list(request.all_token_ids)
        program = status(engine, "agent")
        assert (program["phase"], program["status"]) == ("ACTING", "ACTIVE")
        assert program["turns"] == turn + 1
        assert program["context_tokens"] == len(context)
        assert program["resident_blocks"] == (len(context) - 1) // BLOCK
        engine.now += 5.0
        engine.step()


@pytest.mark.parametrize("outstanding", [0, 1, 2])
@pytest.mark.parametrize("state", [PauseState.PAUSED_NEW, PauseState.PAUSED_ALL])
def test_scenario_23_weights_are_updated_while_programs_are_paused(make_worked, state, outstanding):
    """Acting, paused, held and running programs all lose what was computed with the old weights
    and go on; the worker sees every slot that would be read all the same."""
    engine = make_worked(blocks=64, max_wait=5.0)
    contexts = {
        f"acting{i}": engine.turn(text(i, 12 * BLOCK), f"acting{i}", max_tokens=3) for i in range(4)
    }
    engine.now += 60.0  # their claims lapse
    displacing = engine.send(text(9, 30 * BLOCK), "running", max_tokens=30)
    engine.step(0.01)
    held = engine.send(text(8, 40 * BLOCK), "held", max_tokens=3)
    engine.step(0.01)
    statuses = {p["program_id"]: p for p in engine.scheduler.status.list()}
    assert any(p["status"] == "PAUSED" and not p["held_turns"] for p in statuses.values())
    assert statuses["held"]["held_turns"] == 1
    for _ in range(outstanding):
        engine.schedule()
    engine.scheduler.set_pause_state(state)
    assert engine.reset_prefix_cache(running=True)
    for program in engine.scheduler.status.list():
        assert program["resident_blocks"] == 0
    engine.check()
    while engine.outstanding:
        engine.update()
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    engine.run(displacing, held)
    assert list(displacing.output_token_ids) == answer(text(9, 30 * BLOCK), 30)
    assert list(held.output_token_ids) == answer(text(8, 40 * BLOCK), 3)
    for name, context in contexts.items():
        request = engine.send(context + text(30, 5), name, max_tokens=3)
        engine.run(request)
        assert list(request.output_token_ids) == answer(context + text(30, 5), 3)
        program = status(engine, name)
        assert program["resident_blocks"] == (request.num_tokens - 1) // BLOCK
    engine.check()


def test_scenario_24_an_image_counts_by_its_tokens(make_worked):
    """5 MB of pixels that stand for 300 tokens of the prompt."""
    engine = make_worked(blocks=100)
    engine.scheduler.max_num_encoder_input_tokens = 2048
    engine.scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=2048)
    image = MultiModalFeatureSpec(
        data=MultiModalKwargsItem.dummy(nbytes=5 << 20),
        modality="image",
        identifier="image",
        mm_position=PlaceholderRange(offset=20, length=300),
    )
    prompt = text(1, 20) + [900] * 300 + text(2, 30)
    first = engine.send(prompt, "p", max_tokens=4, request={"mm_features": [image]})
    assert status(engine, "p")["context_tokens"] == 350
    engine.run(first)
    program = status(engine, "p")
    assert program["context_tokens"] == 354
    assert program["resident_blocks"] == 353 // BLOCK
    assert (program["pauses"], program["longest_wait_seconds"]) == (0, 0.0)
    again = engine.send(
        list(first.all_token_ids) + text(3, 9), "p", max_tokens=2, request={"mm_features": [image]}
    )
    engine.run(again)
    assert status(engine, "p")["context_tokens"] == 354 + 9 + 2
    other = MultiModalFeatureSpec(
        data=image.data, modality="image", identifier="other image", mm_position=image.mm_position
    )
    engine.run(engine.send(prompt, "q", max_tokens=4, request={"mm_features": [other]}))
    shared = status(engine, "q")["shared_blocks"]
    assert shared == 20 // BLOCK  # the same placeholders stand for other content
