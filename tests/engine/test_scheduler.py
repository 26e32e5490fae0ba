"""Turns are held, admitted and counted; programs pause, return and go, however turns end."""

import random

import pytest
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import Request, RequestStatus

from tests.engine.harness import BLOCK, text
from vllm_thunder.program.program import Phase, Status


def fill_with_acting(engine, programs: int, blocks_each: int) -> None:
    for i in range(programs):
        engine.turn(text(100 + i, blocks_each * BLOCK - 4), f"acting{i}")


def held(engine, program_id):
    return len(engine.program(program_id).held)


def test_a_turn_makes_its_program_reason_and_its_end_makes_it_act(make_engine):
    engine = make_engine()
    request = engine.send(text(1, 40), "p", max_tokens=3)
    assert engine.program("p").phase is Phase.REASONING
    engine.run(request)
    program = engine.program("p")
    assert (program.phase, program.status) == (Phase.ACTING, Status.ACTIVE)
    assert program.context_tokens == 43
    assert program.turns_done == 1


def test_unlabelled_requests_take_vllms_path(make_engine):
    engine = make_engine()
    request = engine.send(text(1, 40))
    assert request in engine.scheduler.waiting
    engine.run()
    assert len(engine.scheduler.table) == 0


def test_a_program_that_does_not_fit_is_held_until_memory_is_claimed_no_more(make_engine):
    engine = make_engine(blocks=64)
    running = engine.send(text(1, 50 * BLOCK), "big", max_tokens=30)
    engine.step()
    late = engine.send(text(2, 30 * BLOCK), "late")
    for _ in range(5):
        engine.step(0.1)
        assert held(engine, "late") == 1
    assert engine.program("late").status is Status.PAUSED
    wait = engine.scheduler.status.get("late")["wait"]
    assert wait["blocks_needed"] >= 30
    assert 30 - (64 - 51) <= wait["blocks_short"] <= wait["blocks_needed"]
    assert wait["position"] == 0
    assert "memory" in wait["reason"]
    engine.run(running)
    engine.now += 30
    engine.run(late)
    assert engine.program("late").longest_wait > 0


def test_all_memory_belongs_to_acting_programs_and_a_prompt_runs_within_a_second(make_engine):
    engine = make_engine(blocks=64)
    fill_with_acting(engine, 4, 15)
    request = engine.send(text(1, 40 * BLOCK), "new", max_tokens=2)
    began = engine.now
    while not request.num_output_tokens:
        engine.step(0.05)
        assert engine.now - began < 1.0
    assert engine.scheduler.table.pauses > 0


def test_programs_that_fit_are_never_paused(make_engine):
    """A hundred programs with a 90 % shared prefix: the prefix counts once."""
    engine = make_engine(blocks=20 + 100 * 4, max_num_seqs=256)
    prefix = text(0, 18 * BLOCK)
    for round_ in range(3):
        requests = [
            engine.send(prefix + text(1000 + i, BLOCK + round_ * 8), f"p{i}") for i in range(100)
        ]
        engine.run(*requests)
        engine.now += 20
    assert engine.scheduler.table.pauses == 0
    assert engine.scheduler.status.longest_wait < 1.0


def test_restores_are_in_order_of_arrival_but_one_that_is_due_goes_before_all(make_engine):
    engine = make_engine(blocks=64, max_wait=30.0)
    blocker = engine.send(text(1, 55 * BLOCK), "blocker", max_tokens=60)
    engine.step()
    small = engine.send(text(3, 20 * BLOCK), "small")
    engine.step(0.1)
    large = engine.send(text(2, 40 * BLOCK), "large", deadline_seconds=20.0)
    engine.step(0.1)
    status = engine.scheduler.status
    assert (status.get("small")["wait"]["position"], status.get("large")["wait"]["position"]) == (
        0,
        1,
    )
    engine.now += 12.0
    assert (status.get("small")["wait"]["position"], status.get("large")["wait"]["position"]) == (
        1,
        0,
    )
    assert "due" in status.get("large")["wait"]["reason"]
    engine.abort(blocker)
    engine.run(large, small)


