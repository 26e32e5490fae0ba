"""State machines over the ledger and the table: their counts equal a full recount, always."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from vllm_thunder.program.config import ThunderConfig
from vllm_thunder.program.cost import ContextBlocks
from vllm_thunder.program.decisions import ActionKind, Memory
from vllm_thunder.program.errors import IntegrityError
from vllm_thunder.program.ledger import BlockLedger
from vllm_thunder.program.policy import make_policy
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
        self.before: list[set[int]] = [set() for _ in range(5)]
        self.side_calls = [0] * 5

    @rule(p=PROGRAMS)
    def begin(self, p):
        if p not in self.running:
            self.ledger.begin_turn(self.programs[p])
            self.running.add(p)
            self.used[p] = set()
            self.before[p] = set(self.holds[p])

    @rule(
        p=PROGRAMS,
        keys=st.lists(KEYS, min_size=1, max_size=8, unique=True),
        computed=st.booleans(),
    )
    def hold(self, p, keys, computed):
        if p in self.running:
            if computed:
                for key in keys:
                    before = key in self.resident
                    self.resident.add(key)
                    self.ledger.computed(self.programs[p], key, before)
            else:
                self.ledger.hold(self.programs[p], keys)
            self.holds[p].update(keys)
            self.used[p].update(keys)

    @rule(p=PROGRAMS, completed=st.booleans())
    def end(self, p, completed):
        if p in self.running:
            end = self.ledger.end_turn(self.programs[p], completed)
            used, before = self.used[p], self.before[p]
            expected, replaced, side_call = set(), False, False
            if completed and used:
                expected = self.holds[p] - used
                replaced = len(before) >= 4 and len(expected) > 0.9 * len(before)
                side_call = replaced and 2 * len(used) < len(before) and not self.side_calls[p]
                if side_call:
                    expected = used - before
                self.side_calls[p] = int(side_call)
            assert sorted(end.superseded) == sorted(expected)
            assert (end.replaced, end.side_call) == (replaced and not side_call, side_call)
            self.holds[p] -= expected
            self.running.discard(p)

    @rule(p=PROGRAMS)
    def release(self, p):
        if p not in self.running:
            assert set(self.ledger.release(self.programs[p])) == self.holds[p]
            self.holds[p] = set()
            self.side_calls[p] = self.programs[p].side_calls = 0

    @rule(key=KEYS)
    def toggle_residency(self, key):
        if key in self.resident:
            self.resident.discard(key)
            self.ledger.left_memory(key)
        else:
            self.resident.add(key)
            self.ledger.computed(None, key, False)

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
    POLICY = "thunder"

    def __init__(self):
        super().__init__()
        self.now = 0.0
        config = ThunderConfig(policy=self.POLICY, max_wait=30.0, retention=100.0, idle_grace=0.25)
        self.table = ProgramTable(config)
        self.policy = make_policy(config, self.table, ContextBlocks([(16, None)]))
        self.running: dict[str, tuple[Program, str]] = {}
        self.waiting: dict[str, tuple[Program, str]] = {}
        self.sent = 0

    @rule(
        p=PROGRAMS,
        tokens=st.integers(1, 1500),
        fans=st.booleans(),
        final=st.booleans(),
        parent=st.none() | PROGRAMS,
        group=st.sampled_from([None, "g", "h"]),
        priority=st.sampled_from([0, 0, 0, 1, -1]),
        deadline=st.none() | st.floats(0.1, 60.0),
        tool=st.sampled_from([None, "shell", "web"]),
    )
    def arrive(self, p, tokens, fans, final, parent, group, priority, deadline, tool):
        self.sent += 1
        request_id = turn_id = f"r{self.sent}"
        turn = Turn(
            f"p{p}",
            turn_id,
            fans_out=fans,
            final=final,
            parent_id=None if parent in (None, p) else f"p{parent}",
            group=group,
            priority=priority,
            deadline_seconds=deadline,
            tool=tool,
        )
        program = self.table.turn_arrived(turn, tokens, self.now)
        if self.policy.admit(program, self.now):
            self._runs(program, turn_id)
        else:
            self.table.request_held(program, request_id, self.now)
            self.policy.waits(program, self.now)
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
        self._unhold(program, request_id)
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
        memory = Memory(
            self.CAPACITY, unlabelled, shared, free, slots, busy, lambda p: 0, lambda p, q: 0
        )
        claimed = self.table.claimed
        for action in self.policy.reconcile(self.now, memory):
            if action.kind is ActionKind.RELEASE:
                assert not action.program.in_flight
                self.policy.forget(action.program)
                self.table.release(action.program)
            elif action.kind is ActionKind.RESTORE:
                for request_id in list(action.program.held):
                    self._unhold(action.program, request_id)
                    self._runs(*self.waiting.pop(request_id))
        assert self.policy.deadline > self.now
        if self.table.waiting:
            assert self.policy.deadline <= self.now + (5.0 if self.POLICY == "paper" else 1.0)
        if (
            self.POLICY == "thunder" and self.table.claimed > claimed and busy
        ):  # restored beside something that runs
            # An overdue turn may wait in the engine's queue for what unlabelled requests use.
            queues = any(program.goes_first for program in self.table.active)
            limit = self.CAPACITY - shared - (0 if queues else unlabelled)
            assert self.table.claimed <= limit + 1e-6

    @precondition(lambda self: self.waiting and not self.running)
    @rule()
    def nothing_is_held_on_an_idle_engine(self):
        for _ in range(2):  # the engine has to have been seen idle for the grace
            self.reconcile(0, 0, 8)
            self.now = max(self.now + 0.25, self.policy.deadline if not self.running else 0.0)
        self.reconcile(0, 0, 8)
        assert self.running

    def _runs(self, program, turn_id):
        self.table.request_runs(program, turn_id)
        self.running[turn_id] = (program, turn_id)

    def _unhold(self, program, request_id):
        self.table.request_unheld(program, request_id, self.now)
        if not program.held:
            self.policy.waits_no_more(program)

    def _ended(self, program, acts):
        if not acts:
            if program.held and not program.requests_running:
                self.policy.drained(program)
            return
        assert program.phase is Phase.ACTING
        if program.release_when_turn_ends:
            self.policy.forget(program)
            self.table.release(program)
        else:
            self.policy.acts(program, self.now)

    @invariant()
    def the_books_agree(self):
        self.table.check_integrity()
        self.policy.check_integrity()
        assert {r for p in self.table for r in p.held} == self.waiting.keys()
        for program, _ in self.running.values():
            assert program.status is Status.ACTIVE


class PaperMachine(PolicyMachine):
    POLICY = "paper"


TestLedger = LedgerMachine.TestCase
TestPolicy = PolicyMachine.TestCase
TestPaper = PaperMachine.TestCase
for _case in (TestLedger, TestPolicy, TestPaper):
    _case.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)


def test_check_integrity_sees_a_wrong_count():
    ledger = BlockLedger(lambda key: True)
    program = Program("p", created_at=0.0)
    ledger.hold(program, [1])
    program.unique_blocks += 1
    with pytest.raises(IntegrityError, match="unique"):
        ledger.check_integrity([program])


def test_a_program_in_flight_cannot_be_forgotten():
    table = ProgramTable(ThunderConfig())
    program = table.turn_arrived(Turn("p", "t"), 10, 0.0)
    with pytest.raises(IntegrityError, match="in flight"):
        table.release(program)
