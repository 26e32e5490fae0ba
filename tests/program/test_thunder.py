"""The policy by itself: who is restored, who yields, who is given up, and what is said of it."""

import pytest

from vllm_thunder.program.config import ThunderConfig
from vllm_thunder.program.cost import ContextBlocks
from vllm_thunder.program.decisions import ActionKind, Memory
from vllm_thunder.program.policy import make_policy
from vllm_thunder.program.program import Status
from vllm_thunder.program.table import ProgramTable
from vllm_thunder.program.tool_times import ProgramTimes
from vllm_thunder.program.turn import Turn

BLOCK = 16


class Desk:
    """A policy with turns that begin and end when the test says so; 100 blocks of memory."""

    def __init__(self, **settings):
        self.now = 0.0
        config = ThunderConfig(low_watermark=1.0, **settings)
        self.table = ProgramTable(config)
        self.policy = make_policy(config, self.table, ContextBlocks([(BLOCK, None)]))
        self.common = 0
        self.busy = True

    def send(self, name, blocks, **turn):
        """A turn with a prompt of so many blocks; True if it runs at once."""
        turn_id = f"{name}-{self.now}"
        program = self.table.turn_arrived(Turn(name, turn_id, **turn), blocks * BLOCK, self.now)
        if self.policy.admit(program, self.now):
            self.table.request_runs(program, turn_id)
            return True
        self.table.request_held(program, turn_id, self.now)
        self.policy.waits(program, self.now)
        return False

    def decide(self):
        """Names by what was decided, in order."""
        memory = Memory(
            capacity_blocks=100,
            unlabelled_blocks=0,
            shared_blocks=0,
            free_blocks=100,
            free_slots=50,
            busy=self.busy,
            borrowed_blocks=lambda program: 0,
            common_blocks=lambda program, other: self.common,
        )
        actions = self.policy.reconcile(self.now, memory)
        for action in actions:
            if action.kind is ActionKind.RESTORE:
                for request_id in list(action.program.held):
                    self.table.request_runs(action.program, request_id)
                    self.table.request_unheld(action.program, request_id, self.now)
                self.policy.waits_no_more(action.program)
            elif action.kind is ActionKind.RELEASE:
                self.policy.forget(action.program)
                self.table.release(action.program)
        self.table.check_integrity()
        self.policy.check_integrity()
        return [(str(action.kind), action.program.program_id) for action in actions]

    def start(self, name, blocks, **turn):
        if not self.send(name, blocks, **turn):
            assert ("restore", name) in self.decide()

    def end(self, name):
        program = self.table.get(name)
        (turn_id,) = program.turns
        self.table.learn_context(program, program.prompt_tokens, 0)
        assert self.table.request_ended(program, turn_id, self.now)
        return [(str(a.kind), a.program.program_id) for a in self.policy.acts(program, self.now)]

    def act(self, name, blocks, **turn):
        self.start(name, blocks, **turn)
        self.end(name)


def test_a_lower_priority_acts_and_gives_its_memory_to_a_higher_one_at_once():
    desk = Desk()
    desk.act("rollout", 60, priority=1)
    desk.act("online", 30)
    desk.send("new-rollout", 20, priority=1)
    assert desk.decide() == []  # nothing lapsed: equal priorities wait
    desk.send("new-online", 20)
    assert desk.decide() == [
        ("pause", "rollout"),
        ("restore", "new-online"),
        ("restore", "new-rollout"),
    ]


def test_a_lower_priority_that_runs_yields_when_its_turn_ends():
    desk = Desk()
    desk.start("rollout", 80, priority=1)
    desk.send("online", 50)
    assert desk.decide() == []
    assert desk.end("rollout") == [("pause", "rollout")]
    assert desk.decide() == [("restore", "online")]


