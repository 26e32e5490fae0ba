"""Reports of what changed: who follows an engine knows its programs and its room, and at once."""

import pytest
from vllm.v1.core.sched.interface import PauseState

from tests.engine.following import Follower, acting
from tests.engine.harness import BLOCK, text
from vllm_thunder.engine import feed

# -- what is told ---------------------------------------------------------------------


def test_the_first_report_tells_everything(make_engine):
    engine = make_engine(blocks=64)
    follower = Follower(engine)
    assert follower.ask()
    assert (follower.last.reset, follower.last.complete) == (True, True)
    assert (follower.last.programs, follower.last.gone) == ([], [])
    acting(engine, 3, 5)
    late = Follower(engine)
    late.ask(30.0)
    assert (late.last.reset, late.last.complete) == (True, True)
    late.check()
    assert [p.program_id for p in late.last.programs] == ["acting0", "acting1", "acting2"]
    assert {p.resident_blocks for p in late.last.programs} == {4}
    assert all(p.claimed and p.context_tokens == 5 * BLOCK - 3 for p in late.last.programs)


def test_a_report_tells_what_changed_since_the_one_before(make_engine):
    engine = make_engine(blocks=200)
    follower = Follower(engine)
    acting(engine, 10, 4)
    follower.catch_up()
    engine.turn(text(1, 40), "acting3")
    engine.scheduler.programs("release", "acting7")
    follower.catch_up()
    assert not follower.last.reset
    assert [p.program_id for p in follower.last.programs] == ["acting3"]
    assert follower.last.gone == ["acting7"]
    follower.check()
    assert follower.ask()
    assert (follower.last.programs, follower.last.gone) == ([], [])


def test_the_memory_as_a_newcomer_sees_it(make_engine):
    engine = make_engine(blocks=64, max_num_seqs=5, low_watermark=1.0)
    follower = Follower(engine)
    follower.catch_up()
    memory = follower.last.memory
    assert (memory.capacity_blocks, memory.room_blocks, memory.free_seats) == (64, 64, 5)
    assert memory.context_groups == [(BLOCK, None)]
    assert memory.prefill_seconds_per_token is None
    engine.send(text(1, 50 * BLOCK), "runs", max_tokens=30)
    engine.schedule()
    engine.now += 0.8
    engine.update()
    engine.send(text(2, 30 * BLOCK), "waits")
    engine.step()
    follower.catch_up()
    memory = follower.last.memory
    claim = engine.program("runs").claim
    assert memory.room_blocks == pytest.approx(64 - claim - 30, abs=1)
    assert memory.room_blocks < 0
    assert memory.free_seats == 3  # one runs, one is held here
    assert memory.prefill_seconds_per_token == pytest.approx(0.001, rel=0.01)
    runs, waits = follower.programs["runs"], follower.programs["waits"]
    assert (runs.claimed, runs.turns_in_flight, waits.claimed, waits.turns_in_flight) == (
        True,
        1,
        False,
        1,
    )


def test_room_is_told_as_it_is_once_those_who_wait_here_have_taken_theirs(make_engine):
    """The turn has ended and its blocks are free, but a turn that is held here gets them."""
    engine = make_engine(blocks=64, low_watermark=1.0)
    follower = Follower(engine)
    running = engine.send(text(1, 50 * BLOCK), "runs", max_tokens=3, final=True)
    engine.step()
    engine.send(text(2, 60 * BLOCK), "waits", max_tokens=9)
    while not running.is_finished():
        engine.step()
    follower.catch_up()
    assert follower.programs["waits"].claimed
    assert follower.last.memory.room_blocks <= 4
    engine.run()


# -- when it is told ------------------------------------------------------------------


def test_a_turn_that_arrives_and_its_end_are_told_within_a_step(make_engine):
    engine = make_engine()
    follower = Follower(engine)
    follower.wait_for()
    engine.send(text(1, 40), "p", max_tokens=2)
    engine.schedule()
    assert follower.told()
    assert follower.programs["p"].turns_in_flight == 1
    follower.wait_for()
    engine.update()
    engine.schedule()
    assert not follower.told()  # it decodes: nothing changes for anybody else
    engine.update()  # it ends
    engine.step()
    assert follower.told()
    assert (follower.programs["p"].turns_in_flight, follower.programs["p"].context_tokens) == (
        0,
        42,
    )
    follower.check()


def test_the_last_turn_of_all_is_told_by_an_engine_that_does_not_step_any_more(make_engine):
    engine = make_engine()
    follower = Follower(engine)
    engine.send(text(1, 40), "p")
    follower.wait_for()
    engine.step()
    assert not engine.scheduler.requests
    engine.scheduler.idle_timeout()
    assert follower.told()
    assert follower.programs["p"].turns_in_flight == 0
    follower.check()


