"""The global queue by itself: who is placed where, what happens when engines come and go."""

import time

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from vllm_thunder.coordinator.backend import Backend, Health, MemoryReport
from vllm_thunder.coordinator.config import CoordinatorConfig
from vllm_thunder.coordinator.fleet import Fleet, Overloaded, ProgramReport
from vllm_thunder.program.turn import Turn

BLOCK = 16


class Desk:
    """A fleet whose engines say what the test says."""

    def __init__(self, rooms, **settings):
        self.now = 0.0
        self.fleet = Fleet(CoordinatorConfig(**settings))
        self.sent = 0
        for number, room in enumerate(rooms):
            backend = Backend(f"e{number}", BLOCK)
            self.fleet.joined(backend)
            self.report(f"e{number}", room)

    def report(self, name, room, seats=64):
        """An engine that prefills 1,000 tokens a second."""
        self.fleet.reported(self.fleet.backends[name], MemoryReport(1000, room, seats, 0.001))

    def told(self, name, program, blocks, resident=0, claimed=False):
        report = ProgramReport(program, blocks * BLOCK, resident, claimed)
        self.fleet.program_reported(self.fleet.backends[name], report, self.now)

    def send(self, program, blocks, **turn):
        self.sent += 1
        return self.fleet.arrived(Turn(program, f"t{self.sent}", **turn), blocks * BLOCK, self.now)

    def decide(self):
        """Where which programs went, in order."""
        sent = self.fleet.reconcile(self.now)
        self.fleet.check_integrity()
        return [(d.program.program_id, d.backend.backend_id) for d in sent]

    def end(self, program):
        tracked = self.fleet.get(program)
        for turn_id in list(tracked.running):
            self.fleet.ended(tracked, turn_id, self.now)


def test_the_best_fit_is_the_least_room_that_is_enough():
    desk = Desk([100, 40, 60])
    desk.send("p", 50)
    assert desk.decide() == [("p", "e2")]
    desk.send("q", 50)  # what was placed counts before it is reported
    assert desk.decide() == [("q", "e0")]


def test_what_is_placed_together_is_placed_largest_first():
    """In order of arrival 30 would take the 60, and 60 would fit nowhere."""
    desk = Desk([60, 35])
    desk.send("small", 30)
    desk.send("large", 60)
    assert desk.decide() == [("large", "e0"), ("small", "e1")]


def test_nobody_is_passed_by_what_all_rooms_together_could_not_take():
    desk = Desk([30, 30])
    desk.send("large", 55)
    desk.now = 1.0
    for n in range(5):
        desk.send(f"small{n}", 10)
    # 60 blocks are free: the large one cannot have them, and only what is left over of them goes
    assert desk.decide() == []
    desk.report("e1", 60)
    assert desk.decide() == [("large", "e1"), ("small0", "e0"), ("small1", "e0"), ("small2", "e0")]


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
    assert "home" in desk.fleet.why(desk.fleet.get("p"), desk.now)
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


def test_a_group_follows_its_first_member_and_lower_numbers_go_first():
    desk = Desk([100])
    desk.send("rollout0", 20, group="g", priority=1)
    desk.send("other", 20, priority=1)
    desk.send("rollout1", 20, group="g", priority=1)
    desk.send("online", 30)
    placed = [name for name, _ in desk.decide()]
    assert set(placed) == {"online", "rollout0", "rollout1", "other"}
    desk.report("e0", 70)
    desk = Desk([70])
    for name, group in (("rollout0", "g"), ("other", None), ("rollout1", "g")):
        desk.send(name, 20, group=group, priority=1)
    desk.send("online", 30)
    assert {name for name, _ in desk.decide()} == {"online", "rollout0", "rollout1"}


def test_the_turns_of_a_dead_engine_wait_again_and_its_programs_have_no_home():
    desk = Desk([100, 100])
    desk.send("p", 50)
    ((_, where),) = desk.decide()
    backend = desk.fleet.backends[where]
    ((program, turn_id),) = desk.fleet.went_down(backend)
    desk.fleet.unsent(program, turn_id, desk.now)
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


