"""Patch 0004: vLLM's real scheduler gives away the blocks of any running request that is chosen."""

import random
from collections.abc import Callable, Container
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.config import SpeculativeConfig
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from tests.engine.harness import BLOCK, text
from tests.engine.worker import WorkedEngine, answer, attention, sliding_window
from vllm_thunder.patching.installed import find_installation
from vllm_thunder.replay.tiny_model import build_tiny_model

Choice = Callable[["ChoosingScheduler", Request, Container[str]], Request]


class ChoosingScheduler(AsyncScheduler):
    """Gives away what ``choice`` says, and keeps what it was asked."""

    choice: Choice

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        #: Per choice: (the victim, the request that needs blocks), as positions in ``running``.
        self.chosen: list[tuple[int, int]] = []

    def _choose_preemption_victim(self, request: Request, pinned: Container[str]) -> Request:
        victim = self.choice(request, pinned)
        self.chosen.append((self.running.index(victim), self.running.index(request)))
        return victim


def choosing(choice: Choice) -> type[ChoosingScheduler]:
    return type("Choosing", (ChoosingScheduler,), {"choice": choice})


def drafting(scheduler: Any, drafts: int) -> Any:
    """The scheduler class, configured for so many speculative tokens."""

    def make(vllm_config: Any, **kwargs: Any) -> Any:
        if drafts:
            vllm_config.speculative_config = SpeculativeConfig(
                method="ngram", num_speculative_tokens=drafts, prompt_lookup_max=2
            )
        return scheduler(vllm_config=vllm_config, **kwargs)

    return make


def released(path: str, **names: Any) -> ModuleType:
    """A file of vLLM as it was released, without our patches, as a module of another name that
    has ``names`` in place of what it imports under them."""
    installation = find_installation()
    assert installation is not None
    source = (installation.root / path).read_text()
    for name in names:
        lines = [line for line in source.splitlines() if line.endswith(f" import {name}")]
        assert len(lines) == 1
        source = source.replace(lines[0], "")
    module = ModuleType("released_" + Path(path).stem)
    vars(module).update(names)
    exec(compile(source, path, "exec"), vars(module))
    return module


@pytest.fixture(scope="module")
def stock() -> Any:
    """vLLM's AsyncScheduler without our patches."""
    scheduler = released("vllm/v1/core/sched/scheduler.py").Scheduler
    assert not hasattr(scheduler, "_choose_preemption_victim")
    path = "vllm/v1/core/sched/async_scheduler.py"
    return released(path, Scheduler=scheduler).AsyncScheduler


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("model"))


LOADS = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**32),
        "blocks": st.integers(10, 40),
        "requests": st.integers(2, 12),
        "max_num_batched_tokens": st.integers(16, 200),
        "chunk": st.sampled_from([0, 16, 32, 48]),
        "depth": st.integers(1, 2),
        "drafts": st.integers(0, 3),
        "scheduling": st.sampled_from(["fcfs", "priority"]),
        "window": st.booleans(),
    }
)