def test_an_overdue_turn_makes_programs_yield_when_their_turns_end(make_engine):
    """Programs that come back at once never keep a waiting one out beyond its share."""
    engine = make_engine(blocks=64, max_wait=3.0)
    contexts = {f"busy{i}": text(i, 25 * BLOCK) for i in range(2)}
    running = {name: engine.send(c, name, max_tokens=4) for name, c in contexts.items()}
    engine.step()
    waiting = engine.send(text(9, 25 * BLOCK), "late", max_tokens=2)
    began = engine.now
    while not waiting.is_finished():
        engine.step(0.05)
        for name, request in list(running.items()):
            if request.is_finished():
                running[name] = engine.send(list(request.all_token_ids), name, max_tokens=4)
        assert engine.now - began < 3.0
    engine.abort(*running.values())


def test_a_held_turn_is_cancelled_and_sent_again(make_engine):
    engine = make_engine(blocks=64)
    blocker = engine.send(text(1, 60 * BLOCK), "blocker", max_tokens=20)
    engine.step()
    first = engine.send(text(2, 30 * BLOCK), "p")
    engine.step()
    engine.abort(first)
    engine.step()
    assert engine.program("p").phase is Phase.ACTING
    assert not engine.scheduler._held
    again = engine.send(text(2, 30 * BLOCK), "p")
    engine.run(blocker, again)
    assert engine.program("p").restores == 1
    assert engine.program("p").turns_done == 2
    assert engine.program("p").turns_run == 1


def test_overlapping_turns_of_one_program(make_engine):
    engine = make_engine(blocks=200)
    requests = [engine.send(text(1, 40) + text(i, 9), "p", max_tokens=20 + i) for i in range(8)]
    engine.step()
    engine.abort(requests[0])
    program = engine.program("p")
    assert (program.phase, len(program.turns)) == (Phase.REASONING, 7)
    engine.run(*requests)
    assert program.phase is Phase.ACTING
    assert not program.turns


def test_siblings_of_one_call_count_once_and_never_act_between(make_engine):
    engine = make_engine(blocks=200)
    kwargs = {"turn_id": "call", "fans_out": True}
    first = engine.send(text(1, 40), "p", **kwargs)
    engine.run(first)
    assert engine.program("p").phase is Phase.REASONING  # more siblings may come
    rest = [engine.send(text(1, 40), "p", max_tokens=5, **kwargs) for _ in range(3)]
    engine.step()
    engine.abort(*rest)
    assert len(engine.program("p").turns) == 1
    engine.scheduler.programs("turn_end", "p", "call")
    assert engine.program("p").phase is Phase.ACTING
    assert engine.program("p").turns_done == 1
    engine.scheduler.programs("turn_end", "p", "call")  # late repeats change nothing
    assert engine.program("p").turns_done == 1


@pytest.mark.parametrize("end", ["length", "abort before output", "abort after output", "error"])
def test_every_end_leads_out_of_reasoning(make_engine, end):
    engine = make_engine()
    request = engine.send(text(1, 200), "p", max_tokens=30)
    if end != "abort before output":
        engine.step()
    if end == "length":
        engine.run(request)
    else:
        status = RequestStatus.FINISHED_ERROR if end == "error" else RequestStatus.FINISHED_ABORTED
        engine.scheduler.finish_requests(request.request_id, status)
    assert engine.program("p").phase is Phase.ACTING
    engine.step()
    assert engine.free_blocks == 64


def test_a_stop_string_reaches_the_engine_as_an_abort_and_is_a_normal_end(make_engine):
    engine = make_engine()
    request = engine.send(text(1, 60), "p", max_tokens=50)
    for _ in range(4):
        engine.step()
    engine.abort(request)
    assert engine.program("p").context_tokens == 64
    assert engine.program("p").status is Status.ACTIVE


def test_release_while_a_turn_is_in_flight(make_engine):
    engine = make_engine()
    request = engine.send(text(1, 60), "p", max_tokens=4)
    engine.step()
    answer = {"program_id": "p", "released": True, "pending": True}
    assert engine.scheduler.programs("release", "p") == answer
    assert engine.scheduler.programs("release", "p") == answer
    engine.run(request)
    assert engine.program("p") is None
    assert request.num_output_tokens == 4
    assert engine.scheduler.programs("release", "p") == {
        "program_id": "p",
        "released": False,
        "pending": False,
    }


