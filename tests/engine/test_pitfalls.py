"""Corners of vLLM's scheduler in which programs could go wrong."""

import random
import time

import pytest
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.request import RequestStatus

from tests.engine.harness import BLOCK, text
from vllm_thunder.engine.block_pool import ProgramBlockPool
from vllm_thunder.program.fcfs import FcfsPolicy


def test_connector_cleanup_is_not_confused_by_held_turns(make_engine):
    """With a connector vLLM compares its requests with its queues; held turns are in neither."""
    engine = make_engine(blocks=64)
    blocker = engine.send(text(1, 60 * BLOCK), "blocker", max_tokens=5)
    engine.step()
    engine.send(text(2, 60 * BLOCK), "p")
    engine.step()
    engine.scheduler.connector = object()
    assert engine.scheduler._held
    assert not engine.scheduler.has_finished_requests()
    engine.scheduler.connector = None
    engine.run(blocker)


def test_the_end_of_an_unlabelled_request_lets_held_turns_go_on(make_engine):
    engine = make_engine(blocks=64)
    plain = engine.send(text(1, 60 * BLOCK), max_tokens=5)
    engine.step()
    request = engine.send(text(2, 30 * BLOCK), "p")
    engine.step()
    assert engine.scheduler._held
    engine.run(plain)
    engine.step()
    assert not engine.scheduler._held
    engine.run(request)


def test_admission_counts_running_slots(make_engine):
    """More turns than slots: the rest is held where it can be ordered, not queued by arrival."""
    engine = make_engine(blocks=200, max_num_seqs=3)
    requests = [
        engine.send(text(i, (12 - i) * BLOCK), f"p{i}", max_tokens=4, priority=9 - i)
        for i in range(10)
    ]
    engine.step()
    assert len(engine.scheduler.running) == 3
    assert not engine.scheduler.waiting
    running = {r.request_id for r in engine.scheduler.running}
    assert running == {r.request_id for r in requests[-3:]}  # the most urgent class
    engine.run(*requests)


def test_deferred_frees_and_overlapping_steps_keep_the_books(make_engine):
    """Frees wait for the step in flight: the program is gone from the request by then."""
    engine = make_engine(blocks=48, max_num_batched_tokens=128)
    engine.scheduler.defer_block_free = True
    rng = random.Random(4)
    live = {}
    contexts: dict[str, list[int]] = {}
    for _ in range(300):
        name = f"p{rng.randrange(6)}"
        if rng.random() < 0.3 and name not in live:
            context = (contexts.get(name) or text(0, 60)) + text(rng.randrange(40), 30)
            live[name] = engine.send(context[:400], name, max_tokens=rng.randrange(1, 20))
        elif rng.random() < 0.1 and live:
            engine.abort(live.pop(rng.choice(sorted(live))))
        engine.schedule()
        engine.now += 0.05
        if len(engine.outstanding) == 2:
            engine.update()
        engine.scheduler.table.check_integrity()
        for name, request in list(live.items()):
            if request.is_finished():
                contexts[name] = list(request.all_token_ids)
                del live[name]
    engine.abort(*live.values())
    for _ in range(6):
        engine.schedule()
        while engine.outstanding:
            engine.update()
    for program in list(engine.scheduler.table):
        engine.scheduler.release_program(program.program_id)
    engine.check()
    assert engine.free_blocks == 48


def test_a_hit_changes_who_holds_a_paused_programs_block(make_engine):
    engine = make_engine(blocks=64)
    prompt = text(1, 8 * BLOCK)
    engine.turn(prompt + text(2, 10), "a")
    program = engine.program("a")
    engine.scheduler.program_policy.withdraw(program)
    engine.pool.free_block_queue.program_paused(program)
    before = program.unique_blocks
    engine.turn(prompt + text(3, 10), "b")
    assert program.unique_blocks == before - 8
    assert program.shared_blocks == engine.program("b").shared_blocks == 8
    tail = engine.pool.free_block_queue.get_all_free_blocks()[-8:]
    assert all(isinstance(engine.pool.ledger.holder(b.block_hash), set) for b in tail)


def test_unpinned_blocks_go_to_the_tail_and_unhashed_ones_to_the_front(make_engine):
    ours, stock = make_engine(blocks=20), make_engine(blocks=20, scheduler=AsyncScheduler)
    for engine in (ours, stock):
        engine.turn(text(1, 5 * BLOCK))
        taken = engine.pool.get_new_blocks(3)
        engine.pool.unpin_blocks(taken, on_reuse=lambda block: None)
        blank = engine.pool.get_new_blocks(2)
        engine.pool.free_blocks(blank)
    order = [b.block_id for b in ours.pool.free_block_queue.get_all_free_blocks()]
    assert order == [b.block_id for b in stock.pool.free_block_queue.get_all_free_blocks()]