def test_a_higher_priority_never_yields_to_a_lower_one_before_that_is_due():
    desk = Desk(max_wait=60.0)
    desk.start("online", 80)
    desk.send("rollout", 50, priority=1)
    desk.decide()
    assert desk.end("online") == []
    desk.start("online", 80)
    desk.now = 31.0  # half of max_wait: nobody is starved
    desk.decide()
    assert desk.end("online") == [("pause", "online")]
    assert desk.decide() == [("restore", "rollout")]


@pytest.mark.parametrize(("deadline", "first"), [(4.0, "urgent"), (None, "first")])
def test_a_turn_is_due_when_half_of_its_deadline_is_over(deadline, first):
    desk = Desk()
    desk.start("runs", 90)
    desk.send("first", 20)
    desk.now = 0.1
    desk.send("urgent", 50, deadline_seconds=deadline)
    desk.now = 2.5
    desk.decide()
    desk.end("runs")
    desk.now = 10.0  # its claim has lapsed
    restored = [name for kind, name in desk.decide() if kind == "restore"]
    assert restored[0] == first


def test_a_deadline_beyond_max_wait_does_not_lengthen_it():
    desk = Desk(max_wait=10.0)
    desk.start("runs", 90)
    desk.send("late", 50, deadline_seconds=3600.0)
    desk.now = 5.1
    desk.decide()
    assert desk.end("runs") == [("pause", "runs")]


def test_a_group_is_admitted_together_and_its_prompt_counts_once():
    desk = Desk()
    desk.start("runs", 100)
    desk.common = 38
    for i in range(8):
        desk.send(f"rollout{i}", 40, group="prompt-7")
        desk.send(f"other{i}", 41)
    desk.decide()
    desk.end("runs")
    desk.now = 10.0  # its claim has lapsed
    restored = [name for kind, name in desk.decide() if kind == "restore"]
    group = [name for name in restored if name.startswith("rollout")]
    assert len(group) == 8
    first = restored.index(group[0])
    assert restored[first : first + 8] == group


def test_a_parent_that_waits_for_its_sub_agent_is_the_first_to_give_memory():
    desk = Desk()
    desk.act("other", 30)
    desk.act("parent", 60)
    desk.now = 0.1
    desk.send("child", 40, parent_id="parent")
    assert desk.decide() == [("pause", "parent"), ("restore", "child")]
    assert desk.table.children(desk.table.get("parent")) == ["child"]


def test_the_end_of_a_parent_strands_nobody_and_it_lives_while_its_children_do():
    desk = Desk(retention=100.0)
    desk.act("parent", 10)
    desk.act("child", 10, parent_id="parent")
    desk.act("grandchild", 10, parent_id="child")
    for at in (60.0, 120.0):
        desk.now = at
        desk.act("grandchild", 10, parent_id="child")
        assert desk.decide() == []  # parent and child wait for it
    parent = desk.table.get("parent")
    desk.policy.forget(parent)
    desk.table.release(parent)
    assert desk.table.get("child").parent_id == "parent"
    desk.start("child", 10, parent_id="parent")
    desk.end("child")
    desk.now = 400.0
    assert sorted(desk.decide()) == [("release", "child"), ("release", "grandchild")]
    assert len(desk.table) == 0


def test_a_parent_outlives_one_long_turn_of_its_sub_agents():
    desk = Desk(retention=100.0)
    desk.act("parent", 10)
    desk.act("child", 10, parent_id="parent")
    desk.start("grandchild", 10, parent_id="child")
    desk.now = 250.0
    assert desk.decide() == []
    desk.end("grandchild")
    desk.now = 340.0
    assert desk.decide() == []
    desk.now = 360.0
    assert sorted(desk.decide()) == [
        ("release", "child"),
        ("release", "grandchild"),
        ("release", "parent"),
    ]


def test_a_circle_of_parents_ends():
    desk = Desk(retention=100.0)
    desk.act("a", 5, parent_id="b")
    desk.act("b", 5, parent_id="a")
    desk.act("a", 5, parent_id="b")
    desk.act("own", 5, parent_id="own")
    assert desk.decide() == []
    desk.now = 101.0
    assert len(desk.decide()) == 3
    assert len(desk.table) == 0