def test_the_last_turn_releases_its_program(make_engine):
    engine = make_engine()
    engine.turn(text(1, 60), "p", final=True)
    assert engine.program("p") is None
    assert len(engine.pool.ledger) == 0


def test_clients_that_never_release_expire(make_engine):
    engine = make_engine(retention=5.0)
    engine.turn(text(1, 60), "default")
    engine.turn(text(2, 60), "long", retention_seconds=60.0)
    assert engine.scheduler.idle_timeout() == pytest.approx(5.0, abs=0.5)
    engine.now += 6
    engine.scheduler.idle_timeout()  # an idle engine, no step
    assert engine.program("default") is None
    assert engine.program("long") is not None
    engine.now += 60
    engine.scheduler.idle_timeout()
    assert len(engine.scheduler.table) == 0
    assert engine.scheduler.idle_timeout() is None


def test_an_absurd_retention_does_not_break_the_idle_wait(make_engine):
    engine = make_engine()
    engine.turn(text(1, 60), "p", retention_seconds=1e300)
    assert 0 < engine.scheduler.idle_timeout() <= 60.0


def test_an_id_that_changes_on_every_call(make_engine):
    """10,000 one-turn programs: the table is bounded and nobody waits."""
    engine = make_engine(blocks=64, max_programs=500)
    for i in range(10_000):
        request = engine.send(text(i, 3 * BLOCK), f"once{i}")
        for _ in range(4):
            if request.is_finished():
                break
            engine.step(0.002)
    assert len(engine.scheduler.table) <= 500
    assert engine.scheduler.status.longest_wait < 0.5
    assert engine.scheduler.status.metrics()["histograms"]["wait_seconds"]["sum"] < 10
    assert len(engine.pool.ledger) <= 64 + 3 * 500


def test_preempted_turns_are_never_held_again(make_engine):
    engine = make_engine(blocks=20)
    requests = [engine.send(text(i, 8 * BLOCK), f"p{i}", max_tokens=60) for i in range(2)]
    seen = False
    for _ in range(400):
        engine.step(0.01)
        for request in requests:
            if request.status is RequestStatus.PREEMPTED:
                seen = True
                assert request.request_id not in engine.scheduler._held
    assert seen
    assert all(r.is_finished() for r in requests)


def test_a_streaming_session_keeps_its_program_reasoning_between_chunks(make_engine):
    engine = make_engine(blocks=64)
    session = engine.send(text(1, 40), "p", request={"resumable": True})
    for _ in range(3):
        engine.step()
    assert session.status is RequestStatus.WAITING_FOR_STREAMING_REQ
    assert engine.program("p").phase is Phase.REASONING
    assert not engine.scheduler._held
    engine.abort(session)
    assert engine.program("p").phase is Phase.ACTING


def test_a_restore_that_was_sized_wrongly_does_not_block_unlabelled_traffic(make_engine):
    engine = make_engine(blocks=64)
    running = engine.send(text(1, 40 * BLOCK), "running", max_tokens=200)
    engine.step()
    wrong = engine.send(text(2, 40 * BLOCK), "wrong")
    program = engine.program("wrong")
    engine.scheduler._activate(program, engine.now)
    engine.scheduler._admit(
        engine.scheduler._unhold(program, wrong.request_id, engine.now), program
    )
    plain = engine.send(text(3, 5 * BLOCK))
    for _ in range(4):
        engine.step(0.01)
    assert plain.is_finished()
    assert wrong.request_id in engine.scheduler._held
    engine.abort(running)
    engine.run(wrong)


def test_two_views_of_held_turns(make_engine):
    """vLLM's thresholds see only its own queues; its life cycle sees all work."""
    engine = make_engine(blocks=64)
    blocker = engine.send(text(1, 60 * BLOCK), "blocker", max_tokens=3)
    engine.step()
    engine.send(text(2, 60 * BLOCK), "p")
    engine.step()
    scheduler = engine.scheduler
    assert scheduler.get_request_counts() == (1, 0)
    assert scheduler.get_num_unfinished_requests() == 2
    assert scheduler.make_stats().num_waiting_reqs == 1
    assert scheduler.held_wait() == 0.0  # something runs
    engine.abort(blocker)
    engine.step()
    scheduler.set_pause_state(PauseState.PAUSED_NEW)
    assert scheduler.get_num_unfinished_requests() == 0
    assert not scheduler.has_requests()
    scheduler.idle_timeout()
    assert held(engine, "p") == 1
    scheduler.set_pause_state(PauseState.UNPAUSED)
    engine.run()