class Load:
    """A random load on an engine that is too small for it, the same for every scheduler."""

    def __init__(self, model: Path, scheduler: Any, load: dict[str, Any], **kwargs: Any):
        self.dice = random.Random(load["seed"])
        self.depth = load["depth"]
        self.budget = load["max_num_batched_tokens"] + 16 * load["drafts"]
        self.engine = WorkedEngine(
            model,
            scheduler=drafting(scheduler, load["drafts"]),
            drafts=load["drafts"],
            blocks=load["blocks"],
            max_num_seqs=16,
            max_num_batched_tokens=self.budget,
            scheduling=load["scheduling"],
            groups=[attention(), sliding_window()] if load["window"] else None,
            **kwargs,
        )
        # Prompts that are computed side by side, chunk by chunk.
        self.engine.scheduler.scheduler_config.long_prefill_token_threshold = load["chunk"]
        # Each group of layers keeps blocks of its own.
        room = load["blocks"] // (2 if load["window"] else 1) - 2
        self.left = load["requests"]
        self.longest = room * BLOCK - 8
        self.sent: dict[str, tuple[list[int], int]] = {}

    def send(self) -> None:
        dice = self.dice
        self.left -= 1
        length = dice.randint(1, self.longest * 2 // 3)
        # Few different texts: a block that wrongly stayed in the prefix cache is soon hit.
        prompt = text(dice.randrange(3), length)
        answered = dice.randint(1, min(60, self.longest - length))
        priority = {"priority": dice.randrange(3), "arrival_time": float(self.left)}
        request = self.engine.send(prompt, max_tokens=answered, request=priority)
        self.sent[request.request_id] = (prompt, answered)

    def step(self) -> SchedulerOutput:
        while self.left and (not self.unfinished or self.dice.random() < 0.4):
            self.send()
        output = self.engine.schedule()
        if len(self.engine.outstanding) >= self.depth:
            self.engine.update()
        return output

    @property
    def unfinished(self) -> int:
        return self.engine.scheduler.get_num_unfinished_requests()

    @property
    def going_on(self) -> bool:
        return bool(self.left or self.unfinished)

    def end(self) -> None:
        """Every client has the whole text that an engine with memory enough gives."""
        while self.engine.outstanding:
            self.engine.update()
        for request_id, (prompt, answered) in self.sent.items():
            expected = answer(prompt, answered)
            assert self.engine.received[request_id] == expected, request_id
        assert self.engine.free_blocks == self.engine.pool.num_gpu_blocks - 1


def check_conservation(engine: WorkedEngine) -> None:
    """Every block is free or in the table of a running request."""
    managers = engine.scheduler.kv_cache_manager.coordinator.single_type_managers
    tables = [item for manager in managers for item in manager.req_to_blocks.items() if item[1]]
    used = {block.block_id for _, blocks in tables for block in blocks if not block.is_null}
    assert len(used) + engine.free_blocks == engine.pool.num_gpu_blocks - 1
    running = {request.request_id for request in engine.scheduler.running}
    assert {request_id for request_id, _ in tables} <= running


def is_ordered_part(part: list[str], whole: list[str]) -> bool:
    rest = iter(whole)
    return all(name in rest for name in part)


def random_victim(seed: int) -> Choice:
    dice = random.Random(seed)

    def choice(scheduler: ChoosingScheduler, request: Request, pinned: Container[str]) -> Request:
        return dice.choice(scheduler.running)

    return choice


def play(model: Path, load: dict[str, Any]) -> set[str]:
    """Play a load to its end with random victims; which kinds of victims there were."""
    played = Load(model, choosing(random_victim(load["seed"])), load)
    engine, scheduler = played.engine, played.engine.scheduler
    steps = 0
    while played.going_on:
        before = [request.request_id for request in scheduler.running]
        output = played.step()
        after = [request.request_id for request in scheduler.running]
        assert is_ordered_part([name for name in after if name in before], before)
        assert output.total_num_scheduled_tokens == sum(output.num_scheduled_tokens.values())
        assert output.total_num_scheduled_tokens <= played.budget
        assert output.scheduled_spec_decode_tokens.keys() <= output.num_scheduled_tokens.keys()
        check_conservation(engine)
        steps += 1
        assert steps < 5000, "no progress"
    played.end()
    return {
        "before" if victim < request else "itself" if victim == request else "after"
        for victim, request in scheduler.chosen
    }


def test_any_victim_is_right(model: Path) -> None:
    seen: set[str] = set()

    @settings(max_examples=150, deadline=None)
    @given(LOADS)
    def every_load(load: dict[str, Any]) -> None:
        seen.update(play(model, load))

    every_load()
    assert seen == {"before", "itself", "after"}, "the loads are too small to tell"


def decisions(output: SchedulerOutput) -> list[Any]:
    cached = output.scheduled_cached_reqs
    return [
        output.num_scheduled_tokens,
        [(new.req_id, new.block_ids, new.num_computed_tokens) for new in output.scheduled_new_reqs],
        (cached.req_ids, cached.new_block_ids, cached.num_computed_tokens),
        cached.resumed_req_ids,
        output.scheduled_spec_decode_tokens,
        output.preempted_req_ids,
        output.finished_req_ids,
    ]


def test_the_default_choice_is_stocks(model: Path, stock: Any) -> None:
    preemptions = 0

    @settings(max_examples=60, deadline=None)
    @given(LOADS)
    def every_load(load: dict[str, Any]) -> None:
        nonlocal preemptions
        # Stock's priority mode leaves blocks in the prefix cache that nobody computed: see below.
        caching = load["scheduling"] == "fcfs"
        theirs, ours = (
            Load(model, scheduler, load, caching=caching) for scheduler in (stock, AsyncScheduler)
        )
        while theirs.going_on:
            made = theirs.step()
            assert decisions(ours.step()) == decisions(made)
            assert [r.request_id for r in ours.engine.scheduler.running] == [
                r.request_id for r in theirs.engine.scheduler.running
            ]
            assert ours.engine.free_blocks == theirs.engine.free_blocks
            preemptions += len(made.preempted_req_ids or ())
        assert not ours.going_on
        theirs.end()
        ours.end()

    every_load()
    assert preemptions > 20, "the loads are too small to tell"


class Scene:
    """Two requests fill ten blocks, and the second needs one more in a step in which the first
    computes its seventh and eighth."""

    def __init__(self, model: Path, scheduler: Any, **kwargs: Any):
        self.engine = WorkedEngine(
            model, scheduler=scheduler, blocks=10, max_num_batched_tokens=4 * BLOCK, **kwargs
        )
        self.engine.scheduler.scheduler_config.long_prefill_token_threshold = 2 * BLOCK

    def play(self, **request: Any) -> SchedulerOutput:
        """Up to the step; ``request``: fields of the first one."""
        engine = self.engine
        self.prompt = text(1, 9 * BLOCK)
        fields = {"priority": 1, "arrival_time": 0.0, **request}
        self.first = engine.send(self.prompt, max_tokens=2, request=fields)
        engine.step()
        urgent = {"priority": -1, "arrival_time": 1.0}
        self.second = engine.send(text(2, 2 * BLOCK), max_tokens=5, request=urgent)
        engine.step()
        assert self.first.num_computed_tokens == 6 * BLOCK
        assert engine.scheduler.running == [self.first, self.second]
        output = engine.schedule()
        engine.update()
        return output


def the_first(scheduler: ChoosingScheduler, request: Request, pinned: Container[str]) -> Request:
    return scheduler.running[0]


@pytest.mark.parametrize(
    ("scheduler", "scheduling"),
    [(choosing(the_first), "fcfs"), (AsyncScheduler, "priority")],
    ids=["chosen", "priority"],
)
def test_what_was_taken_back_is_not_hit(model: Path, scheduler: Any, scheduling: str) -> None:
    scene = Scene(model, scheduler, scheduling=scheduling)
    output = scene.play()
    assert output.num_scheduled_tokens == {scene.second.request_id: 1}
    assert scene.engine.scheduler.running == [scene.second]
    resumed = []
    while not scene.first.is_finished():
        cached = scene.engine.schedule().scheduled_cached_reqs
        scene.engine.update()
        if cached.resumed_req_ids:
            resumed += zip(cached.req_ids, cached.num_computed_tokens, strict=True)
    assert resumed == [(scene.first.request_id, 6 * BLOCK)], "the computed blocks are still there"
    assert scene.engine.received[scene.first.request_id] == answer(scene.prompt, 2)


def test_stock_hits_it(model: Path, stock: Any) -> None:
    """Why the patch takes entries back; when this fails vLLM does it itself."""
    scene = Scene(model, stock, scheduling="priority")
    scene.play()
    with pytest.raises(AssertionError, match="does not hold tokens"):
        scene.engine.run()


def test_the_next_request_gets_the_tokens_that_were_taken_back(model: Path) -> None:
    engine = WorkedEngine(
        model, scheduler=choosing(the_first), blocks=7, max_num_seqs=8, max_num_batched_tokens=32
    )
    engine.scheduler.scheduler_config.long_prefill_token_threshold = BLOCK
    first = engine.send(text(1, 6 * BLOCK))
    engine.step()
    second = engine.send(text(2, BLOCK - 1), max_tokens=4)
    third = engine.send(text(3, 3 * BLOCK))
    engine.step()
    engine.step()
    assert [r.num_computed_tokens for r in (first, second, third)] == [4 * BLOCK, BLOCK, BLOCK]
    output = engine.schedule()
    engine.update()
    assert engine.scheduler.chosen == [(0, 1)]
    expected = {second.request_id: 1, third.request_id: BLOCK}  # 15 of the 32 without them
    assert output.num_scheduled_tokens == expected
    engine.run()
    assert engine.received[first.request_id] == answer(text(1, 6 * BLOCK), 1)


def asked(model: Path, *, mamba: bool = False, **request: Any) -> tuple[Scene, list[set[str]]]:
    """The scene with stock's choice, and which of its requests were pinned at the choice."""
    pinned_ones = []

    def last(scheduler: ChoosingScheduler, request: Request, pinned: Container[str]) -> Request:
        pinned_ones.append({r.request_id for r in scheduler.running if r.request_id in pinned})
        return scheduler.running[-1]

    scene = Scene(model, choosing(last))
    scheduler = scene.engine.scheduler
    scheduler.has_mamba_layers = mamba
    scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=100)
    scheduler.max_num_encoder_input_tokens = 100
    scene.play(**request)
    return scene, pinned_ones


def test_encoder_inputs_of_the_step_are_pinned(model: Path) -> None:
    def image(offset: int) -> dict[str, Any]:
        position = PlaceholderRange(offset=offset, length=8)
        return {"mm_features": [MultiModalFeatureSpec(None, "image", "an image", position)]}

    scene, pinned = asked(model, **image(7 * BLOCK))
    assert pinned == [{scene.first.request_id}]
    _, pinned = asked(model, **image(5 * BLOCK))
    assert pinned == [set()], "its encoder ran in an earlier step"


def test_states_of_the_step_are_pinned(model: Path) -> None:
    scene, pinned = asked(model, mamba=True)
    assert pinned == [{scene.first.request_id}]
    _, pinned = asked(model)
    assert pinned == [set()]


def test_a_victim_whose_blocks_cannot_be_freed_yet_stays(model: Path) -> None:
    scheduler = choosing(the_first)
    scheduler._request_blocks_can_be_freed = lambda self, request: False
    scene = Scene(model, scheduler)
    output = scene.play()
    assert output.num_scheduled_tokens == {scene.first.request_id: 2 * BLOCK}
    assert scene.engine.scheduler.running == [scene.first, scene.second]
    assert not output.preempted_req_ids
