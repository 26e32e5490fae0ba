"""State machines over the ledger and the table: their counts equal a full recount, always."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from vllm_thunder.program.config import ThunderConfig
from vllm_thunder.program.cost import ContextBlocks
from vllm_thunder.program.errors import IntegrityError
from vllm_thunder.program.ledger import BlockLedger
from vllm_thunder.program.policy import ActionKind, Memory, make_policy
from vllm_thunder.program.program import Phase, Program, Status
from vllm_thunder.program.table import ProgramTable
from vllm_thunder.program.turn import Turn

PROGRAMS = st.integers(0, 4)
KEYS = st.integers(0, 15)


class LedgerMachine(RuleBasedStateMachine):
    """Programs hold keys of a small alphabet while residency changes under them."""

    def __init__(self):
        super().__init__()
        self.resident: set[int] = set()
        self.ledger = BlockLedger(self.resident.__contains__)
        self.programs = [Program(str(i), created_at=0.0) for i in range(5)]
        self.running: set[int] = set()
        # The model: what each program holds, and what its running turn has used so far.
        self.holds: list[set[int]] = [set() for _ in range(5)]
        self.used: list[set[int]] = [set() for _ in range(5)]

    @rule(p=PROGRAMS)
    def begin(self, p):
        if p not in self.running:
            self.ledger.begin_turn(self.programs[p])
            self.running.add(p)
            self.used[p] = set()

    @rule(p=PROGRAMS, key=KEYS)
    def hold(self, p, key):
        if p in self.running:
            self.ledger.hold(self.programs[p], key)
            self.holds[p].add(key)
            self.used[p].add(key)

    @rule(p=PROGRAMS, completed=st.booleans())
    def end(self, p, completed):
        if p in self.running:
            superseded = self.ledger.end_turn(self.programs[p], completed)
            expected = self.holds[p] - self.used[p] if completed else set()
            assert set(superseded) == expected
            assert len(superseded) == len(expected)
            self.holds[p] -= expected
            self.running.discard(p)

    @rule(p=PROGRAMS)
    def release(self, p):
        if p not in self.running:
            assert set(self.ledger.release(self.programs[p])) == self.holds[p]
            self.holds[p] = set()

    @rule(key=KEYS)
    def toggle_residency(self, key):
        if key in self.resident:
            self.resident.discard(key)
            self.ledger.left_memory(key)
        else:
            self.resident.add(key)
            self.ledger.became_resident(key)

    @rule()
    def reset(self):
        self.resident.clear()
        self.ledger.all_left_memory(self.programs)

    @invariant()
    def the_books_agree(self):
        self.ledger.check_integrity(self.programs)
        for program, holds in zip(self.programs, self.holds, strict=True):
            others = [h for p, h in zip(self.programs, self.holds, strict=True) if p is not program]
            unique = {key for key in holds if not any(key in other for other in others)}
            assert program.unique_blocks == len(unique)
            assert program.shared_blocks == len(holds - unique)
            assert program.resident_blocks == len(holds & self.resident)


class PolicyMachine(RuleBasedStateMachine):
    """Turns arrive, run, are cancelled and end in any order; the policy decides in between."""

    CAPACITY = 100

    def __init__(self):
        super().__init__()
        self.now = 0.0
        config = ThunderConfig(max_wait=30.0, retention=100.0, idle_grace=0.25)
        self.table = ProgramTable(config)
        self.policy = make_policy(config, self.table, ContextBlocks([(16, None)]))
        self.running: dict[str, tuple[Program, str]] = {}
        self.waiting: dict[str, tuple[Program, str]] = {}
        self.sent = 0

    @rule(p=PROGRAMS, tokens=st.integers(1, 1500), fans=st.booleans(), final=st.booleans())
    def arrive(self, p, tokens, fans, final):
        self.sent += 1
        request_id = turn_id = f"r{self.sent}"
        turn = Turn(f"p{p}", turn_id, fans_out=fans, final=final)
        program = self.table.turn_arrived(turn, tokens, self.now)
        if self.policy.admit(program, self.now):
            self.running[request_id] = (program, turn_id)
        else:
            self.table.request_held(program, request_id, self.now)
            self.waiting[request_id] = (program, turn_id)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), output=st.integers(1, 100))
    def finish(self, data, output):
        request_id = data.draw(st.sampled_from(sorted(self.running)))
        program, turn_id = self.running.pop(request_id)
        self.table.learn_context(program, program.prompt_tokens + output, output)
        self._ended(program, self.table.request_ended(program, turn_id, self.now))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def cancel(self, data):
        request_id = data.draw(st.sampled_from(sorted(self.waiting)))
        program, turn_id = self.waiting.pop(request_id)
        self.table.request_unheld(program, request_id, self.now)
        self._ended(program, self.table.request_ended(program, turn_id, self.now))

    @rule(p=PROGRAMS)
    def front_end_ends_fans(self, p):
        program = self.table.get(f"p{p}")
        for turn_id in sorted(program.open_fans) if program else ():
            self._ended(program, self.table.fan_ended(program, turn_id, self.now))
            if program.status is Status.TERMINATED:
                break

    @rule(seconds=st.floats(0.0, 60.0))
    def wait(self, seconds):
        self.now += seconds

    @rule(unlabelled=st.integers(0, 100), shared=st.integers(0, 20), slots=st.integers(0, 8))
    def reconcile(self, unlabelled, shared, slots):
        busy = bool(self.running) or unlabelled > 0
        free = self.CAPACITY - min(unlabelled, self.CAPACITY)
        memory = Memory(self.CAPACITY, unlabelled, shared, free, slots, busy, lambda program: 0)
        claimed = self.table.claimed
        for action in self.policy.reconcile(self.now, memory):
            if action.kind is ActionKind.RELEASE:
                assert not action.program.in_flight
                self.table.release(action.program)
            elif action.kind is ActionKind.RESTORE:
                for request_id in list(action.program.held):
                    self.table.request_unheld(action.program, request_id, self.now)
                    self.running[request_id] = self.waiting.pop(request_id)
        assert self.policy.deadline > self.now
        if self.table.waiting:
            assert self.policy.deadline <= self.now + 1.0
        if self.table.claimed > claimed and busy:  # restored beside something that runs
            # An overdue turn may wait in the engine's queue for what unlabelled requests use.
            queues = any(program.goes_first for program in self.table.active)
            limit = self.CAPACITY - shared - (0 if queues else unlabelled)
            assert self.table.claimed <= limit + 1e-6

    @precondition(lambda self: self.waiting and not self.running)
    @rule()
    def nothing_is_held_on_an_idle_engine(self):
        self.now += 0.3
        self.reconcile(0, 0, 8)
        assert self.running

    def _ended(self, program, acts):
        if not acts:
            return
        assert program.phase is Phase.ACTING
        self.policy.acts(program)
        if program.release_when_turn_ends:
            self.table.release(program)

    @invariant()
    def the_books_agree(self):
        self.table.check_integrity()
        assert {r for p in self.table for r in p.held} == self.waiting.keys()
        for program, _ in self.running.values():
            assert program.status is Status.ACTIVE


TestLedger = LedgerMachine.TestCase
TestPolicy = PolicyMachine.TestCase
TestLedger.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
TestPolicy.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)


def test_check_integrity_sees_a_wrong_count():
    ledger = BlockLedger(lambda key: True)
    program = Program("p", created_at=0.0)
    ledger.begin_turn(program)
    ledger.hold(program, 1)
    program.unique_blocks += 1
    with pytest.raises(IntegrityError, match="unique"):
        ledger.check_integrity([program])


def test_a_program_in_flight_cannot_be_forgotten():
    table = ProgramTable(ThunderConfig())
    program = table.turn_arrived(Turn("p", "t"), 10, 0.0)
    with pytest.raises(IntegrityError, match="in flight"):
        table.release(program)