@pytest.mark.parametrize("how", ["released", "final", "expired", "evicted"])
def test_a_program_that_goes_is_told(make_engine, how):
    engine = make_engine(retention=5.0, max_programs=1)
    follower = Follower(engine)
    last = engine.send(text(1, 40), "p", final=how == "final")
    if how == "final":
        follower.wait_for()
        engine.run(last)
    else:
        engine.run(last)
        follower.wait_for()
    if how == "released":
        engine.scheduler.programs("release", "p")
    elif how == "expired":
        assert engine.scheduler.idle_timeout() <= 5.0
        while engine.program("p") is not None:
            engine.now += engine.scheduler.idle_timeout()
            engine.scheduler.idle_timeout()
            if follower.told():
                follower.wait_for()
    elif how == "evicted":
        engine.send(text(2, 40), "q")
        engine.step()
    engine.scheduler.idle_timeout()
    follower.told()
    follower.catch_up()
    assert "p" in [name for report in follower.reports for name in report.gone]
    assert "p" not in follower.programs
    follower.check()


def test_a_pause_and_a_restore_are_told(make_engine):
    engine = make_engine(blocks=64)
    follower = Follower(engine)
    acting(engine, 4, 15)
    follower.wait_for()
    request = engine.send(text(1, 40 * BLOCK), "new", max_tokens=30)
    engine.schedule()
    assert follower.told()
    assert not follower.programs["new"].claimed
    engine.update()
    follower.catch_up()
    assert not follower.ask(30.0)
    while not request.num_output_tokens:
        engine.now += 0.05
        engine.schedule()
        told = follower.told()
        restored = not engine.scheduler._held
        assert told or not restored, "a restore is told in the very step"
        engine.update()
        if told:
            follower.wait_for()
    follower.catch_up()
    assert follower.programs["new"].claimed
    assert not all(program.claimed for program in follower.programs.values())
    follower.check()
    engine.run()


def test_a_pause_is_told_although_nothing_else_happens(make_engine):
    engine = make_engine(blocks=64)
    follower = Follower(engine)
    acting(engine, 2, 30)
    follower.wait_for()
    assert all(program.claimed for program in follower.programs.values())
    engine.scheduler.program_policy.withdraw(engine.program("acting1"))
    engine.scheduler.idle_timeout()
    assert follower.told()
    assert [p.program_id for p in follower.last.programs] == ["acting1"]
    assert not follower.programs["acting1"].claimed
    follower.check()


def test_the_next_turn_of_a_program_is_told_when_it_arrives(make_engine):
    engine = make_engine(blocks=64)
    follower = Follower(engine)
    engine.turn(text(1, 40), "p")
    follower.wait_for()
    request = engine.send(text(1, 60), "p", max_tokens=5)
    engine.schedule()
    assert follower.told()
    assert follower.programs["p"].turns_in_flight == 1
    engine.update()
    engine.run(request)


def test_requests_without_a_program_are_told_as_room(make_engine):
    engine = make_engine(blocks=64, low_watermark=1.0, max_num_seqs=8)
    follower = Follower(engine)
    follower.wait_for()
    plain = engine.send(text(1, 30 * BLOCK), max_tokens=3)
    engine.schedule()
    assert follower.told()
    assert follower.last.memory.free_seats == 7
    assert follower.last.memory.room_blocks <= 34
    engine.update()
    follower.wait_for()
    engine.run(plain)
    engine.step()
    assert follower.told()
    assert (follower.last.memory.free_seats, follower.last.memory.room_blocks) == (8, 64)


def test_a_request_without_a_program_is_told_when_it_arrives_and_when_it_starts(make_engine):
    engine = make_engine(blocks=64, low_watermark=1.0, max_num_seqs=8)
    follower = Follower(engine)
    engine.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    follower.wait_for()
    engine.send(text(1, 30 * BLOCK), max_tokens=3)
    engine.scheduler.idle_timeout()
    assert follower.told()
    assert (follower.last.memory.free_seats, follower.last.memory.room_blocks) == (7, 64)
    follower.wait_for()
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    engine.schedule()
    assert follower.told()
    assert follower.last.memory.room_blocks <= 34
    engine.update()
    engine.run()


def test_what_a_long_request_without_a_program_comes_to_use_is_told_every_second(make_engine):
    """No event says that its prompt is being computed."""
    engine = make_engine(blocks=100, low_watermark=1.0, max_num_batched_tokens=64)
    follower = Follower(engine)
    engine.send(text(1, 90 * BLOCK), max_tokens=1)
    engine.step(0.3)
    engine.step(0.3)
    rooms, asked_at = [], engine.now
    follower.wait_for()
    while engine.scheduler.requests:
        engine.step(0.3)
        if follower.told():
            assert engine.now - asked_at >= 1.0 or not engine.scheduler.requests
            rooms.append(follower.last.memory.room_blocks)
            follower.wait_for()
            asked_at = engine.now
    assert len(rooms) >= 3
    assert rooms[:-1] == sorted(rooms[:-1], reverse=True)


