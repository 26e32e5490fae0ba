"""Random traffic on engines of all kinds.

The examples are the same ones in every run; ``TRAFFIC_EXAMPLES=5000`` hunts among new ones.
"""

import os

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.engine.harness import BLOCK
from tests.engine.traffic import Traffic, Variant
from tests.engine.worker import attention, sliding_window, state_space
from vllm_thunder.program.config import POLICIES

HUNT = int(os.environ.get("TRAFFIC_EXAMPLES", "0"))

VARIANTS = {
    **{policy: Variant(engine={"policy": policy, "max_wait": 5.0}) for policy in POLICIES},
    "one step outstanding": Variant(outstanding=1),
    "tight memory": Variant(blocks=14, engine={"max_num_batched_tokens": 48, "max_num_seqs": 16}),
    "prompts in chunks": Variant(
        blocks=28, engine={"chunk": 40, "max_num_batched_tokens": 128, "max_num_seqs": 16}
    ),
    "watermarks": Variant(
        engine={"high_watermark": 0.6, "low_watermark": 0.5, "idle_grace": 0.0, "max_programs": 2}
    ),
    "few slots": Variant(engine={"max_num_seqs": 2, "max_wait": 2.0}),
    "vLLM priorities": Variant(blocks=24, engine={"scheduling": "priority"}),
    "sliding window": Variant(
        blocks=50,
        groups=lambda: [attention(), sliding_window()],
        engine={"max_num_batched_tokens": 96, "max_num_seqs": 16},
    ),
    "copy on write": Variant(
        blocks=50,
        groups=lambda: [attention(2 * BLOCK), state_space(2 * BLOCK)],
        engine={"max_num_batched_tokens": 96, "max_num_seqs": 16, "block_size": 2 * BLOCK},
    ),
    "speculative": Variant(
        blocks=24, drafts=3, engine={"max_num_batched_tokens": 64, "max_num_seqs": 16}
    ),
    "adapters": Variant(blocks=24, adapters=1),
    "deferred frees": Variant(blocks=24, defer_frees=True),
    "all at once": Variant(
        blocks=60,
        groups=lambda: [attention(), sliding_window()],
        drafts=2,
        adapters=2,
        defer_frees=True,
        engine={"chunk": 40, "max_num_batched_tokens": 128, "max_num_seqs": 8, "max_wait": 3.0},
    ),
    "no prefix cache": Variant(blocks=24, engine={"caching": False}),
}


@pytest.mark.timeout(0 if HUNT else 120)
@pytest.mark.parametrize("name", VARIANTS)
def test_random_traffic(tiny_model, name):
    run_state_machine_as_test(
        lambda: Traffic(tiny_model, VARIANTS[name]),
        settings=settings(
            max_examples=HUNT or 25,
            stateful_step_count=60,
            deadline=None,
            derandomize=not HUNT,
            database=None,
            report_multiple_bugs=False,
            # Shrinking takes minutes: a hunt has them.
            phases=[Phase.generate, Phase.shrink] if HUNT else [Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )
