"""Programs and engines come and go: what is remembered, refused, counted and forgotten."""

import pytest

from tests.coordinator.desk import BLOCK, Desk
from vllm_thunder.coordinator.fleet.dispatch import Overloaded
from vllm_thunder.program.errors import IntegrityError
from vllm_thunder.program.report import ProgramReport


def test_a_group_follows_its_first_member_and_lower_numbers_go_first():
    desk = Desk([100])
    desk.send("rollout0", 20, group="g", priority=1)
    desk.send("other", 20, priority=1)
    desk.send("rollout1", 20, group="g", priority=1)
    desk.send("online", 30)
    placed = [name for name, _ in desk.decide()]
    assert set(placed) == {"online", "rollout0", "rollout1", "other"}
    desk.report("e0", 70)
    desk = Desk([55])  # rollout1 has the prompt of rollout0
    for name, group in (("rollout0", "g"), ("other", None), ("rollout1", "g")):
        desk.send(name, 20, group=group, priority=1)
    desk.send("online", 30)
    assert {name for name, _ in desk.decide()} == {"online", "rollout0", "rollout1"}


def test_the_turns_of_a_dead_engine_wait_again_and_its_programs_have_no_home():
    desk = Desk([100, 100])
    desk.send("p", 50)
    ((_, where),) = desk.decide()
    backend = desk.fleet.backends[where]
    desk.fleet.went_down(backend, desk.now)
    ((program, turn_id),) = list(backend.running)
    desk.fleet.unsent(program, turn_id, 0.0, desk.now)
    ((_, other),) = desk.decide()
    assert other != where
    desk.fleet.came_up(backend)
    assert not backend.usable  # capacity is not known yet
    desk.report(where, 100)
    assert backend.usable


def test_without_an_engine_everything_waits_and_says_so():
    desk = Desk([])
    desk.send("p", 50)
    assert desk.decide() == []
    assert "no engine" in desk.fleet.why(desk.fleet.get("p"), 0.0)
    desk.now = 1000.0
    assert desk.decide() == []


def test_a_new_program_goes_where_its_prompt_is_in_memory():
    desk = Desk([60, 50])
    desk.send("p", 48, cached={"e0": 10 * BLOCK, "gone": 1000 * BLOCK})
    assert desk.decide() == [("p", "e0")]  # although the other fits better
    assert desk.fleet.backends["e0"].room == 22  # the shared part is on somebody's account already


def test_a_new_program_waits_for_a_shared_prompt_as_long_as_computing_it_takes():
    desk = Desk([5, 50])
    desk.send("p", 40, cached={"e0": 30 * BLOCK})
    assert desk.decide() == []
    desk.now = 0.48  # 480 tokens
    assert desk.decide() == [("p", "e1")]


def test_where_it_has_moved_from_may_forget_it():
    desk = Desk([100, 100])
    desk.told("e0", "p", 50, resident=0)
    desk.report("e0", 0)
    desk.send("p", 50)
    (dispatch,) = desk.fleet.reconcile(desk.now)
    assert (dispatch.backend.backend_id, dispatch.left.backend_id) == ("e1", "e0")


def test_an_engine_that_tells_of_a_program_gone_under_a_turn_is_told_when_it_moves_on():
    """It was told to forget it, it came back, and the answer to the former comes in between."""
    desk = Desk([100, 100])
    desk.send("p", 50)
    ((_, where),) = desk.decide()
    desk.say(where, gone=["p"])
    program = desk.fleet.get("p")
    assert program.home is None
    desk.end("p")
    desk.report(where, 0)
    desk.send("p", 50)
    (sent,) = desk.fleet.reconcile(desk.now)
    assert sent.backend.backend_id != where
    assert sent.left.backend_id == where
    assert program.perhaps_at is None
    assert program.moves == 0


