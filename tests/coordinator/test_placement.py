"""Which engine a program goes to, and who goes first."""

import pytest

from tests.coordinator.desk import Desk
from vllm_thunder.coordinator.fleet.backend import Backend


def test_while_all_fit_they_spread():
    desk = Desk([100, 40, 60])
    for name in ("p", "q"):
        desk.send(name, 50)
    assert desk.decide() == [("p", "e0"), ("q", "e2")]
    desk.send("r", 40)  # what was placed counts before it is reported
    assert desk.decide() == [("r", "e0")]


def test_when_one_does_not_fit_the_others_take_the_least_room_that_is_enough():
    desk = Desk([100, 40, 60])
    desk.send("large", 120)
    desk.send("p", 50)
    desk.send("q", 30)
    assert desk.decide() == [("p", "e2"), ("q", "e1")]


def test_what_is_placed_together_is_placed_largest_first():
    """In order of arrival 30 would take the 60, and 60 would fit nowhere."""
    desk = Desk([60, 35])
    desk.send("small", 30)
    desk.send("large", 60)
    assert desk.decide() == [("large", "e0"), ("small", "e1")]


def test_who_fits_nowhere_keeps_one_engine_and_the_others_go_on():
    desk = Desk([30, 25])
    desk.send("large", 55)
    desk.now = 1.0
    for n in range(4):
        desk.send(f"small{n}", 10)
    assert desk.decide() == [("small0", "e1"), ("small1", "e1")]
    desk.report("e1", 5)
    desk.report("e0", 40)
    assert desk.decide() == []  # the small ones do not take what the large one is waiting for
    desk.report("e0", 60)
    assert desk.decide() == [("large", "e0")]


def test_each_that_fits_nowhere_keeps_one():
    desk = Desk([30, 25, 20])
    for n in range(3):
        desk.send(f"large{n}", 55)
    desk.send("small", 10)
    assert desk.decide() == []
    desk.report("e2", 55)
    assert desk.decide() == [("large0", "e2")]


def test_who_waits_for_its_engine_keeps_that_one_and_others_of_it_wait_too():
    desk = Desk([20, 100])
    for name in ("p", "q"):
        desk.told("e0", name, 50, resident=50)
    desk.send("p", 50)
    desk.send("q", 50)
    desk.send("new", 15)
    assert desk.decide() == [("new", "e1")]
    desk.report("e0", 110)
    assert desk.decide() == [("p", "e0"), ("q", "e0")]


def test_seats_are_counted_while_a_decision_is_made():
    desk = Desk([])
    for name in ("e0", "e1"):
        desk.fleet.joined(Backend(name))
        desk.report(name, 100, seats=1)
    for n in range(3):
        desk.send(f"p{n}", 10)
    assert sorted(where for _, where in desk.decide()) == ["e0", "e1"]


def test_a_program_stays_where_its_kv_is():
    desk = Desk([100, 60])
    desk.told("e0", "p", 50, resident=50)
    desk.send("p", 50)
    assert desk.decide() == [("p", "e0")]


def test_a_program_waits_for_its_home_as_long_as_recomputing_would_take():
    desk = Desk([20, 100])
    desk.told("e0", "p", 50, resident=50)  # 800 tokens: 0.8 s
    desk.send("p", 50)
    assert desk.decide() == []
    assert desk.fleet.deadline == pytest.approx(0.8)
    assert "where its KV is" in desk.fleet.why(desk.fleet.get("p"), desk.now)
    desk.now = 0.8
    assert desk.decide() == [("p", "e1")]
    assert desk.fleet.get("p").moves == 1


def test_nobody_waits_for_a_home_that_has_forgotten_it():
    desk = Desk([20, 100])
    desk.told("e0", "p", 50, resident=0)
    desk.send("p", 50)
    assert desk.decide() == [("p", "e1")]


def test_a_program_with_a_claim_goes_on_at_once():
    desk = Desk([0, 100])
    desk.told("e0", "p", 50, resident=50, claimed=True)
    assert desk.send("p", 50).backend.backend_id == "e0"


def test_what_is_due_goes_to_an_engine_that_has_no_room():
    desk = Desk([20, 30], max_wait=10.0)
    desk.send("p", 50)
    assert desk.decide() == []
    assert desk.fleet.deadline == 5.0
    desk.now = 5.0
    (dispatch,) = desk.fleet.reconcile(desk.now)
    assert (dispatch.backend.backend_id, dispatch.waited) == ("e1", 5.0)