class FleetMachine(RuleBasedStateMachine):
    """Turns come, end and fail, engines report, die, come back and leave, in any order."""

    ENGINES = 3

    def __init__(self):
        super().__init__()
        self.desk = Desk([50] * self.ENGINES, max_wait=20.0, max_programs=6, max_held_turns=12)
        self.fleet = self.desk.fleet

    @rule(p=st.integers(0, 7), blocks=st.integers(1, 80), group=st.sampled_from([None, "g"]))
    def arrive(self, p, blocks, group):
        before = self.fleet.held_turns, len(self.fleet)
        try:
            self.desk.send(f"p{p}", blocks, group=group)
        except Overloaded:
            assert (self.fleet.held_turns, len(self.fleet)) == before

    @rule(seconds=st.floats(0.0, 20.0))
    def reconcile(self, seconds):
        self.desk.now += seconds
        usable = [b for b in self.fleet.backends.values() if b.usable]
        for dispatch in self.fleet.reconcile(self.desk.now):
            assert dispatch.backend in usable
            assert dispatch.program.running[dispatch.turn_id] is dispatch.backend
        assert self.fleet.deadline > self.desk.now
        if usable:
            for program in self.fleet:
                since = program.waiting_since
                assert since is None or self.desk.now < since + 10.0

    @rule(e=st.integers(0, ENGINES - 1), room=st.integers(-20, 100), seats=st.integers(0, 9))
    def report(self, e, room, seats):
        if self.fleet.backends[f"e{e}"].health in (Health.UNKNOWN, Health.UP):
            self.desk.report(f"e{e}", room, seats)

    @rule(e=st.integers(0, ENGINES - 1), p=st.integers(0, 9), resident=st.integers(0, 80))
    def report_program(self, e, p, resident):
        if self.fleet.backends[f"e{e}"].usable:
            known = self.fleet.get(f"p{p}") is not None
            if known or len(self.fleet) < 6:
                self.desk.told(f"e{e}", f"p{p}", 80, resident, claimed=resident > 40)

    @rule(data=st.data(), taken=st.booleans())
    def end_or_fail(self, data, taken):
        going = [(p, t) for p in self.fleet for t in [*p.running, *p.waiting]]
        if going:
            program, turn_id = data.draw(st.sampled_from(going))
            if taken or turn_id in program.waiting:
                self.fleet.ended(program, turn_id, self.desk.now)
            else:
                self.fleet.unsent(program, turn_id, self.desk.now)

    @rule(e=st.integers(0, ENGINES - 1), sent=st.booleans())
    def die(self, e, sent):
        for program, turn_id in self.fleet.went_down(self.fleet.backends[f"e{e}"]):
            if sent:
                self.fleet.unsent(program, turn_id, self.desk.now)
            else:
                self.fleet.ended(program, turn_id, self.desk.now)
        assert not self.fleet.backends[f"e{e}"].running

    @rule(e=st.integers(0, ENGINES - 1))
    def leave(self, e):
        if self.fleet.backends[f"e{e}"].health is Health.UP:
            self.fleet.left(self.fleet.backends[f"e{e}"])

    @precondition(lambda self: any(b.health is Health.DOWN for b in self.fleet.backends.values()))
    @rule()
    def come_back(self):
        for backend in self.fleet.backends.values():
            if backend.health is Health.DOWN:
                self.fleet.came_up(backend)

    @rule(p=st.integers(0, 7))
    def release(self, p):
        program = self.fleet.get(f"p{p}")
        if program is not None and not program.in_flight:
            self.fleet.release(f"p{p}")

    @invariant()
    def the_books_agree(self):
        self.fleet.check_integrity()


TestFleet = FleetMachine.TestCase
TestFleet.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


def test_a_pass_over_many_engines_and_programs_is_short():
    """64 engines, 10,000 programs, 2,000 of them waiting, 100 changed, at least 50 placed."""
    desk = Desk([0] * 64)
    for n in range(10_000):
        desk.told(f"e{n % 64}", f"p{n}", 40, resident=n % 41, claimed=n % 3 == 0 and n >= 2_000)
    for n in range(2_000):
        desk.send(f"p{n}", 40)
    assert desk.decide() == []
    desk.now = 6.0
    spent = []
    for turn in range(5):
        desk.now += 0.1
        began = time.process_time()
        for n in range(5_000 + 100 * turn, 5_100 + 100 * turn):
            desk.told(f"e{n % 64}", f"p{n}", 41, resident=30)
        for e in range(64):
            desk.report(f"e{e}", 45)
        sent = desk.fleet.reconcile(desk.now)
        spent.append(time.process_time() - began)
        assert len(sent) >= 50
        for dispatch in sent:  # the next report has them
            desk.told(dispatch.backend.backend_id, dispatch.program.program_id, 40, 40, True)
    desk.fleet.check_integrity()
    assert sorted(spent)[2] < 0.005