@pytest.mark.parametrize("waits", [False, True], ids=["rests", "waits"])
@pytest.mark.parametrize("is_there", [True, False])
def test_that_a_program_is_gone_may_be_older_than_the_turn_that_has_ended_since(is_there, waits):
    """An engine is told to forget a program that comes back to it; its next turn ends, and what is
    read then was said before that turn."""
    desk = Desk([100])
    desk.send("p", 50)
    desk.decide()
    desk.now = 1.0
    desk.end("p")
    if waits:
        desk.report("e0", 0)
        desk.fleet.backends["e0"].reported_at = 0.5
        desk.send("p", 50)
        desk.decide()
    desk.now = 1.1
    desk.say("e0", gone=["p"])
    program = desk.fleet.get("p")
    assert program.home.backend_id == "e0"
    desk.now = 1.2
    if is_there:
        desk.told("e0", "p", 50, 50)
        assert program.home.backend_id == "e0"
    else:
        desk.say("e0")
        assert program.home is None
    assert desk.fleet.get("p") is (program if is_there or waits else None)
    desk.now = 1.3
    desk.say("e0", gone=["p"])
    assert program.home is None
    desk.fleet.check_integrity()


def test_the_end_that_a_program_said_itself_is_not_doubted():
    desk = Desk([100])
    desk.send("p", 50, final=True)
    desk.decide()
    desk.now = 1.0
    desk.end("p")
    desk.now = 1.1
    desk.say("e0", gone=["p"])
    assert desk.fleet.get("p") is None


def test_what_an_engine_knows_of_is_in_its_room_and_counts_once():
    desk = Desk([100])
    desk.send("p", 50)
    desk.decide()
    assert desk.fleet.backends["e0"].room == 50
    desk.told("e0", "p", 0, turns=1)  # held there: the engine has taken it from its room
    assert desk.fleet.backends["e0"].room == 100


def test_a_refused_request_leaves_no_program():
    desk = Desk([100])
    desk.send("p", 50)
    desk.decide()
    program = desk.fleet.get("p")
    desk.fleet.ended(program, next(iter(program.running)), desk.now, refused=True)
    assert len(desk.fleet) == 0
    desk.told("e0", "q", 50, 50, claimed=True)
    program = desk.send("q", 50).program
    desk.fleet.ended(program, next(iter(program.running)), desk.now, refused=True)
    assert desk.fleet.get("q") is program  # its engine knows it
    desk.fleet.check_integrity()


def test_a_restarted_engine_tells_anew_and_what_it_lost_is_forgotten():
    desk = Desk([100])
    for name in ("kept", "lost", "runs"):
        desk.told("e0", name, 10, 10, claimed=True)
    desk.send("runs", 10)
    desk.say("e0", ProgramReport("kept", 160, 10, True), reset=True, complete=False)
    desk.say("e0")
    assert {p.program_id for p in desk.fleet} == {"kept", "runs"}
    desk.say("e0", gone=["kept"])
    assert {p.program_id for p in desk.fleet} == {"runs"}


def test_programs_that_no_engine_knows_are_forgotten_in_time():
    desk = Desk([100], retention=100.0)
    desk.told("e0", "p", 10, 10)
    desk.fleet.went_down(desk.fleet.backends["e0"], desk.now)
    desk.decide()
    assert desk.fleet.deadline == 100.0
    desk.now = 100.0
    desk.decide()
    assert len(desk.fleet) == 0


def test_everything_waits_while_weights_are_updated():
    desk = Desk([100], max_wait=2.0)
    desk.told("e0", "p", 10, 10, claimed=True)
    desk.fleet.frozen = True
    assert desk.send("p", 10) is None
    desk.now = 50.0
    assert desk.decide() == []
    assert "weights" in desk.fleet.why(desk.fleet.get("p"), desk.now)
    desk.fleet.frozen = False
    assert desk.decide() == [("p", "e0")]


def test_an_engine_is_taken_out_when_its_turns_have_ended():
    desk = Desk([100, 100])
    desk.told("e0", "p", 10, 10, claimed=True)
    desk.send("p", 10)
    leaving = desk.fleet.backends["e0"]
    desk.fleet.left(leaving)
    desk.told("e0", "p", 10, 10, claimed=True)
    desk.send("p", 10)
    assert desk.decide() == [("p", "e1")]
    with pytest.raises(IntegrityError, match="turns in flight"):
        desk.fleet.removed(leaving, desk.now)
    desk.end("p")
    desk.fleet.removed(leaving, desk.now)
    assert set(desk.fleet.backends) == {"e1"}
    desk.fleet.check_integrity()


