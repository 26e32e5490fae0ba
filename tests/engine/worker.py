"""A model runner without a model: it checks that the scheduler's block tables hold what they must.

What stands in a slot of KV memory is named by a hash of all tokens up to it (and of the LoRA
adapter, the KV-cache group and the weights): attention is right if every slot that a step reads
has the name that the request's own tokens give it. So a block that was reused too early, hit
under a wrong hash or lost by a preemption is seen at once, and so is a text that differs.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.config import LoRAConfig, SpeculativeConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
    get_kv_cache_spec_sliding_window,
)
from vllm.v1.outputs import ModelRunnerOutput

from tests.engine.harness import BLOCK, Engine
from vllm_thunder.engine.scheduler import ProgramScheduler

WINDOW = 4 * BLOCK


def next_token(tokens: list[int]) -> int:
    """The model: the token that follows, a function of the last eight."""
    return 10 + sum(tokens[-8:]) % 900


def answer(prompt: list[int], length: int) -> list[int]:
    """The ``length`` tokens that the model says after ``prompt``."""
    tokens = list(prompt)
    for _ in range(length):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def attention(block_size: int = BLOCK) -> KVCacheGroupSpec:
    spec = FullAttentionSpec(
        block_size=block_size, num_kv_heads=1, head_size=1, dtype=torch.float32
    )
    return KVCacheGroupSpec(["full"], spec)


def sliding_window(block_size: int = BLOCK) -> KVCacheGroupSpec:
    spec = SlidingWindowSpec(
        block_size=block_size,
        num_kv_heads=1,
        head_size=1,
        dtype=torch.float32,
        sliding_window=WINDOW,
    )
    return KVCacheGroupSpec(["window"], spec)


def state_space(block_size: int) -> KVCacheGroupSpec:
    """Keeps a state at some block boundaries, and at the end of a prompt inside a block."""
    spec = MambaSpec(
        block_size=block_size,
        shapes=((1,),),
        dtypes=(torch.float32,),
        mamba_cache_mode="align",
    )
    return KVCacheGroupSpec(["state"], spec)


def specialised(drafts: int, adapters: int, block_size: int, chunk: int) -> Any:
    """A scheduler class for a worker that drafts so many tokens and runs so many LoRA adapters.

    Prompts are computed ``chunk`` tokens at a time, so that several take turns; 0: as many as fit.
    Blocks larger than BLOCK are hashed in units of BLOCK: with a state-space group a prompt may
    then hit a part of a block, which is copied on write.
    """

    def make(vllm_config: Any, **kwargs: Any) -> ProgramScheduler:
        vllm_config.scheduler_config.long_prefill_token_threshold = chunk
        if drafts:
            vllm_config.speculative_config = SpeculativeConfig(
                method="ngram", num_speculative_tokens=drafts, prompt_lookup_max=2
            )
        if adapters:
            vllm_config.lora_config = LoRAConfig(max_loras=adapters)
        if block_size > BLOCK:
            vllm_config.cache_config.block_size = block_size
            vllm_config.cache_config.mamba_cache_mode = "align"
            kwargs["block_size"] = block_size
        return ProgramScheduler(vllm_config=vllm_config, **kwargs)

    return make


@dataclass
class _Sequence:
    """What the worker knows of one request."""

    tokens: list[int]
    seed: Any
    blocks: list[list[int]]
    computed: int = 0
    drafts: list[int] = field(default_factory=list)
    #: By KV-cache group, the names of slots 0, 1, ...: one per token, as far as they were needed.
    names: list[list[int]] = field(default_factory=list)

    def name_up_to(self, length: int, tokens: list[int]) -> list[list[int]]:
        for group_id, names in enumerate(self.names):
            name = names[-1] if names else hash((self.seed, group_id))
            for token in tokens[len(names) : length]:
                name = hash((name, token))
                names.append(name)
        return self.names

    def forget_names(self, start: int) -> None:
        for names in self.names:
            del names[start:]


class Worker:
    """Executes scheduled steps in order, ``drafts`` speculative tokens ahead."""

    def __init__(self, groups: list[KVCacheGroupSpec], drafts: int = 0):
        self._groups = groups
        specs = [group.kv_cache_spec for group in groups]
        # Block size and window of each group, in tokens.
        self._shapes = (
            [None if isinstance(spec, MambaSpec) else spec.block_size for spec in specs],
            [get_kv_cache_spec_sliding_window(spec) for spec in specs],
        )
        self._drafts = drafts
        self._memory: dict[int, list[Any]] = {}
        self._sequences: dict[str, _Sequence] = {}
        #: Counts weight updates: KV of other weights is wrong.
        self.weights = 0

    def execute(self, step: SchedulerOutput) -> dict[str, list[int]]:
        """The sampled tokens by request id; none for a prompt that is not yet computed."""
        for request_id in step.finished_req_ids:
            self._sequences.pop(request_id, None)
        for copy in step.kv_cache_block_copies or ():
            slots = self._memory.get(copy.src_block_id, [])  # empty: a state
            self._memory[copy.dst_block_id] = list(slots)
        self._learn(step)
        return {
            request_id: self._run(
                self._sequences[request_id],
                scheduled,
                len(step.scheduled_spec_decode_tokens.get(request_id, ())),
            )
            for request_id, scheduled in step.num_scheduled_tokens.items()
        }

    def _learn(self, step: SchedulerOutput) -> None:
        for new in step.scheduled_new_reqs:
            adapter = new.lora_request and new.lora_request.lora_name
            self._sequences[new.req_id] = _Sequence(
                tokens=list(new.prompt_token_ids or ()),
                seed=(adapter, self.weights),
                blocks=[list(ids) for ids in new.block_ids],
                computed=new.num_computed_tokens,
                names=[[] for _ in self._groups],
            )
        cached = step.scheduled_cached_reqs
        for request_id, new_blocks, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            known = self._sequences[request_id]
            if request_id in cached.all_token_ids:  # not in the step before: told anew
                known.tokens = list(cached.all_token_ids[request_id])
            if request_id in cached.resumed_req_ids:
                known.seed = (known.seed[0], self.weights)
                known.forget_names(0)
                known.blocks = [list(ids) for ids in new_blocks]
                known.computed = computed
                known.drafts = []
            else:
                for blocks, more in zip(known.blocks, new_blocks or (), strict=False):
                    blocks.extend(more)
            # The scheduler takes drafts for accepted until it has seen the output.
            assert known.computed <= computed <= known.computed + self._drafts

    def _run(self, request: _Sequence, scheduled: int, drafted: int) -> list[int]:
        start, known = request.computed, len(request.tokens)
        drafts = (request.drafts + [-1] * drafted)[:drafted]
        end = start + scheduled - drafted
        assert end <= known, "tokens are scheduled that nobody knows"
        assert end == known or not drafted
        request.forget_names(start)  # rejected drafts
        self._read(request, start)
        tokens = request.tokens + drafts
        self._write(request, start, start + scheduled, tokens)
        request.computed = end
        if end < known:
            return []
        sampled: list[int] = []
        for draft in [*drafts, None]:
            sampled.append(next_token(request.tokens))
            request.tokens.append(sampled[-1])
            if draft != sampled[-1]:
                break
            request.computed += 1
        request.drafts = self._draft(request.tokens)
        return sampled

    def _draft(self, tokens: list[int]) -> list[int]:
        """Right for one position in three, then a third of what is left, and so on."""
        ahead = answer(tokens, self._drafts)
        return [token + (sum(tokens) + i) % 3 % 2 for i, token in enumerate(ahead)]

    def _read(self, request: _Sequence, start: int) -> None:
        """Every slot that attention reads from before ``start`` holds the request's own content."""
        names_of = request.name_up_to(start, request.tokens)
        for names, blocks, size, window in zip(
            names_of, request.blocks, *self._shapes, strict=True
        ):
            if size is None:
                continue  # a state, not slots
            first = 0 if window is None else max(0, start + 1 - window)
            for offset in range(first - first % size, start, size):
                block_id = blocks[offset // size]
                low, high = max(first, offset), min(start, offset + size)
                held = self._memory.get(block_id, [])[low - offset : high - offset]
                assert held == names[low:high], (
                    f"block {block_id} does not hold tokens {low} to {high} of its request"
                )

    def _write(self, request: _Sequence, start: int, end: int, tokens: list[int]) -> None:
        names_of = request.name_up_to(end, tokens)
        for names, blocks, size, _ in zip(names_of, request.blocks, *self._shapes, strict=True):
            if size is None:
                continue
            for offset in range(start - start % size, end, size):
                block_id = blocks[offset // size]
                if not block_id:
                    continue  # the window passes it within this step
                low, high = max(start, offset), min(end, offset + size)
                slots = self._memory.setdefault(block_id, [])
                slots.extend([None] * (size - len(slots)))
                slots[low - offset : high - offset] = names[low:high]


class WorkedEngine(Engine):
    """An engine whose steps a :class:`Worker` executes; up to two may be outstanding."""

    def __init__(
        self,
        model: Any,
        *,
        drafts: int = 0,
        adapters: int = 0,
        block_size: int = BLOCK,
        chunk: int = 0,
        **kwargs: Any,
    ):
        kwargs.setdefault("scheduler", specialised(drafts, adapters, block_size, chunk))
        super().__init__(model, **kwargs)
        self.worker = Worker(self.scheduler.kv_cache_config.kv_cache_groups, drafts)
        self._sampled: list[dict[str, list[int]]] = []
        #: Tokens that clients have received, by request id.
        self.received: dict[str, list[int]] = {}

    def schedule(self) -> SchedulerOutput:
        output = super().schedule()
        self._sampled.append(self.worker.execute(output))
        return output

    def update(self) -> dict[str, list[int]]:
        scheduled = self.outstanding.popleft()
        sampled = self._sampled.pop(0)
        ids = list(sampled)
        outputs = self.scheduler.update_from_output(
            scheduled,
            ModelRunnerOutput(
                req_ids=ids,
                req_id_to_index={request_id: i for i, request_id in enumerate(ids)},
                sampled_token_ids=[list(sampled[request_id]) for request_id in ids],
            ),
        )
        news = {o.request_id: o.new_token_ids for core in outputs.values() for o in core.outputs}
        for request_id, tokens in news.items():
            self.received.setdefault(request_id, []).extend(tokens)
        return news

    def reset_prefix_cache(self, *, running: bool) -> bool:
        """As a weight update does it: KV that was computed before must not be read any more."""
        done = self.scheduler.reset_prefix_cache(reset_running_requests=running)
        self.worker.weights += done
        return done
