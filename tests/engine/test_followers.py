"""Several who follow an engine: where each of them stands, and what the engine core does."""

import queue

import msgspec
import pytest
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequestType
from vllm.v1.engine.core import EngineShutdownState
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from tests.engine.following import Follower, acting
from tests.engine.harness import BLOCK, text
from tests.patching.test_engine_core_loop import make_core
from vllm_thunder.engine import feed
from vllm_thunder.program.changes import ChangeLog
from vllm_thunder.program.report import EngineReport

# -- many who follow ------------------------------------------------------------------


def test_several_are_told_the_same_at_once(make_engine):
    engine = make_engine()
    engine.turn(text(1, 40), "p")
    followers = [Follower(engine) for _ in range(3)]
    for follower in followers:
        follower.wait_for()
    engine.scheduler.programs("release", "p")
    engine.scheduler.idle_timeout()
    assert [follower.told() for follower in followers] == [True] * 3
    assert {follower.cursor for follower in followers} == {followers[0].cursor}
    assert all(follower.last.gone == ["p"] for follower in followers)


def test_each_waits_for_as_long_as_it_said(make_engine):
    engine = make_engine()
    short, long = Follower(engine), Follower(engine)
    short.catch_up()
    long.wait_for(10.0)
    assert not short.ask(2.0)
    engine.now += 2.0
    engine.scheduler.idle_timeout()
    assert (short.told(), long.told()) == (True, False)
    engine.now += 8.0
    engine.scheduler.idle_timeout()
    assert long.told()


def test_one_who_asks_late_does_not_hide_news_from_those_who_wait(make_engine):
    engine = make_engine()
    waits, asks = Follower(engine), Follower(engine)
    engine.turn(text(1, 40), "p")
    waits.wait_for()
    asks.catch_up()
    engine.scheduler.programs("release", "p")
    assert asks.ask(30.0)
    assert asks.last.gone == ["p"]
    assert not asks.ask(30.0)
    engine.scheduler.idle_timeout()
    assert waits.told()
    assert waits.last.gone == ["p"]
    assert not asks.told()


def test_clients_that_go_away_leave_nothing_behind(make_engine):
    engine = make_engine()
    engine.turn(text(1, 40), "p")
    engine.now += 600.0
    for _ in range(500):
        Follower(engine).wait_for(30.0)
        assert len(engine.scheduler.feed.watchers) <= 64
    engine.now += 30.0
    engine.scheduler.idle_timeout()
    assert not engine.scheduler.feed.watchers


def test_beyond_the_limit_the_one_who_has_waited_longest_is_answered(make_engine):
    engine = make_engine()
    followers = [Follower(engine) for _ in range(65)]
    for follower in followers:
        follower.wait_for()
    assert [follower.told() for follower in followers] == [True] + [False] * 64
    assert followers[0].last.complete


# -- cursors --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "cursor",
    ["", "nonsense", "0", "-1", "é", "0123456789abcdef-3", "{boot}-99", "{boot}-1-99", "{boot}"],
)
def test_a_cursor_of_nobody_begins_at_the_beginning(make_engine, cursor):
    engine = make_engine()
    follower = Follower(engine)
    engine.turn(text(1, 40), "p")
    follower.catch_up()
    stranger = Follower(engine)
    stranger.cursor = cursor.format(boot=follower.cursor.partition("-")[0])
    assert stranger.ask(30.0)
    assert stranger.last.reset
    stranger.check()


def test_another_engine_core_is_another_history(make_engine):
    engine = make_engine()
    follower = Follower(engine)
    engine.turn(text(1, 40), "p")
    follower.catch_up()
    follower.engine = make_engine()
    assert follower.ask(30.0)
    assert follower.last.reset
    assert follower.programs == {}


def test_reports_are_bounded_and_pages_add_up(make_engine, monkeypatch):
    monkeypatch.setattr(feed, "_PAGE", 3)
    engine = make_engine(blocks=200)
    acting(engine, 8, 2)
    follower = Follower(engine)
    assert follower.ask()
    sizes = [len(follower.last.programs)]
    # Changes on the way: what was told already, what was not, somebody new.
    engine.scheduler.programs("release", "acting0")
    engine.scheduler.programs("release", "acting7")
    engine.turn(text(1, 40), "acting5")
    engine.turn(text(2, 40), "new")
    while not follower.last.complete:
        assert follower.ask(30.0)
        assert not follower.last.reset
        sizes.append(len(follower.last.programs) + len(follower.last.gone))
    assert max(sizes) == 3
    follower.check()
    assert not follower.ask(30.0)


def test_a_first_report_in_pages_is_not_begun_again_for_what_went_before(make_engine, monkeypatch):
    monkeypatch.setattr(feed, "_PAGE", 1)
    engine = make_engine(blocks=200)
    engine.scheduler.table.changes._most_gone = 2
    engine.turn(text(1, 40), "old")
    engine.turn(text(8, 40), "as old")
    for number in range(5):
        engine.turn(text(2 + number, 40), f"gone{number}", final=True)
    engine.turn(text(9, 40), "young")
    follower = Follower(engine)
    follower.catch_up()
    assert [report.reset for report in follower.reports] == [True, False, False]
    assert all(not report.gone for report in follower.reports)
    follower.check()


