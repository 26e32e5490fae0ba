"""What a policy says a program may claim that comes now: the wire's ``room_blocks``."""

from math import inf

import pytest

from tests.program.test_thunder import BLOCK, Desk
from vllm_thunder.program.config import ThunderConfig
from vllm_thunder.program.cost import ContextBlocks, PrefillCost
from vllm_thunder.program.decisions import Memory
from vllm_thunder.program.policy import make_policy
from vllm_thunder.program.table import ProgramTable
from vllm_thunder.program.turn import Turn


def memory(busy=True, unlabelled=0, shared=0, free=100):
    return Memory(100, unlabelled, shared, free, 50, busy, lambda p: 0, lambda p, q: 0)


def room(desk, **told):
    return desk.policy.newcomer_room(desk.now, memory(**told))


def moves_at(desk):
    return desk.policy.newcomer_room_changes_at(desk.now)


def test_an_empty_engine_has_room_for_all_that_nobody_else_uses():
    desk = Desk()
    assert room(desk) == 100
    assert room(desk, unlabelled=30, shared=5) == 65
    assert moves_at(desk) == inf


def test_what_is_claimed_is_no_room():
    desk = Desk()
    desk.start("a", 40)
    assert room(desk) == pytest.approx(100 - desk.table.get("a").claim)
    assert moves_at(desk) == inf


def test_what_an_acting_program_gives_up_is_room_once_its_claim_lapses():
    desk = Desk()
    desk.act("a", 40)
    claim = desk.table.get("a").claim
    lapses = moves_at(desk)
    assert desk.now < lapses < inf
    assert room(desk) == pytest.approx(100 - claim)
    desk.now = lapses
    assert room(desk) == pytest.approx(100)
    assert moves_at(desk) == inf


def test_of_several_the_next_one_to_lapse_counts():
    desk = Desk()
    desk.act("a", 10)
    desk.now += 1
    desk.act("b", 20)
    first = moves_at(desk)
    desk.now = first
    second = moves_at(desk)
    assert first < second < inf
    assert room(desk) == pytest.approx(100 - desk.table.get("b").claim)
    desk.now = second
    assert room(desk) == pytest.approx(100)


def test_priorities_change_the_order_and_not_the_sum():
    desk = Desk()
    desk.act("urgent", 10, priority=-1)
    desk.now += 1
    desk.act("late", 20, priority=3)
    first = moves_at(desk)
    desk.now = first
    assert room(desk) == pytest.approx(100 - desk.table.get("late").claim)
    desk.now = moves_at(desk)
    assert room(desk) == pytest.approx(100)


def test_what_waits_already_comes_first():
    desk = Desk()
    desk.start("a", 70)
    assert not desk.send("b", 50)
    assert room(desk) == pytest.approx(30 - 50)
    assert not desk.send("c", 60)
    assert room(desk) == pytest.approx(30 - 110)
    desk.end("a")
    desk.table.get("a").yields = False
    desk.now += 1000
    desk.decide()
    assert not desk.table.waiting or room(desk) < 0


def test_a_restored_program_is_counted_once():
    desk = Desk()
    desk.start("a", 70)
    desk.send("b", 50)
    desk.end("a")
    desk.now += 1000  # its claim has lapsed
    assert ("restore", "b") in desk.decide()
    assert not desk.table.waiting
    b = desk.table.get("b")
    left = [p.claim for p in (desk.table.get("a"),) if p is not None]
    assert room(desk) == pytest.approx(100 - b.claim - sum(left) + sum(left))


def test_an_idle_engine_gives_up_what_it_could_have_computed_in_the_time():
    """After its grace, one claim after the other: what is displaced has to be computed again."""
    desk = Desk(idle_grace=0.5)
    desk.policy.prefill.add(1000, 0.0, 1.0)  # 1,000 tokens a second
    desk.act("a", 30)
    desk.act("b", 30)
    desk.busy = False
    desk.decide()
    a, b = desk.table.get("a"), desk.table.get("b")
    cost = desk.policy.prefill.seconds(0, a.context_tokens)
    assert 0 < cost < 1
    idle = desk.now
    assert room(desk, busy=False) == pytest.approx(100 - a.claim - b.claim)
    assert moves_at(desk) == pytest.approx(idle + 0.5 + cost)
    desk.now = idle + 0.5 + cost + 0.001
    assert room(desk, busy=False) == pytest.approx(100 - b.claim)
    assert room(desk, busy=True) == pytest.approx(100 - a.claim - b.claim)  # somebody came
    assert moves_at(desk) == pytest.approx(idle + 0.5 + 2 * cost)
    desk.now = idle + 0.5 + 2 * cost + 0.001
    assert room(desk, busy=False) == pytest.approx(100)
    desk.now = moves_at(desk)  # the claims lapse: they are room already
    assert room(desk, busy=False) == pytest.approx(100)


