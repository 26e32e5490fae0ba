"""Which engine a program goes to, and who goes first."""

from collections import Counter

import pytest

from tests.coordinator.desk import BLOCK, Desk
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
    desk.now = 0.5
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
    desk.busy()
    desk.send("p", 50)
    assert desk.decide() == []
    assert desk.fleet.deadline == 5.0
    desk.now = 5.0
    (dispatch,) = desk.fleet.reconcile(desk.now)
    assert (dispatch.backend.backend_id, dispatch.waited) == ("e1", 5.0)


@pytest.mark.parametrize("shared", [2, 20, 38])
@pytest.mark.parametrize("having", [1, 2, 3])
def test_newcomers_with_a_common_beginning_spread(shared, having):
    """Of 40 blocks each: some engines have the first ones at first, all that have served one do."""
    desk = Desk([1000, 1000, 1000])
    cached = {f"e{n}": float(shared * BLOCK) for n in range(having)}
    where = Counter()
    for n in range(24):
        desk.send(f"p{n}", 40, cached=dict(cached))
        ((_, at),) = desk.decide()
        where[at] += 1
        cached[at] = float(shared * BLOCK)
    assert max(where.values()) - min(where[f"e{n}"] for n in range(3)) <= 1 + 40 // (40 - shared)


def test_of_equals_a_newcomer_goes_to_the_one_that_has_its_beginning():
    desk = Desk([100, 100, 100])
    desk.send("p", 40, cached={"e1": 10 * BLOCK})
    assert desk.decide() == [("p", "e1")]
    assert desk.fleet.backends["e1"].placed_blocks == 30


def test_where_memory_is_short_a_newcomer_goes_where_the_least_is_missing():
    desk = Desk([100, 35, 30])
    desk.busy()
    desk.send("large", 120)
    desk.send("p", 50, cached={"e1": 20 * BLOCK, "e2": 25 * BLOCK})
    assert desk.decide() == [("p", "e2")]


@pytest.mark.parametrize("rooms", [[1000, 1000, 1000], [300, 200, 100], [130, 120, 110]])
@pytest.mark.parametrize("crowded", [False, True])
def test_newcomers_of_a_group_go_together(rooms, crowded):
    desk = Desk(rooms)
    if crowded:
        desk.busy()
        desk.send("large", 5000)  # somebody fits nowhere
    for n in range(8):
        desk.send(f"r{n}", 100, group="g")
    assert len({at for name, at in desk.decide() if name != "large"}) == 1


def test_a_sibling_that_waited_goes_where_the_first_went():
    desk = Desk([100, 0], seats=1)
    desk.send("r0", 50, group="g")
    desk.send("r1", 50, group="g")
    assert desk.decide() == [("r0", "e0")]
    desk.report("e0", 50)
    desk.report("e1", 100)
    desk.told("e0", "r0", 50, 50, claimed=True)
    assert desk.decide() == [("r1", "e0")]


def test_one_that_waits_for_its_home_keeps_others_from_no_other_engine():
    desk = Desk([100, 1000, 1000])
    desk.told("e0", "p", 500, resident=500)
    desk.send("p", 500)
    for n in range(10):
        desk.send(f"q{n}", 10)
    assert Counter(at for _, at in desk.decide()) == {"e1": 5, "e2": 5}


@pytest.mark.parametrize("claimed_first", [False, True])
def test_who_has_a_claim_goes_on_where_it_is_however_full_that_is(claimed_first):
    desk = Desk([100, 100])
    desk.fleet.frozen = True
    if claimed_first:
        desk.told("e0", "p", 50, 50, claimed=True)
    desk.send("p", 50)
    assert desk.decide() == []
    desk.told("e0", "p", 50, 50, claimed=True)
    desk.report("e0", 0)
    desk.fleet.frozen = False
    assert desk.decide() == [("p", "e0")]
    assert desk.fleet.backends["e0"].placed_blocks == 0


def test_an_engine_with_nothing_to_do_for_a_second_takes_who_fits_nowhere():
    desk = Desk([20, 30])
    desk.send("p", 500)
    desk.send("q", 400)
    desk.send("r", 300)
    assert desk.decide() == []
    assert desk.fleet.deadline == 1.0
    desk.now = 1.0
    assert desk.decide() == [("p", "e0"), ("q", "e1")]
    desk.now = 2.0
    assert desk.decide() == []
    desk.end("p")
    desk.now = 2.5
    assert desk.decide() == []
    assert desk.fleet.deadline == 3.0
    desk.now = 3.0
    assert desk.decide() == [("r", "e0")]


def test_an_engine_that_serves_calls_without_a_program_is_not_idle():
    desk = Desk([20])
    desk.fleet.backends["e0"].unlabelled = 1
    desk.send("p", 500)
    desk.now = 5.0
    assert desk.decide() == []
