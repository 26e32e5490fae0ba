"""Everything that can happen to a fleet, in any order, and how long a decision takes."""

import time
from dataclasses import replace

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.coordinator.desk import Desk
from vllm_thunder.coordinator.fleet.backend import Health
from vllm_thunder.coordinator.fleet.dispatch import Dispatch, Overloaded
from vllm_thunder.program.report import ProgramReport


class FleetMachine(RuleBasedStateMachine):
    """Turns come, end and fail, engines report, die, come back and leave, in any order."""

    ENGINES = 3

    def __init__(self):
        super().__init__()
        limits = {"max_programs": 6, "max_held_turns": 12, "max_held_bytes": 60}
        self.desk = Desk([50] * self.ENGINES, max_wait=20.0, **limits)
        self.fleet = self.desk.fleet
        #: Turns that were at an engine and are not any more, and those that no decision has seen.
        self.left_engines = 0
        self.undecided = set()
        #: Of the bodies of all turns that have arrived.
        self.sizes = {}

    @rule(
        p=st.integers(0, 7),
        blocks=st.integers(1, 80),
        group=st.sampled_from([None, "g"]),
        final=st.booleans(),
        size=st.integers(0, 20),
    )
    def arrive(self, p, blocks, group, final, size):
        queue = self.fleet.queue
        before = queue.held_turns, queue.held_bytes, len(self.fleet), replace(self.fleet.counts)
        turn = {"group": group, "final": final, "body_bytes": size}
        try:
            if self.desk.send(f"p{p}", blocks, **turn) is None:
                self.undecided.add(f"t{self.desk.sent}")
                assert queue.held_turns <= 12
                assert queue.held_bytes <= 60
            self.sizes[f"t{self.desk.sent}"] = size
        except Overloaded:
            after = queue.held_turns, queue.held_bytes, len(self.fleet), self.fleet.counts
            assert after == before

    @rule(seconds=st.floats(0.0, 20.0))
    def reconcile(self, seconds):
        self.desk.now += seconds
        usable = [b for b in self.fleet.backends.values() if b.usable]
        for dispatch in self.fleet.reconcile(self.desk.now):
            assert dispatch.backend in usable
            assert dispatch.program.running[dispatch.turn_id] is dispatch.backend
            assert not self.fleet.frozen
        self.undecided.clear()
        assert self.fleet.deadline > self.desk.now
        if usable and not self.fleet.frozen:
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

    @rule(
        data=st.data(),
        taken=st.booleans(),
        how=st.sampled_from([{}, {"refused": True}, {"cancelled": True}]),
    )
    def end_or_fail(self, data, taken, how):
        going = [(p, t) for p in self.fleet for t in [*p.running, *p.waiting]]
        if going:
            program, turn_id = data.draw(st.sampled_from(going))
            self.left_engines += turn_id in program.running
            self.undecided.discard(turn_id)
            if taken or turn_id in program.waiting:
                self.fleet.ended(program, turn_id, self.desk.now, **how)
            else:
                self.unsend(program, turn_id, 0.0)

    @rule(e=st.integers(0, ENGINES - 1), sent=st.booleans())
    def die(self, e, sent):
        backend = self.fleet.backends[f"e{e}"]
        self.fleet.went_down(backend, self.desk.now)
        self.fleet.check_integrity()
        for program, turn_id in list(backend.running):
            self.left_engines += 1
            if sent:
                self.unsend(program, turn_id, 1.0)
            else:
                self.fleet.ended(program, turn_id, self.desk.now)
        assert not backend.running

    @rule(data=st.data(), e=st.integers(0, ENGINES - 1))
    def go_elsewhere(self, data, e):
        to = self.fleet.backends[f"e{e}"]
        going = [(p, t, b) for p in self.fleet for t, b in p.running.items() if b is not to]
        if going and to.usable:
            program, turn_id, at = data.draw(st.sampled_from(going))
            dispatch = Dispatch(program, turn_id, at, 0.0, "", 0.0, None)
            moved = self.fleet.redirected(dispatch, to, self.desk.now)
            self.left_engines += 1
            assert (program.home, program.running[turn_id], moved.backend) == (to, to, to)

    def unsend(self, program, turn_id, waited):
        self.fleet.unsent(program, turn_id, waited, self.desk.now, self.sizes[turn_id])
        self.undecided.add(turn_id)

    @rule(e=st.integers(0, ENGINES - 1), kept=st.sets(st.integers(0, 7)), more=st.booleans())
    def tell_from_the_beginning(self, e, kept, more):
        name = f"e{e}"
        if self.fleet.backends[name].usable:
            told = [p.program_id for p in self.fleet if int(p.program_id[1:]) in kept]
            first = [ProgramReport(p, 160, 10, False) for p in told[:1]]
            rest = [ProgramReport(p, 160, 10, False) for p in told[1:]]
            self.desk.say(name, *first, reset=True, complete=not more)
            if more:
                self.desk.say(name, *rest)
                rest = []
            residents = set(self.fleet.backends[name].residents)
            assert all(p.program_id in told or p.running for p in residents) or rest

    @rule(e=st.integers(0, ENGINES - 1), p=st.integers(0, 7))
    def forget_a_program(self, e, p):
        if self.fleet.backends[f"e{e}"].usable:
            self.desk.say(f"e{e}", gone=[f"p{p}"])
            program = self.fleet.get(f"p{p}")
            assert program is None or program.home is not self.fleet.backends[f"e{e}"]

    @rule()
    def freeze_or_go_on(self):
        self.fleet.frozen = not self.fleet.frozen

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

    @rule(seconds=st.floats(1700.0, 1900.0))
    def nothing_happens_for_long(self, seconds):
        if not any(p.waiting for p in self.fleet):
            self.desk.now += seconds
            self.fleet.reconcile(self.desk.now)

    @invariant()
    def the_books_agree(self):
        self.fleet.check_integrity()

    @invariant()
    def bodies_are_counted_while_they_wait(self):
        waiting = (turn_id for p in self.fleet for turn_id in p.waiting)
        assert self.fleet.queue.held_bytes == sum(self.sizes[turn_id] for turn_id in waiting)

    @invariant()
    def programs_are_conserved(self):
        counts = self.fleet.counts
        gone = counts.programs_ended + counts.programs_expired + counts.programs_evicted
        assert counts.programs_created == gone + len(self.fleet)

    @invariant()
    def turns_are_conserved(self):
        counts = self.fleet.counts
        held = {turn_id for p in self.fleet for turn_id in p.waiting} - self.undecided
        went_on = counts.turns_resumed + counts.turns_cancelled_held + counts.turns_given_up
        assert counts.turns_paused == went_on + len(held)
        running = sum(len(p.running) for p in self.fleet)
        assert counts.turns_admitted == self.left_engines + running
        assert counts.turns_cancelled_held <= counts.turns_cancelled
        assert counts.turns_resumed <= counts.turns_admitted


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