def test_an_engine_with_held_turns_only_may_sleep_until_the_policys_deadline(make_engine):
    engine = make_engine(blocks=64, idle_grace=0.5)
    fill_with_acting(engine, 4, 15)
    engine.send(text(1, 40 * BLOCK), "p")
    engine.step()
    engine.step()
    assert engine.scheduler.held_wait() == pytest.approx(0.5, abs=0.01)
    engine.now += 0.2
    assert engine.scheduler.held_wait() == pytest.approx(0.3, abs=0.01)
    engine.run()


def test_a_grammar_that_does_not_compile_fails_although_the_turn_is_held(make_engine):
    engine = make_engine(blocks=64)
    engine.send(text(1, 60 * BLOCK), "blocker", max_tokens=30)
    engine.step()
    from vllm.sampling_params import StructuredOutputsParams

    params = {"structured_outputs": StructuredOutputsParams(json='{"type": "object"}')}
    request = engine.send(text(2, 30 * BLOCK), "p", sampling=params)
    engine.step()
    assert request.request_id in engine.scheduler._held
    assert engine.scheduler.held_wait() == 0.0
    request.structured_output_request._grammar = ValueError("no such grammar")
    for _ in range(3):
        engine.step(0.01)
    assert request.status is RequestStatus.FINISHED_ERROR
    assert engine.program("p").phase is Phase.ACTING


def test_a_large_prompt_is_not_starved_by_a_stream_of_small_ones(make_engine):
    engine = make_engine(blocks=120, max_wait=6.0, max_num_batched_tokens=512)
    rng = random.Random(3)
    small: dict[int, Request] = {}
    sent = 0
    large = None
    began = 0.0
    while large is None or not large.is_finished():
        while len(small) < 12:  # more than fit
            sent += 1
            small[sent] = engine.send(
                text(sent, rng.randrange(200, 500)), f"s{sent}", max_tokens=20, final=True
            )
        if large is None and sent > 30:
            large, began = engine.send(text(0, 100 * BLOCK), "large", max_tokens=3), engine.now
        engine.step(0.02)
        small = {i: r for i, r in small.items() if not r.is_finished()}
        assert large is None or engine.now - began < 6.0
    engine.abort(*small.values())


# -- two scheduler outputs outstanding: asynchronous scheduling, which CPU runs never do ---------


def in_flight(engine, *requests):
    engine.schedule()
    engine.schedule()
    assert len(engine.outstanding) == 2


@pytest.mark.parametrize(
    "event", ["abort", "release", "pause", "reset", "preempt", "arrive", "stop"]
)
def test_events_between_two_outstanding_steps(make_engine, event):
    engine = make_engine(blocks=40)
    first = engine.send(text(1, 10 * BLOCK), "a", max_tokens=12)
    second = engine.send(text(2, 10 * BLOCK), "b", max_tokens=12)
    in_flight(engine)
    if event == "abort":
        engine.abort(first)
        assert engine.program("a").phase is Phase.ACTING
    elif event == "release":
        engine.scheduler.programs("release", "a")
    elif event == "pause":
        engine.scheduler.table.set_yields(engine.program("a"), True)
    elif event == "reset":
        engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    elif event == "preempt":
        engine.scheduler.running.remove(first)
        engine.scheduler._preempt_request(first, engine.now)
    elif event == "arrive":
        engine.send(text(3, 12 * BLOCK), "c", max_tokens=3)
    else:
        engine.update()
        engine.abort(first)
    engine.check()
    while engine.outstanding:
        engine.update()
        engine.check()
    for _ in range(60):
        engine.schedule()
        if len(engine.outstanding) == 2:
            engine.update()
        engine.check()
    while engine.outstanding:
        engine.update()
    assert first.is_finished()
    assert second.is_finished()
    assert len(second.output_token_ids) == 12
    for program in list(engine.scheduler.table):
        engine.scheduler.programs("release", program.program_id)
    engine.check()
    assert engine.free_blocks == 40
    assert len(engine.pool.ledger) == 0