def test_a_claim_that_lapses_is_told_by_an_idle_engine_when_it_does(make_engine):
    engine = make_engine(blocks=64, low_watermark=1.0)
    follower = Follower(engine)
    acting(engine, 1, 40)
    claim = engine.program("acting0").claim
    engine.scheduler.idle_timeout()
    follower.catch_up()
    assert follower.last.memory.room_blocks == pytest.approx(64 - claim)
    lapses_at = engine.scheduler.program_policy.newcomer_room_changes_at(engine.now)
    began = engine.now
    assert not follower.ask(60.0)
    while not follower.told():
        nap = engine.scheduler.idle_timeout()
        assert nap is not None
        engine.now += nap
        engine.scheduler.idle_timeout()
    assert engine.now == pytest.approx(lapses_at, abs=0.002)
    assert engine.now > began
    assert follower.last.memory.room_blocks == pytest.approx(64)
    assert engine.program("acting0").claim == claim  # nobody needs it yet


def test_who_waits_long_enough_is_answered_although_nothing_happens(make_engine):
    engine = make_engine()
    follower = Follower(engine)
    engine.turn(text(1, 40), "p")
    engine.scheduler.idle_timeout()
    engine.now += 600.0  # all claims have lapsed
    follower.catch_up()
    cursor, began = follower.cursor, engine.now
    assert not follower.ask(7.5)
    while not follower.told():
        engine.now += engine.scheduler.idle_timeout()
        engine.scheduler.idle_timeout()
    assert engine.now == pytest.approx(began + 7.5, abs=0.002)
    assert follower.cursor == cursor
    assert (follower.last.programs, follower.last.gone, follower.last.complete) == ([], [], True)


def test_an_engine_that_nobody_follows_sleeps_as_before(make_engine):
    engine = make_engine()
    follower = Follower(engine)
    engine.turn(text(1, 40), "p")
    follower.wait_for(2.0)
    assert engine.scheduler.idle_timeout() <= 1.0
    engine.now += 2.0
    engine.scheduler.idle_timeout()
    assert follower.told()
    assert engine.scheduler.idle_timeout() == 60.0  # its retention is half an hour


def test_held_turns_do_not_delay_what_is_told(make_engine):
    """Only held turns are left: the engine core sleeps, but no longer than somebody waits."""
    engine = make_engine(blocks=64, idle_grace=0.9)
    follower = Follower(engine)
    acting(engine, 4, 15)
    engine.send(text(1, 40 * BLOCK), "p")
    engine.step()
    engine.step()
    follower.wait_for(0.25)
    assert engine.scheduler.held_wait() == pytest.approx(0.25, abs=0.01)
    engine.now += 0.25
    assert engine.scheduler.held_wait() == 0.0
    engine.schedule()
    assert follower.told()
    engine.update()
    follower.wait_for(30.0)
    assert engine.scheduler.held_wait() > 0.1
    engine.scheduler.programs("release", "acting2")
    assert engine.scheduler.held_wait() == 0.0
    engine.schedule()
    assert follower.told()
    assert follower.last.gone == ["acting2"]
    engine.update()
    engine.run()


@pytest.mark.parametrize("state", [PauseState.PAUSED_NEW, PauseState.PAUSED_ALL])
def test_a_paused_engine_tells_what_happens(make_engine, state):
    engine = make_engine(blocks=64)
    follower = Follower(engine)
    running = engine.send(text(1, 40), "runs", max_tokens=50)
    engine.step()
    follower.wait_for()
    engine.scheduler.set_pause_state(state)
    engine.send(text(2, 40), "held")
    engine.scheduler.idle_timeout()
    assert follower.told()
    assert not follower.programs["held"].claimed
    follower.wait_for()
    engine.abort(running)
    engine.scheduler.idle_timeout()
    assert follower.told()
    assert follower.programs["runs"].turns_in_flight == 0
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    follower.wait_for()
    assert follower.programs["held"].claimed
    engine.run()
    engine.scheduler.idle_timeout()
    assert follower.told()
    follower.check()


def test_a_rank_without_work_of_its_own_tells_while_others_work(make_engine):
    """Data-parallel ranks of a wave ask whether there are requests, and nothing else."""
    engine = make_engine(blocks=64, retention=5.0)
    follower = Follower(engine)
    engine.turn(text(1, 40), "p")
    engine.step()
    follower.wait_for(60.0)
    assert not engine.scheduler.has_requests()
    assert not follower.told()
    engine.scheduler.programs("release", "p")
    assert not engine.scheduler.has_requests()
    assert follower.told()
    assert follower.last.gone == ["p"]
    follower.wait_for(3.0)
    engine.now += 3.0
    assert not engine.scheduler.has_requests()
    assert follower.told()


def test_a_tool_that_changes_when_a_claim_lapses_is_told(make_engine):
    engine = make_engine(blocks=64)
    follower = Follower(engine)
    engine.turn(text(1, 40), "p")
    follower.wait_for()
    engine.scheduler.programs("tool", "p", "make")
    engine.scheduler.idle_timeout()
    assert follower.told()


def test_nothing_is_prepared_for_nobody(make_engine, monkeypatch):
    engine = make_engine(blocks=64)
    monkeypatch.setattr(
        feed.ProgramFeed, "_room", lambda *_: pytest.fail("asked although nobody follows")
    )
    acting(engine, 6, 15)
    engine.run(engine.send(text(1, 40 * BLOCK), "new", max_tokens=3))
    engine.scheduler.idle_timeout()