def test_what_is_forgotten_is_told_from_the_beginning(make_engine):
    engine = make_engine(blocks=200)
    engine.scheduler.table.changes._most_gone = 2
    follower = Follower(engine)
    acting(engine, 5, 2)
    follower.catch_up()
    for number in range(3):
        engine.scheduler.programs("release", f"acting{number}")
    assert follower.ask(30.0)
    assert follower.last.reset
    assert follower.programs.keys() == {"acting3", "acting4"}
    engine.scheduler.programs("release", "acting3")
    follower.catch_up()
    assert not follower.last.reset
    follower.check()


def test_ten_thousand_that_went_are_remembered():
    log = ChangeLog()
    log.changed("first")
    for number in range(10_000):
        log.changed(str(number))
        log.gone(str(number))
    assert log.reaches_back_to(1)
    log.gone("first")
    assert not log.reaches_back_to(1)


# -- residency ------------------------------------------------------------------------


def test_blocks_that_others_reuse_are_told_within_a_second(make_engine):
    engine = make_engine(blocks=64)
    follower = Follower(engine)
    engine.turn(text(1, 30 * BLOCK), "victim")
    engine.scheduler._carry_out(
        engine.scheduler.program_policy.withdraw(engine.program("victim"))[0], engine.now
    )
    engine.send(text(2, 4 * BLOCK), "writer", max_tokens=900)
    engine.step()
    follower.wait_for()
    before = follower.programs["victim"]
    assert (before.resident_blocks, before.claimed) == (30, False)
    while engine.program("victim").resident_blocks == 30:
        engine.step(0.01)
    lost_at = engine.now
    assert not follower.told()  # it is not worth a report of its own yet
    while not follower.told():
        engine.step(0.01)
        assert engine.now - lost_at < 1.05
    told = follower.programs["victim"].resident_blocks
    assert told < 30
    assert told == engine.program("victim").resident_blocks


def test_losses_that_nobody_waited_for_are_in_the_next_report(make_engine):
    engine = make_engine(blocks=64)
    follower = Follower(engine)
    engine.turn(text(1, 30 * BLOCK), "victim")
    follower.catch_up()
    for number in range(4):
        engine.turn(text(2 + number, 40 * BLOCK))
    assert engine.program("victim").resident_blocks < 30
    follower.catch_up()
    follower.check()


def test_a_reset_of_the_prefix_cache_is_told(make_engine):
    engine = make_engine(blocks=64)
    follower = Follower(engine)
    acting(engine, 3, 5)
    engine.scheduler.idle_timeout()
    follower.wait_for()
    assert engine.scheduler.reset_prefix_cache()
    engine.now += 1.0
    engine.scheduler.idle_timeout()
    assert follower.told()
    assert [p.resident_blocks for p in follower.programs.values()] == [0, 0, 0]


# -- inside the engine core ------------------------------------------------------------


def ask_core(core, cursor, wait):
    call = (0, 7, "programs", ("changes", cursor, wait))
    core._handle_client_request(EngineCoreRequestType.UTILITY, call)


def answers(core):
    found = []
    while True:
        try:
            client, outputs = core.output_queue.get_nowait()
        except queue.Empty:
            return found
        frames = MsgpackEncoder().encode(outputs)
        received = MsgpackDecoder(EngineCoreOutputs).decode(frames)
        assert (client, received.utility_output.call_id) == (0, 7)
        assert received.utility_output.failure_message is None
        answer = received.utility_output.result.result
        assert isinstance(answer, bytes)
        found.append(msgspec.json.decode(answer, type=EngineReport))


def test_vllms_engine_core_answers_later_and_works_on_meanwhile(make_engine):
    engine = make_engine()
    core = make_core(engine.scheduler)
    ask_core(core, "", "30.0")
    (first,) = answers(core)
    ask_core(core, first.cursor, "30.0")
    assert answers(core) == []
    engine.turn(text(1, 40), "p")
    (second,) = answers(core)
    assert [p.program_id for p in second.programs] == ["p"]
    ask_core(core, second.cursor, "30.0")
    (third,) = answers(core)
    assert third.programs[0].turns_in_flight == 0


def test_a_drain_does_not_wait_for_those_who_wait(make_engine):
    engine = make_engine()
    core = make_core(engine.scheduler)
    ask_core(core, "", "0")
    (first,) = answers(core)
    ask_core(core, first.cursor, "60")
    core.shutdown_state = EngineShutdownState.REQUESTED
    assert core._handle_shutdown() is False  # nothing is left to do
    assert answers(core) == []
    engine.scheduler.shutdown()
    (last,) = answers(core)
    assert last.complete
    assert not engine.scheduler.feed.watchers