def test_fcfs_offers_what_no_request_uses():
    policy = make_policy(
        config := ThunderConfig(policy="fcfs"), ProgramTable(config), ContextBlocks([(BLOCK, None)])
    )
    assert policy.newcomer_room(0.0, memory(free=37)) == 37
    assert policy.newcomer_room_changes_at(0.0) == inf


class PaperDesk:
    def __init__(self):
        self.now = 0.0
        config = ThunderConfig(policy="paper", high_watermark=1.0, low_watermark=0.5, interval=5.0)
        self.table = ProgramTable(config)
        self.policy = make_policy(config, self.table, ContextBlocks([(BLOCK, None)]))

    def act(self, name, blocks):
        program = self.table.turn_arrived(Turn(name, name), blocks * BLOCK, self.now)
        self.policy.activate(program, self.now)
        self.table.request_runs(program, name)
        self.table.learn_context(program, blocks * BLOCK, 0)
        self.table.request_ended(program, name, self.now)
        self.policy.acts(program, self.now)


def test_papers_room_follows_decayed_use():
    desk = PaperDesk()
    assert room(desk) == 100
    assert moves_at(desk) == inf
    desk.act("a", 80)
    desk.policy.reconcile(desk.now, memory())
    assert room(desk) == pytest.approx(50 - 80)  # above λ_min C nobody is restored
    assert moves_at(desk) == 5.0
    desk.now = 1.0  # one half-life
    assert room(desk) == pytest.approx(100 - 40)


def test_what_waits_under_paper_comes_first():
    desk = PaperDesk()
    program = desk.table.turn_arrived(Turn("w", "w"), 30 * BLOCK, desk.now)
    desk.table.request_held(program, "w", desk.now)
    desk.policy.waits(program, desk.now)
    assert room(desk) == 70


def test_the_fit_of_prefill_can_be_told():
    cost = PrefillCost()
    assert cost.fitted is None
    for tokens in (100, 200, 400, 800):
        positions = tokens * tokens / 2
        cost.add(tokens, positions, 0.001 * tokens + 1e-6 * positions)
    assert cost.fitted == pytest.approx((0.001, 1e-6))
    assert cost.seconds(0, 300) == pytest.approx(0.3 + 1e-6 * 300 * 300 / 2)


def test_a_turn_that_has_waited_elsewhere_counts_from_then():
    desk = Desk(max_wait=60.0)
    desk.now = 100.0
    desk.start("a", 90)
    for name, waited in (("first", 0.0), ("second", 20.0), ("third", 5.0)):
        program = desk.table.turn_arrived(Turn(name, name), 50 * BLOCK, desk.now)
        assert not desk.policy.admit(program, desk.now)
        desk.table.request_held(program, name, desk.now - waited)
        desk.policy.waits(program, desk.now)
    waits = {
        name: desk.policy.why_held(desk.table.get(name), desk.now, memory())
        for name in ("second", "third", "first")
    }
    assert [wait.position for wait in waits.values()] == [0, 1, 2]
    desk.now += 10.0
    wait = desk.policy.why_held(desk.table.get("second"), desk.now, memory())
    assert "is due" in wait.reason


def test_another_turn_of_a_program_that_waits_makes_its_wait_no_shorter():
    desk = Desk()
    desk.now = 100.0
    program = desk.table.turn_arrived(Turn("p", "t1"), BLOCK, desk.now)
    desk.table.request_held(program, "r1", 70.0)
    desk.table.turn_arrived(Turn("p", "t2"), BLOCK, desk.now)
    desk.table.request_held(program, "r2", 100.0)
    assert program.waiting_since == 70.0
    desk.table.request_held(program, "r3", 60.0)
    assert program.waiting_since == 60.0
