"""Which blocks are reused, in which order: rule 2 of the design, block by block."""

import random

import pytest
from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from tests.engine.harness import BLOCK, text
from vllm_thunder.engine.free_queue import EvictionClass

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def cached_ids(engine, context):
    """Block ids of a context's cached blocks, prefix first."""
    request = engine.send(context)  # unlabelled: only looked up, then aborted
    blocks, _, _ = engine.scheduler.kv_cache_manager.get_computed_blocks(request)
    engine.abort(request)
    engine.step()
    return [block.block_id for block in blocks.blocks[0]]


def reuse_order(engine):
    engine.pool.free_block_queue.now = engine.now
    return [block.block_id for block in engine.pool.free_block_queue.get_all_free_blocks()]


def pause(engine, program_id):
    program = engine.program(program_id)
    engine.scheduler.program_policy.withdraw(program)
    engine.pool.free_block_queue.program_paused(program)


def test_without_programs_the_order_is_vllms(make_engine):
    """The same random traffic through both pools: the same free list after every step."""
    ours, stock = make_engine(blocks=40), make_engine(blocks=40, scheduler=AsyncScheduler)
    rng = random.Random(5)
    live = []
    for _ in range(300):
        action = rng.random()
        if action < 0.4:
            prompt = text(rng.randrange(6), rng.randrange(5, 200))
            tokens = rng.randrange(1, 40)
            live.append([e.send(prompt, max_tokens=tokens) for e in (ours, stock)])
        elif action < 0.5 and live:
            pair = live.pop(rng.randrange(len(live)))
            ours.abort(pair[0])
            stock.abort(pair[1])
        assert ours.step() == stock.step()
        assert reuse_order(ours) == [
            block.block_id for block in stock.pool.free_block_queue.get_all_free_blocks()
        ]


def test_blank_blocks_first_then_spent_then_paused_then_by_age_then_shared(make_engine):
    engine = make_engine(blocks=64)
    prefix = text(1, 3 * BLOCK)
    contexts = {
        name: engine.turn(prefix + text(seed, length), name)
        for name, seed, length in [("long", 2, 170), ("short", 3, 60), ("acting", 4, 90)]
    }
    engine.now += 1
    plain = engine.turn(text(9, 70))
    ids = {name: cached_ids(engine, context) for name, context in contexts.items()}
    plain_ids = cached_ids(engine, plain)
    shared = ids["long"][:3]
    assert shared == ids["short"][:3] == ids["acting"][:3]
    pause(engine, "long")
    pause(engine, "short")
    order = reuse_order(engine)
    live = [*ids["short"][3:][::-1], *ids["long"][3:][::-1], *ids["acting"][3:][::-1]]
    # The unlabelled blocks are younger than the acting program's, whose age is discounted.
    assert order[-len(live) - len(plain_ids) - 3 :] == [*live, *plain_ids[::-1], *shared[::-1]]
    blank = order[: -len(live) - len(plain_ids) - 3]
    assert all(engine.pool.blocks[i].block_hash is None for i in blank)


def test_released_programs_blocks_are_reused_before_live_ones(make_engine):
    engine = make_engine(blocks=32)
    gone = engine.turn(text(1, 100), "gone")
    engine.turn(text(2, 100), "kept")
    gone_ids = cached_ids(engine, gone)
    engine.scheduler.release_program("gone")
    blank = [i for i in reuse_order(engine) if engine.pool.blocks[i].block_hash is None]
    order = reuse_order(engine)
    assert set(order[: len(gone_ids)]) == set(gone_ids)
    assert set(order[len(gone_ids) : len(gone_ids) + len(blank)]) == set(blank)


def test_superseded_blocks_go_first(make_engine):
    """The client rewrote the last answer: its old blocks will never be hit again."""
    engine = make_engine(blocks=32)
    first = engine.turn(text(1, 6 * BLOCK + 3), "p", max_tokens=40)
    old = cached_ids(engine, first)
    rewritten = first[: 6 * BLOCK] + text(7, 4 * BLOCK)
    second = engine.turn(rewritten, "p")
    kept = cached_ids(engine, second)
    superseded = [i for i in old if i not in kept]
    assert superseded
    assert set(reuse_order(engine)[: len(superseded)]) == set(superseded)
    assert engine.program("p").unique_blocks == len(kept)


def test_an_aborted_prompt_supersedes_nothing(make_engine):
    engine = make_engine(blocks=64, max_num_batched_tokens=64)
    context = engine.turn(text(1, 300), "p")
    before = engine.program("p").unique_blocks
    request = engine.send(text(5, 500), "p")
    engine.step()
    engine.abort(request)
    engine.step()
    assert engine.program("p").unique_blocks >= before
    assert len(cached_ids(engine, context)) == before


def test_paused_tail_goes_first_and_leaves_a_reusable_prefix(make_engine):
    engine = make_engine(blocks=20)
    context = engine.turn(text(1, 12 * BLOCK), "p")
    pause(engine, "p")
    engine.turn(text(2, 10 * BLOCK))
    left = cached_ids(engine, context)
    assert 0 < len(left) < 12
    assert engine.program("p").resident_blocks == len(left)
    assert engine.pool.free_block_queue.evicted[EvictionClass.PAUSED] == 12 - len(left)