def test_iteration_after_a_cursor_goes_on_in_reuse_order(make_engine):
    engine = make_engine(blocks=40)
    engine.turn(text(1, 80), "a")
    engine.turn(text(2, 80))
    queue = engine.pool.free_block_queue
    blocks = queue.get_all_free_blocks()
    for position in (0, 7, len(blocks) - 1):
        assert list(queue.iter_blocks_after(blocks[position])) == blocks[position + 1 :]


def test_pools_of_others_stay_vllms(make_engine):
    """CPU offload builds its own pool through the same coordinator: only ours is adopted."""
    engine = make_engine(blocks=20)
    other = make_engine(blocks=20, scheduler=AsyncScheduler)
    assert type(engine.pool) is ProgramBlockPool
    assert type(other.pool) is not ProgramBlockPool


def test_a_model_without_prefix_caching_is_scheduled_in_stock_order(make_engine):
    engine = make_engine(blocks=40, caching=False)
    assert type(engine.scheduler.program_policy) is FcfsPolicy
    requests = [engine.send(text(i, 200), f"p{i}", max_tokens=3) for i in range(6)]
    engine.step()
    assert not engine.scheduler._held
    engine.run(*requests)
    assert engine.free_blocks == 40


def test_fcfs_only_accounts(make_engine):
    ours = make_engine(blocks=30, policy="fcfs")
    stock = make_engine(blocks=30, scheduler=AsyncScheduler)
    rng = random.Random(8)
    for _ in range(60):
        prompt = text(rng.randrange(5), rng.randrange(10, 200))
        for engine in (ours, stock):
            engine.send(prompt, None if engine is stock else f"p{rng.randrange(4)}", max_tokens=6)
        outputs = ours.step(0.01), stock.step(0.01)
        assert outputs[0] == outputs[1]
    assert ours.scheduler.table.pauses == 0
    ours.run()


def test_priority_scheduling_of_vllm_still_works(make_engine):
    engine = make_engine(blocks=64, scheduling="priority")
    urgent = engine.send(text(1, 40), request={"priority": -1})
    normal = engine.send(text(2, 40), "p", request={"priority": 5})
    engine.run(urgent, normal)


def test_beams_come_one_request_at_a_time_and_are_one_turn(make_engine):
    """Beam search sends a request per beam and token, with nothing in flight in between."""
    engine = make_engine(blocks=64)
    context = text(1, 60)
    for token in range(5):
        beams = [
            engine.send([*context, 10 + token, 20 + b], "p", turn_id="beam", fans_out=True)
            for b in range(2)
        ]
        engine.run(*beams)
        assert engine.program("p").turns_done == 0
    engine.scheduler.programs("turn_end", "p", "beam")
    assert engine.program("p").turns_done == 1


def test_a_turn_id_that_comes_back_after_it_ended(make_engine):
    """/v1/responses with built-in tools: one HTTP call, engine requests one after another."""
    engine = make_engine(blocks=64)
    engine.turn(text(1, 60), "p", turn_id="call")
    engine.turn(text(1, 80), "p", turn_id="call")
    assert not engine.program("p").in_flight
    engine.check()


def test_a_preempted_turn_that_is_aborted_leaves_nothing(make_engine):
    engine = make_engine(blocks=20)
    requests = [engine.send(text(i, 8 * BLOCK), f"p{i}", max_tokens=60) for i in range(2)]
    for _ in range(200):
        engine.step(0.01)
        preempted = [r for r in requests if r.status is RequestStatus.PREEMPTED]
        if preempted:
            break
    assert preempted
    engine.abort(*requests)
    engine.step()
    engine.check()
    assert engine.free_blocks == 20


@pytest.mark.parametrize("policy", ["fcfs", "thunder"])
def test_mixed_traffic_leaves_no_turn_behind(make_engine, policy):
    """A labelled turn that did not fit beside unlabelled requests runs when they are gone."""
    engine = make_engine(blocks=40, policy=policy)
    plain = engine.send(text(1, 25 * BLOCK), max_tokens=20)
    engine.step()
    labelled = engine.send(text(2, 35 * BLOCK), "p", max_tokens=2)
    engine.step()
    engine.send(text(3, 2 * BLOCK), max_tokens=2)
    engine.run(plain)
    engine.run(labelled)


