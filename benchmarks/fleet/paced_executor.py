"""An executor for vLLM that computes nothing and takes the time that a model would take.

    vllm serve DIR --distributed-executor-backend benchmarks.fleet.paced_executor.PacedExecutor
                   --additional-config '{"paced": {"decode_seconds": 0.002}}'

No model is loaded and no KV is written. Scheduler, KV-cache manager, block pool, engine core, API
server and HTTP are vLLM's own, so that several engines can share a few CPU cores and each is still
as fast as one that is alone. A step sleeps for

    overhead_seconds + sum over its prompt tokens of (token_seconds + position_seconds * position)
                     + decode_seconds * its requests that only decode

The words of an answer follow from the prompt and the position alone: whoever computes a context
again gets the same text. They are whole words of the model's tokenizer, one token each also when
they come back in the next prompt, and never an end of text: answers end by ``max_tokens``. It
knows no grammars, log-probabilities, pooling or adapters.

It imports nothing of vllm_thunder: stock vLLM runs with it, too.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

from vllm.logger import init_logger
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheSpec
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput

from benchmarks.fleet.pace import Pace, Scheduled, Words, read_step

__all__ = ["PacedExecutor"]

logger = init_logger(f"vllm.{__name__}")  # below vLLM's: its level and handlers

#: The key of ``--additional-config`` with the fields of :class:`Pace`.
CONFIG_KEY = "paced"
_NO_LIMIT_BYTES = 1 << 30


class _Request(NamedTuple):
    prompt_tokens: int
    #: Of the prompt: what its answer follows from.
    key: int


class PacedExecutor(Executor):
    """See the module."""

    supported_tasks = ("generate",)

    def _init_executor(self) -> None:
        settings = self.vllm_config.additional_config
        self._pace = Pace(**dict(settings.get(CONFIG_KEY, {})))
        self._words = Words(Path(self.model_config.tokenizer))
        self._requests: dict[str, _Request] = {}
        logger.info("No model runs here: %s, %d words", self._pace, len(self._words))

    # -- a step ------------------------------------------------------------------------

    def execute_model(
        self, scheduler_output: SchedulerOutput, non_block: bool = False
    ) -> ModelRunnerOutput | Future[ModelRunnerOutput]:
        began = time.perf_counter()
        output = self._step(scheduler_output, began)
        if not non_block:
            return output
        future: Future[ModelRunnerOutput] = Future()
        future.set_result(output)
        return future

    def _step(self, output: SchedulerOutput, began: float) -> ModelRunnerOutput:
        for request_id in output.finished_req_ids:
            self._requests.pop(request_id, None)
        if not output.total_num_scheduled_tokens:
            return EMPTY_MODEL_RUNNER_OUTPUT
        scheduled = self._scheduled(output)
        sampled = [
            [self._words.token(self._requests[request_id].key, request.known)]
            if request.samples
            else []
            for request_id, request in scheduled.items()
        ]
        seconds = self._pace.seconds(read_step(list(scheduled.values())))
        time.sleep(max(began + seconds - time.perf_counter(), 0.0))
        return ModelRunnerOutput(
            req_ids=list(scheduled),
            req_id_to_index={request_id: index for index, request_id in enumerate(scheduled)},
            sampled_token_ids=sampled,
        )

    def _scheduled(self, output: SchedulerOutput) -> dict[str, Scheduled]:
        """The step's requests by their ids."""
        tokens = output.num_scheduled_tokens
        found: dict[str, Scheduled] = {}
        for new in output.scheduled_new_reqs:
            prompt = new.prompt_token_ids
            if prompt is None:
                raise ValueError(f"{new.req_id}: a prompt of embeddings cannot be paced")
            self._requests[new.req_id] = _Request(len(prompt), Words.key(prompt))
            # The second of vLLM's two model runners gets a resumed request as a new one.
            known = len(new.prefill_token_ids or prompt)
            found[new.req_id] = Scheduled(
                known, new.num_computed_tokens, tokens[new.req_id], known - len(prompt)
            )
        cached = output.scheduled_cached_reqs
        for request_id, computed, answered in zip(
            cached.req_ids, cached.num_computed_tokens, cached.num_output_tokens, strict=True
        ):
            known = self._requests[request_id].prompt_tokens + answered
            found[request_id] = Scheduled(known, computed, tokens[request_id], answered)
        return found

    def sample_tokens(
        self, grammar_output: GrammarOutput | None, non_block: bool = False
    ) -> ModelRunnerOutput | Future[ModelRunnerOutput]:
        raise RuntimeError("execute_model() has sampled already")

    # -- what the engine core asks for at its start ------------------------------------

    def get_kv_cache_specs(self) -> list[dict[str, KVCacheSpec]]:
        spec = FullAttentionSpec(
            block_size=self.cache_config.block_size,
            num_kv_heads=self.model_config.get_num_kv_heads(self.parallel_config),
            head_size=self.model_config.get_head_size(),
            dtype=self.model_config.dtype,
        )
        layers = self.model_config.get_num_layers(self.parallel_config)
        return [{f"model.layers.{layer}.self_attn.attn": spec for layer in range(layers)}]

    def get_supported_kv_cache_layouts(self) -> list[list[str]]:
        return [[KVCacheLayout.LBNHC.name]]

    def set_kv_cache_layout(self, layout_name: str) -> None:
        """Nothing is laid out."""

    def determine_available_memory(self) -> list[int]:
        return [self.cache_config.kv_cache_memory_bytes or _NO_LIMIT_BYTES]

    def initialize_from_config(self, kv_cache_configs: list[KVCacheConfig]) -> None:
        """Nothing is allocated."""

    def compile_or_warm_up_model(self) -> None:
        """There is no model."""

    # -- and later ---------------------------------------------------------------------

    def reset_mm_cache(self) -> None:
        """Nothing but text is cached."""

    def reset_encoder_cache(self) -> None:
        """There is no encoder."""

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
    ) -> list[Any]:
        raise RuntimeError(f"{method}: there is no worker that could do it")

    def check_health(self) -> None:
        """Nothing can fail."""

    def shutdown(self) -> None:
        """Nothing runs."""
