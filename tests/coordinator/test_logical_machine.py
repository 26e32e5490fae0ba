"""Random histories of a stock engine: its books agree, and who reads the reports knows all."""

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.coordinator.logical_desk import BLOCK, Desk
from vllm_thunder.program.program import Phase, Status
from vllm_thunder.program.turn import Turn


class LogicalMachine(RuleBasedStateMachine):
    """Turns are sent, computed, end and fail in any order; reports are read now and then."""

    CAPACITY = 60
    POLICY = "thunder"

    def __init__(self):
        super().__init__()
        self.desk = Desk(
            self.CAPACITY, seats=6, policy=self.POLICY, retention=50.0, max_programs=5, max_wait=20
        )
        self.engine = self.desk.engine
        self.in_flight = {}

    @rule(
        p=st.integers(0, 7),
        tokens=st.integers(1, 50 * BLOCK),
        fans=st.booleans(),
        final=st.sampled_from([False, False, False, True]),
        one_off=st.sampled_from([False, False, True]),
        parent=st.none() | st.integers(0, 7),
        priority=st.sampled_from([0, 0, 0, 1, -1]),
        retention=st.none() | st.floats(0.1, 30.0),
    )
    def send(self, p, tokens, fans, final, one_off, parent, priority, retention):
        self.desk.sent += 1
        turn = Turn(
            f"p{p}",
            f"t{self.desk.sent}",
            fans_out=fans,
            final=final,
            one_off=one_off,
            parent_id=None if parent in (None, p) else f"p{parent}",
            priority=priority,
            retention_seconds=retention,
        )
        table = self.engine.table
        before, is_new = len(table), f"p{p}" not in table
        full = before >= 5 and any(not program.in_flight for program in table)
        self.engine.turn_sent(turn, tokens, self.desk.now)
        assert len(table) <= before + (is_new and not full)  # some may have expired
        self.in_flight[turn.turn_id] = tokens
        program = table.get(f"p{p}")
        assert program.status is Status.ACTIVE
        assert turn.turn_id in program.turns

    @rule(tokens=st.integers(1, 40 * BLOCK))
    def send_unlabelled(self, tokens):
        self.desk.sent += 1
        self.engine.request_sent(f"r{self.desk.sent}", tokens, self.desk.now)
        self.in_flight[f"r{self.desk.sent}"] = tokens

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data())
    def first_byte(self, data):
        self.engine.first_byte(data.draw(st.sampled_from(sorted(self.in_flight))), self.desk.now)

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data(), output=st.none() | st.integers(-100, 100), told=st.booleans())
    def end(self, data, output, told):
        name = data.draw(st.sampled_from(sorted(self.in_flight)))
        prompt = self.in_flight.pop(name)
        context = None if output is None else max(prompt + output, 1)
        self.engine.turn_ended(name, context, self.desk.now, 5 if told else None)

    @rule(p=st.integers(0, 7))
    def release(self, p):
        self.engine.release(f"p{p}")

    @rule(p=st.integers(0, 7))
    def tool(self, p):
        self.engine.tool_began(f"p{p}", "shell")

    @rule(requests=st.integers(0, 2))
    def queue_told(self, requests):
        self.engine.queue_told(requests)

    @rule()
    def cache_reset(self):
        self.engine.cache_reset()

    @rule(seconds=st.floats(0.0, 30.0))
    def wait(self, seconds):
        self.desk.now += seconds

    @rule()
    def report(self):
        self.desk.report()
        table, memory = self.engine.table, self.desk.memory
        assert self.engine.deadline > self.desk.now
        # Whoever reads the reports knows what there is to know.
        assert self.desk.known.keys() == {program.program_id for program in table}
        for program in table:
            told = self.desk.known[program.program_id]
            assert told.resident_blocks == program.resident_blocks
            assert told.context_tokens == program.context_tokens
            assert told.claimed == (program.status is Status.ACTIVE)
            assert told.turns_in_flight == len(program.turns)
            assert program.idle_since <= self.desk.now
        assert memory.free_seats == max(6 - len(self.in_flight), 0) or memory.free_seats == 0
        acting = [p for p in table.active if p.phase is Phase.ACTING]
        if self.POLICY == "thunder" and acting:
            # A program that acts has no claim on what those that run need.
            room = self.CAPACITY - self.engine.cache.unlabelled_blocks
            assert table.claimed <= room + table.yielding + 1e-6
        assert self.desk.report() == {}

    @invariant()
    def the_books_agree(self):
        self.engine.check_integrity()
        resident = sum(program.resident_blocks for program in self.engine.table)
        assert resident + self.engine.cache.unlabelled_blocks <= self.CAPACITY
        in_flight = {turn for p in self.engine.table for turn in p.turns}
        assert in_flight == {name for name in self.in_flight if name.startswith("t")}

    def teardown(self):
        for name in list(self.in_flight):
            self.end_all(name)
        self.desk.report()
        for _ in range(100):
            if not self.desk.known:
                break
            self.desk.now = self.engine.deadline
            self.desk.report()
        assert not self.desk.known
        assert not len(self.engine.table)
        assert self.engine.table.claimed == 0.0
        assert self.engine.cache.free_blocks == self.CAPACITY

    def end_all(self, name):
        del self.in_flight[name]
        self.engine.turn_ended(name, None, self.desk.now)


class PaperMachine(LogicalMachine):
    POLICY = "paper"


class FcfsMachine(LogicalMachine):
    POLICY = "fcfs"


TestThunder = LogicalMachine.TestCase
TestThunder.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
TestPaper = PaperMachine.TestCase
TestPaper.settings = settings(max_examples=20, stateful_step_count=50, deadline=None)
TestFcfs = FcfsMachine.TestCase
TestFcfs.settings = TestPaper.settings