def test_shortest_paused_program_is_evicted_first(make_engine):
    engine = make_engine(blocks=30)
    contexts = {n: engine.turn(text(i, n * BLOCK), f"p{n}") for i, n in enumerate((9, 5, 7))}
    for n in contexts:
        pause(engine, f"p{n}")
    engine.turn(text(20, 13 * BLOCK))
    left = {n: len(cached_ids(engine, c)) for n, c in contexts.items()}
    assert left[9] == 9
    assert left[5] < 5
    assert left[5] == 0 or left[7] == 7


def test_restored_program_counts_as_new(make_engine):
    engine = make_engine(blocks=40)
    a = cached_ids(engine, engine.turn(text(1, 80), "a"))
    engine.now += 1
    b = cached_ids(engine, engine.turn(text(2, 80), "b"))
    pause(engine, "a")
    engine.now += 1
    assert reuse_order(engine)[-len(a) - len(b) :] == [*a[::-1], *b[::-1]]
    engine.scheduler._activate(engine.program("a"), engine.now)
    engine.pool.free_block_queue.now = engine.now
    assert reuse_order(engine)[-len(a) - len(b) :] == [*b[::-1], *a[::-1]]


def test_age_of_acting_blocks_is_discounted_by_the_decay_score(make_engine):
    """Younger than the half-life an acting program outlives older unlabelled blocks; later not."""
    engine = make_engine(blocks=40, acting_half_life=10.0)
    acting = cached_ids(engine, engine.turn(text(1, 64), "p"))
    engine.now += 2.0
    plain = cached_ids(engine, engine.turn(text(2, 64)))
    engine.now += 2.0
    # 4 s of acting count as 4 * (1 - 2^-0.4) = 0.97 s, the unlabelled blocks are 2 s old.
    assert reuse_order(engine)[-8:] == [*plain[::-1], *acting[::-1]]
    engine.now += 100.0
    assert reuse_order(engine)[-8:] == [*acting[::-1], *plain[::-1]]


def test_spare_copies_of_one_content_go_first(make_engine):
    engine = make_engine(blocks=40)
    prompt = text(1, 5 * BLOCK)
    first, second = engine.send(prompt, "a"), engine.send(prompt, "b")
    engine.run(first, second)
    assert engine.program("a").shared_blocks == engine.program("b").shared_blocks
    tail = reuse_order(engine)[-5:]
    assert len({engine.pool.blocks[i].block_hash for i in tail}) == 5


def test_what_a_released_program_shared_is_reused_from_its_end(make_engine):
    """The survivor keeps a prefix that can be hit, not blocks behind a gap."""
    engine = make_engine(blocks=64)
    prefix = text(1, 6 * BLOCK)
    engine.turn(prefix + text(2, 3 * BLOCK), "survivor")
    engine.turn(prefix + text(3, 3 * BLOCK), "released")
    shared = cached_ids(engine, [*prefix, 1])
    assert len(shared) == 6
    engine.scheduler.release_program("released")
    order = reuse_order(engine)
    assert order[-6:] == shared[::-1]


def test_reset_prefix_cache_drops_residency_and_programs_go_on(make_engine):
    engine = make_engine(blocks=40)
    context = engine.turn(text(1, 100), "p")
    assert engine.program("p").resident_blocks > 0
    assert engine.scheduler.reset_prefix_cache()
    assert engine.program("p").resident_blocks == 0
    engine.check()
    engine.turn(context + text(2, 20), "p")
    assert engine.program("p").resident_blocks > 0


def test_nothing_is_pinned(make_engine):
    """Every block of acting programs can be taken by an unlabelled request at once."""
    engine = make_engine(blocks=32)
    for i in range(4):
        engine.turn(text(i, 120), f"p{i}")
    request = engine.send(text(9, 31 * BLOCK))
    engine.step()
    assert request.is_finished()


@pytest.mark.parametrize("seed", range(8))
def test_random_histories_keep_the_books(make_engine, seed):
    """Shared prefixes, rewrites, aborts, preemption, pauses, releases, resets."""
    rng = random.Random(seed)
    engine = make_engine(blocks=48, max_num_batched_tokens=128)
    contexts: dict[str, list[int]] = {}
    live = {}
    for _ in range(400):
        action = rng.random()
        name = f"p{rng.randrange(8)}"
        if action < 0.25 and name not in live:
            context = contexts.get(name) or text(0, 40)
            if rng.random() < 0.2:
                context = context[: len(context) // 2]
            context = (context + text(rng.randrange(99), rng.randrange(60)))[:500]
            live[name] = engine.send(context, name, max_tokens=rng.randrange(1, 30))
        elif action < 0.3:
            engine.send(text(rng.randrange(3), rng.randrange(1, 300)), max_tokens=5)
        elif action < 0.35 and live:
            engine.abort(live.pop(rng.choice(list(live))))
        elif action < 0.38:
            engine.scheduler.release_program(name)
        elif action < 0.40:
            engine.scheduler.reset_prefix_cache(reset_running_requests=rng.random() < 0.5)
        elif (
            action < 0.45
            and (program := engine.program(name)) in engine.scheduler.program_policy.acting
        ):
            engine.scheduler.program_policy.withdraw(program)
            engine.pool.free_block_queue.program_paused(program)
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
    assert len(engine.scheduler.table) == 0
    assert len(engine.pool.ledger) == 0
    assert engine.free_blocks == 48