def test_limits_refuse_and_change_nothing():
    desk = Desk([0], max_held_turns=2, max_programs=2)
    desk.send("a", 5)
    desk.send("b", 5)
    with pytest.raises(Overloaded, match="2 turns wait"):
        desk.send("a", 5)
    desk = Desk([0], max_programs=2)
    desk.send("a", 5)
    desk.send("b", 5)
    with pytest.raises(Overloaded, match="2 programs"):
        desk.send("c", 5)
    assert len(desk.fleet) == 2
    desk.fleet.check_integrity()


def test_bodies_that_wait_have_a_limit_together_and_a_refusal_changes_nothing():
    desk = Desk([0], max_held_bytes=100)
    desk.send("a", 5, body_bytes=60)
    desk.send("b", 5, body_bytes=40)
    for name in ("a", "new"):
        with pytest.raises(Overloaded, match=r"100 bytes wait already.* 1 .*100, the limit"):
            desk.send(name, 5, body_bytes=1)
    assert {p.program_id: len(p.waiting) for p in desk.fleet} == {"a": 1, "b": 1}
    desk.fleet.ended(desk.fleet.get("a"), "t1", desk.now, cancelled=True)
    desk.send("c", 5, body_bytes=60)
    assert desk.fleet.queue.held_bytes == 100
    desk.fleet.check_integrity()


def test_a_body_above_the_limit_waits_alone():
    desk = Desk([0], max_held_bytes=100)
    desk.send("a", 5, body_bytes=1000)
    with pytest.raises(Overloaded):
        desk.send("b", 5, body_bytes=1)


@pytest.mark.parametrize("limit", [{"max_held_bytes": 100}, {"max_held_turns": 1}])
def test_a_full_queue_keeps_nobody_out_who_need_not_wait(limit):
    desk = Desk([0], **limit)
    desk.told("e0", "here", 10, 10, claimed=True)
    desk.send("waits", 50, body_bytes=100)
    assert desk.send("here", 10, body_bytes=100).backend.backend_id == "e0"
    desk.fleet.frozen = True
    with pytest.raises(Overloaded):
        desk.send("here", 10, body_bytes=100)


def test_what_an_engine_did_not_take_waits_whatever_the_limits_say():
    desk = Desk([100], max_held_bytes=100, max_held_turns=1)
    for name in ("a", "b"):
        desk.send(name, 10, body_bytes=80)
        desk.decide()
    assert desk.fleet.queue.held_bytes == 0
    backend = desk.fleet.backends["e0"]
    desk.fleet.went_down(backend, desk.now)
    for program, turn_id in list(backend.running):
        desk.fleet.unsent(program, turn_id, 0.0, desk.now, 80)
    assert (desk.fleet.queue.held_turns, desk.fleet.queue.held_bytes) == (2, 160)
    desk.fleet.check_integrity()


def test_a_program_that_no_engine_has_told_of_is_forgotten_after_its_retention():
    desk = Desk([100], retention=100.0)
    desk.send("p", 10)
    desk.decide()
    desk.end("p")
    desk.send("q", 10)
    desk.decide()
    desk.told("e0", "q", 10, 10, claimed=True)
    desk.end("q")
    desk.now = 200.0
    desk.decide()
    assert [program.program_id for program in desk.fleet] == ["q"]


def test_what_comes_of_an_engine_that_is_down_is_too_late():
    desk = Desk([100, 100])
    desk.fleet.went_down(desk.fleet.backends["e0"], 0.0)
    desk.told("e0", "p", 10, 10)
    assert desk.fleet.get("p") is None
    desk.fleet.check_integrity()


def test_who_waits_behind_others_is_told_so():
    desk = Desk([30])
    desk.busy()
    desk.send("large", 50)
    desk.send("small", 10)
    assert desk.decide() == []
    assert "behind others" in desk.fleet.why(desk.fleet.get("small"), desk.now)