def test_a_claim_lapses_when_holding_has_cost_what_it_saves():
    desk = Desk()
    desk.policy.prefill.add(1000, 0.0, 1.0)  # 1,600 tokens of capacity: 1.6 s to compute them all
    for i in range(40):
        desk.table.tool_times.add(0.5 if i % 2 else 100.0, None, ProgramTimes())
    desk.start("runs", 10)
    desk.act("acts", 80)
    desk.send("waits", 20)
    assert desk.decide() == []
    desk.now = 0.4
    assert desk.decide() == []
    desk.now = 1.7
    assert desk.decide() == [("pause", "acts"), ("restore", "waits")]


def test_the_tool_that_is_told_decides_how_long_a_program_is_held():
    desk = Desk()
    desk.policy.prefill.add(1000, 0.0, 1.0)
    for _ in range(40):
        desk.table.tool_times.add(100.0, "build", ProgramTimes())
        desk.table.tool_times.add(0.5, "edit", ProgramTimes())
    desk.start("runs", 10)
    desk.act("builds", 40)
    desk.act("edits", 40)
    for name, tool in (("builds", "build"), ("edits", "edit")):
        program = desk.table.get(name)
        program.tool = tool
        desk.policy.tool_known(program)
    desk.send("waits", 30)
    desk.now = 0.2
    assert desk.decide() == [("pause", "builds"), ("restore", "waits")]


def test_why_a_program_waits_is_said_in_numbers():
    desk = Desk()
    desk.start("runs", 90)
    for name, blocks in (("small", 20), ("large", 60)):
        desk.send(name, blocks)
        desk.now += 0.1
    desk.decide()
    memory = Memory(100, 0, 0, 100, 50, True, lambda p: 0, lambda p, q: 0)
    waits = {
        name: desk.policy.why_held(desk.table.get(name), desk.now, memory)
        for name in ("small", "large")
    }
    assert (waits["small"].blocks_needed, waits["small"].blocks_short) == (20, 10)
    assert (waits["large"].blocks_needed, waits["large"].blocks_short) == (60, 50)
    assert (waits["small"].position, waits["large"].position) == (0, 1)
    assert waits["small"].expected_seconds is None  # there was one restore, no time between two


def test_the_expected_wait_follows_the_restores_of_late():
    desk = Desk()
    for i in range(20):
        desk.now = 2.0 * i
        desk.act(f"p{i}", 1)
    desk.start("runs", 79)
    desk.send("waits", 50)
    desk.decide()
    memory = Memory(100, 0, 0, 100, 50, True, lambda p: 0, lambda p, q: 0)
    wait = desk.policy.why_held(desk.table.get("waits"), desk.now, memory)
    assert wait.expected_seconds == pytest.approx(2.0, rel=0.3)


@pytest.mark.parametrize("policy", ["paper", "fcfs"])
def test_the_paper_decides_at_ticks_and_fcfs_at_once(policy):
    desk = Desk(policy=policy, interval=5.0)
    desk.busy = False
    desk.start("a", 60)
    desk.busy = True
    desk.now = 1.0
    at_once = desk.send("b", 30)
    assert at_once == (policy == "fcfs")
    assert desk.decide() == []
    desk.now = 5.0
    assert desk.decide() == ([("restore", "b")] if policy == "paper" else [])
    assert desk.table.get("b").status is Status.ACTIVE


def test_the_paper_pauses_acting_programs_first_the_shortest_of_them_first():
    desk = Desk(policy="paper", acting_half_life=1000.0, high_watermark=1.0)
    for name, blocks in (("long", 50), ("short", 10), ("runs", 40)):
        desk.busy = False
        desk.start(name, blocks)
        desk.now += 5.0
    desk.busy = True
    desk.end("long")
    desk.end("short")
    desk.start("long", 60)
    desk.now += 5.0
    assert desk.decide() == [("pause", "short")]