@pytest.mark.parametrize("shared_prefix", [0, 25])
@pytest.mark.parametrize("size", [10, 60])
def test_a_stream_of_unlabelled_requests_starves_no_turn(make_engine, shared_prefix, size):
    """Six at a time, replaced as they end, with or without a common system prompt."""
    engine = make_engine(blocks=100, max_wait=10.0)
    prefix = text(0, shared_prefix * BLOCK)
    number = 0
    plain = []

    def keep_six():
        nonlocal number, plain
        plain = [request for request in plain if not request.is_finished()]
        while len(plain) < 6:
            number += 1
            prompt = prefix + text(number, 8 * BLOCK)
            plain.append(engine.send(prompt, max_tokens=5 + number % 7))

    for _ in range(10):
        keep_six()
        engine.step(0.02)
    labelled = engine.send(text(9999, size * BLOCK), "p", max_tokens=2)
    began = engine.now
    while not labelled.is_finished():
        keep_six()
        engine.step(0.02)
        assert engine.now - began < 10.0
    engine.abort(*plain)


def test_unlabelled_blocks_count_once(make_engine):
    engine = make_engine(blocks=100)
    prefix = text(0, 20 * BLOCK)
    engine.turn(prefix)
    requests = [engine.send(prefix + text(i, 10), max_tokens=9) for i in range(1, 6)]
    engine.step()
    assert engine.scheduler.memory().unlabelled_blocks == 100 - engine.free_blocks
    engine.run(*requests)


def test_a_program_that_has_run_since_its_blocks_were_reused_is_not_paused(make_engine):
    engine = make_engine(blocks=40)
    engine.turn(text(1, 60), "p")
    program = engine.program("p")
    engine.pool.free_block_queue._emptied.append(program)
    engine.turn(text(1, 90), "p")
    engine.send(text(2, 30), "q")
    engine.step()
    assert program in engine.scheduler.program_policy.acting
    engine.run()


def test_listing_many_held_programs_is_cheap(make_engine):
    engine = make_engine(blocks=40)
    blocker = engine.send(text(1, 38 * BLOCK), "blocker", max_tokens=15)
    engine.step()
    held = [engine.send(text(i, 30 * BLOCK), f"p{i}") for i in range(500)]
    engine.step()
    began = time.perf_counter()
    assert len(engine.scheduler.programs("list")) == 501
    assert time.perf_counter() - began < 0.5  # it was quadratic: seconds
    engine.abort(blocker, *held)


def test_a_rank_that_holds_all_its_turns_keeps_its_wave(make_engine):
    """Data-parallel ranks step in waves until no rank has unfinished requests: held turns are
    such requests, so the wave goes on and a restore needs no new one."""
    engine = make_engine(blocks=64)
    for i in range(4):
        engine.turn(text(100 + i, 15 * BLOCK - 4), f"acting{i}")
    request = engine.send(text(1, 40 * BLOCK), "p")
    engine.step()
    assert request.request_id in engine.scheduler._held
    assert not engine.scheduler.running
    assert engine.scheduler.has_unfinished_requests()
    engine.run(request)
    assert not engine.scheduler.has_unfinished_requests()


def test_no_name_of_ours_hides_one_of_vllms(make_engine):
    """vLLM looks at its scheduler's and pool's attributes: ``policy`` is fcfs or priority."""
    ours, stock = make_engine(), make_engine(scheduler=AsyncScheduler)
    for mine, theirs in (
        (ours.scheduler, stock.scheduler),
        (ours.scheduler.kv_cache_manager, stock.scheduler.kv_cache_manager),
        (ours.pool, stock.pool),
    ):
        for name, value in vars(theirs).items():
            assert isinstance(getattr(mine, name), type(value)), name


def test_priority_scheduling_preempts_the_lowest_priority(make_engine):
    """Also of requests without a program, and of turns."""
    for labelled in (False, True):
        engine = make_engine(blocks=5, scheduling="priority")
        low = engine.send(
            text(1, 2 * BLOCK), "low" if labelled else None, max_tokens=20, request={"priority": 5}
        )
        engine.step()
        high = engine.send(
            text(2, 2 * BLOCK), "high" if labelled else None, max_tokens=20, request={"priority": 0}
        )
        for _ in range(60):
            engine.step(0.3)
        assert (high.num_preemptions, high.is_finished()) == (0, True)
        engine.run(low)
