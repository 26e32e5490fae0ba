"""Sliding-window layers beside full attention: the books count the blocks that are there."""

import random

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec, SlidingWindowSpec

from tests.engine.harness import BLOCK, text

WINDOW = 4 * BLOCK


def hybrid_groups():
    common = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
    return [
        KVCacheGroupSpec(["full"], FullAttentionSpec(**common)),
        KVCacheGroupSpec(["window"], SlidingWindowSpec(**common, sliding_window=WINDOW)),
    ]


def test_a_context_claims_the_blocks_of_both_groups(make_engine):
    engine = make_engine(blocks=120, groups=hybrid_groups())
    assert engine.scheduler.blocks_of(20 * BLOCK) == 20 + 5
    context = engine.turn(text(1, 20 * BLOCK + 3), "p", max_tokens=4)
    program = engine.program("p")
    assert 20 < program.unique_blocks <= 40
    assert program.resident_blocks == program.unique_blocks
    request = engine.send(context + text(2, 30), "p")
    engine.run(request)
    engine.check()


def test_random_histories_keep_the_books_of_a_hybrid_model(make_engine):
    rng = random.Random(2)
    engine = make_engine(blocks=90, groups=hybrid_groups(), max_num_batched_tokens=96)
    contexts: dict[str, list[int]] = {}
    live = {}
    for _ in range(400):
        name = f"p{rng.randrange(5)}"
        if rng.random() < 0.3 and name not in live:
            context = (contexts.get(name) or text(0, 50)) + text(rng.randrange(50), 40)
            live[name] = engine.send(context[:600], name, max_tokens=rng.randrange(1, 20))
        elif rng.random() < 0.05 and live:
            engine.abort(live.pop(rng.choice(sorted(live))))
        elif rng.random() < 0.05:
            engine.scheduler.release_program(name)
        engine.step(rng.random() * 0.5)
        for name, request in list(live.items()):
            if request.is_finished():
                contexts[name] = list(request.all_token_ids)
                del live[name]
        engine.check()
    engine.run(steps=2000)
    for program in list(engine.scheduler.table):
        engine.scheduler.release_program(program.program_id)
    engine.check()
    assert engine.free_blocks == 90
    assert len(engine.pool.ledger) == 0
