"""A real scheduler, KV-cache manager and block pool without a model: steps are driven by hand."""

from collections import deque
from pathlib import Path
from typing import Any

import torch
from vllm import SamplingParams
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from vllm_thunder.engine.scheduler import ProgramScheduler
from vllm_thunder.program.config import CONFIG_KEY
from vllm_thunder.program.turn import Turn

BLOCK = 16
EOS = 2


class Engine:
    """One scheduler, stepped by hand with a clock that only the test moves.

    ``blocks`` usable KV blocks of 16 tokens. Every request's next token is a function of its
    context, so that a recomputed context gives the same text.
    """

    def __init__(
        self,
        model: Path,
        *,
        blocks: int = 64,
        scheduler: type[AsyncScheduler] = ProgramScheduler,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 8192,
        groups: list[KVCacheGroupSpec] | None = None,
        scheduling: str = "fcfs",
        caching: bool = True,
        **settings: Any,
    ):
        self.now = 1000.0
        model_config = ModelConfig(model=str(model), dtype="float32", seed=0, max_model_len=8192)
        cache_config = CacheConfig(block_size=BLOCK, enable_prefix_caching=caching)
        config = VllmConfig(
            model_config=model_config,
            cache_config=cache_config,
            scheduler_config=SchedulerConfig(
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                max_model_len=8192,
                is_encoder_decoder=False,
                policy=scheduling,
            ),
            device_config=DeviceConfig("cpu"),
            additional_config={CONFIG_KEY: settings},
        )
        cache_config.num_gpu_blocks = blocks + 1
        if groups is None:
            spec = FullAttentionSpec(
                block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32
            )
            groups = [KVCacheGroupSpec(["layer"], spec)]
        self.scheduler: Any = scheduler(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(
                num_blocks=blocks + 1, kv_cache_tensors=[], kv_cache_groups=groups
            ),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
            hash_block_size=BLOCK,
            log_stats=True,
        )
        self.scheduler.clock = lambda: self.now
        hash_fn = get_hash_fn_by_name("sha256")
        init_none_hash(hash_fn)
        self._hasher = get_request_block_hasher(BLOCK, hash_fn) if caching else None
        self._ids = 0
        self.outstanding: deque[SchedulerOutput] = deque()

    @property
    def pool(self):
        return self.scheduler.kv_cache_manager.block_pool

    @property
    def free_blocks(self) -> int:
        return self.pool.get_num_free_blocks()

    def program(self, program_id: str):
        return self.scheduler.table.get(program_id)

    def request(
        self,
        tokens: list[int],
        program_id: str | None = None,
        *,
        max_tokens: int = 1,
        turn_id: str | None = None,
        request: dict[str, Any] | None = None,
        sampling: dict[str, Any] | None = None,
        **turn: Any,
    ) -> Request:
        """A request with this prompt that the scheduler does not know yet."""
        self._ids += 1
        request_id = f"r{self._ids}"
        made = Request(
            request_id=request_id,
            prompt_token_ids=list(tokens),
            sampling_params=SamplingParams(
                max_tokens=max_tokens, ignore_eos=True, **(sampling or {})
            ),
            pooling_params=None,
            block_hasher=self._hasher,
            program=None
            if program_id is None
            else Turn(program_id=program_id, turn_id=turn_id or request_id, **turn),
            **(request or {}),
        )
        made.sampling_params.update_from_generation_config({}, EOS)
        return made

    def send(self, tokens: list[int], program_id: str | None = None, **kwargs: Any) -> Request:
        """Add one request with this prompt; see :meth:`request`."""
        made = self.request(tokens, program_id, **kwargs)
        self.scheduler.add_request(made)
        return made

    def schedule(self) -> SchedulerOutput:
        """One scheduling step whose output is outstanding until :meth:`update`."""
        output = self.scheduler.schedule()
        self.outstanding.append(output)
        return output

    def update(self) -> dict[str, list[int]]:
        """The oldest outstanding step's output arrives; new tokens by request id."""
        scheduled = self.outstanding.popleft()
        ids = list(scheduled.num_scheduled_tokens)
        sampled = []
        for request_id in ids:
            request = self.scheduler.requests.get(request_id)
            done = request is not None and not request.is_prefill_chunk
            sampled.append([self._next_token(request)] if done else [])
        outputs = self.scheduler.update_from_output(
            scheduled,
            ModelRunnerOutput(
                req_ids=ids,
                req_id_to_index={request_id: i for i, request_id in enumerate(ids)},
                sampled_token_ids=sampled,
            ),
        )
        return {
            output.request_id: output.new_token_ids
            for core in outputs.values()
            for output in core.outputs
        }

    def step(self, seconds: float = 0.0) -> dict[str, list[int]]:
        """Schedule and update once, then let ``seconds`` pass."""
        self.schedule()
        result = self.update()
        self.now += seconds
        return result

    def run(self, *requests: Request, steps: int = 200) -> None:
        """Step until the requests (default: all) have ended."""
        for _ in range(steps):
            waiting_for = requests or tuple(self.scheduler.requests.values())
            if all(r.is_finished() for r in waiting_for):
                return
            self.step(0.01)
        raise AssertionError(f"not finished after {steps} steps: {waiting_for}")

    def turn(self, tokens: list[int], program_id: str | None = None, **kwargs: Any) -> list[int]:
        """Send, run to the end, return the whole context."""
        request = self.send(tokens, program_id, **kwargs)
        self.run(request)
        return list(request.all_token_ids)

    def abort(self, *requests: Request) -> None:
        self.scheduler.finish_requests(
            [r.request_id for r in requests], RequestStatus.FINISHED_ABORTED
        )

    def check(self) -> None:
        self.scheduler.check_integrity()

    @staticmethod
    def _next_token(request: Request) -> int:
        return 10 + sum(request.all_token_ids[-8:]) % 900


def text(start: int, length: int) -> list[int]:
    """A prompt whose blocks are its own: equal starts give equal prefixes."""
    return [10 + (start * 7919 + i * 31) % 900 for i in range(length)]
