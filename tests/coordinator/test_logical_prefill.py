"""Prefill cost from first bytes: whatever the traffic, it comes out as the engine works."""

import random

import pytest

from tests.coordinator.logical_desk import BLOCK, Desk
from vllm_thunder.coordinator.logical.prefill import PrefillTimes
from vllm_thunder.program.cost import PrefillCost
from vllm_thunder.program.turn import Turn

PER_TOKEN, PER_POSITION = 1e-4, 2e-8


class Engine:
    """Computes prompts one after the other, in the order in which they come."""

    def __init__(self):
        self.cost = PrefillCost()
        self.times = PrefillTimes(self.cost)
        self.now = self.free_at = 0.0
        self.sent = 0
        self.due = []  # (time of the first byte, request)

    def send(self, cached, prompt, known=True, slow=1.0):
        """At the time at which it is sent; returns when its first byte will come."""
        self.sent += 1
        tokens, positions = prompt - cached, (prompt**2 - cached**2) / 2
        work = slow * (PER_TOKEN * tokens + PER_POSITION * positions)
        self.free_at = max(self.free_at, self.now) + work
        self.times.sent(str(self.sent), cached if known else None, prompt, self.now)
        self.due.append((self.free_at, str(self.sent)))

    def until(self, now):
        while self.due and self.due[0][0] <= now:
            at, name = self.due.pop(0)
            self.times.first_byte(name, at)
        self.now = now

    def check(self, rel):
        per_token, per_position = self.cost.fitted
        assert per_token == pytest.approx(PER_TOKEN, rel=rel)
        assert per_position == pytest.approx(PER_POSITION, rel=rel)


def test_twenty_turns_are_enough():
    engine, rng = Engine(), random.Random(1)
    for _ in range(20):
        cached = rng.choice([0, 0, 20_000])
        engine.send(cached, cached + rng.randint(500, 8_000))
        engine.until(engine.free_at + 1.0)
    engine.check(rel=0.01)


@pytest.mark.parametrize("load", [0.3, 0.9, 3.0])
def test_prompts_that_come_while_others_are_computed(load):
    """With a load above 1 the engine is never done."""
    engine, rng = Engine(), random.Random(2)
    for _ in range(300):
        cached = rng.choice([0, 5_000, 20_000])
        prompt = cached + rng.randint(100, 6_000)
        work = PER_TOKEN * (prompt - cached) + PER_POSITION * (prompt**2 - cached**2) / 2
        engine.send(cached, prompt)
        engine.until(engine.now + rng.expovariate(1.0) * work / load)
    engine.check(rel=0.1)


def test_short_prompts_that_are_computed_in_one_step():
    """Their first bytes come together, after the time of all of them."""
    cost = PrefillCost()
    times = PrefillTimes(cost)
    for step in range(20):
        for n in range(8):
            times.sent(f"{step}.{n}", 0, 200, float(step))
        for n in range(8):
            times.first_byte(f"{step}.{n}", step + 0.16)
    assert cost.seconds(0, 1600) == pytest.approx(0.16, rel=0.01)


@pytest.mark.parametrize("known_first", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_times_that_say_nothing_of_prefill_are_left_out(known_first, fails):
    """Beside a prompt that waits for a seat, or fails after some time."""
    engine, rng = Engine(), random.Random(3)
    for _ in range(60):
        if known_first:
            engine.send(0, rng.randint(500, 3_000))
        engine.send(0, rng.randint(500, 3_000), known=fails, slow=1.0 if fails else 20.0)
        if not known_first:
            engine.send(0, rng.randint(500, 3_000))
        if fails:
            at, name = engine.due.pop(1 if known_first else 0)
            engine.until(engine.now + 0.001 if not known_first else at - 0.001)
            engine.now += 5.0
            engine.times.failed(name, engine.now)
            engine.due = [(engine.now + 0.1, each) for _, each in engine.due]
        engine.until(engine.free_at + 60.0)
        assert not len(engine.times)
        engine.send(0, rng.randint(500, 8_000))
        engine.until(engine.free_at + 1.0)
    engine.check(rel=0.05)


def test_nothing_is_learned_from_failures_or_from_what_is_not_outstanding():
    cost = PrefillCost()
    times = PrefillTimes(cost)
    times.sent("a", 0, 1000, 0.0)
    times.failed("a", 5.0)
    times.first_byte("a", 6.0)
    times.failed("a", 6.0)
    assert cost.fitted is None
    assert not len(times)


def test_nothing_is_learned_while_a_prompt_of_unknown_work_is_outstanding():
    cost = PrefillCost()
    times = PrefillTimes(cost)
    times.sent("unknown", None, 100, 0.0)
    for n in range(5):
        times.sent(str(n), 0, 5000, float(n))
        times.first_byte(str(n), n + 1.0)
    assert cost.fitted is None
    times.first_byte("unknown", 9.0)
    times.sent("known", 0, 5000, 10.0)
    times.first_byte("known", 11.0)
    assert cost.seconds(0, 5000) == pytest.approx(1.0)


def test_a_change_of_the_engine_is_followed():
    cost = PrefillCost()
    times = PrefillTimes(cost)
    now = 0.0
    for seconds in [10.0] * 20 + [1.0] * 80:
        times.sent("a", 0, 5000, now)
        now += seconds
        times.first_byte("a", now)
    assert cost.seconds(0, 5000) == pytest.approx(1.0, rel=0.1)


def test_prefill_cost_is_learned_from_streams_and_reported():
    desk = Desk(blocks=10_000)
    desk.report()
    assert desk.memory.prefill_seconds_per_token is None
    for n in range(20):
        context = 0 if n % 2 else 500
        if context:
            desk.run(f"p{n}", context, seconds=context * BLOCK * 0.001)
        # The first 500 blocks are there: only what is new takes time.
        turn = desk.send(f"p{n}", context + 20)
        desk.now += (20 * BLOCK) * 0.001
        desk.engine.first_byte(turn, desk.now)
        desk.engine.turn_ended(turn, (context + 20) * BLOCK, desk.now + 1.0)
        desk.now += 2.0
    desk.report()
    assert desk.memory.prefill_seconds_per_token == pytest.approx(0.001, rel=0.05)
    assert desk.memory.prefill_seconds_per_position < 1e-8


def slow_first_turn(desk, program="p", blocks=50):
    turn = desk.send(program, blocks)
    desk.now += 100.0
    desk.engine.first_byte(turn, desk.now)
    desk.report()
    return desk.memory.prefill_seconds_per_token


def test_time_in_the_queue_of_the_engine_is_not_prefill():
    assert slow_first_turn(Desk()) == pytest.approx(100 / (50 * BLOCK))
    desk = Desk(seats=1)
    desk.engine.request_sent("r", 1, desk.now)
    desk.engine.first_byte("r", desk.now)
    assert slow_first_turn(desk) is None  # no seat
    desk = Desk()
    desk.engine.queue_told(1)
    assert slow_first_turn(desk) is None
    desk = Desk()
    desk.engine.request_sent("r", 60 * BLOCK, desk.now)
    desk.engine.first_byte("r", desk.now)
    assert slow_first_turn(desk) is None  # no blocks


def test_a_prompt_that_was_shortened_says_nothing_of_prefill():
    desk = Desk()
    desk.engine.turn_ended(desk.send("p", 50), 50 * BLOCK + 1, desk.now)
    assert slow_first_turn(desk, blocks=40) is None


def test_whole_answers_say_nothing_of_prefill():
    desk = Desk()
    for _ in range(3):
        turn = desk.send("p", 10)
        desk.now += 5.0
        desk.engine.turn_ended(turn, 10 * BLOCK, desk.now)
    desk.report()
    assert desk.memory.prefill_seconds_per_token is None


def test_noisy_estimates_of_growing_contexts_do_not_spoil_it():
    """Prompts are estimated to within a tenth, and most of each is cached."""
    desk, rng = Desk(blocks=100_000), random.Random(5)
    context = {}
    for _ in range(200):
        name = f"p{rng.randint(0, 19)}"
        before = context.get(name, 0)
        prompt = before + (rng.randint(100, 400) if before else rng.randint(5_000, 10_000))
        turn = Turn(name, f"n{desk.now}")
        desk.engine.turn_sent(turn, round(prompt * rng.uniform(0.9, 1.1)), desk.now)
        desk.now += (prompt - before) * 0.001
        desk.engine.first_byte(turn.turn_id, desk.now)
        context[name] = prompt + 50
        desk.engine.turn_ended(turn.turn_id, context[name], desk.now, output_tokens=50)
        desk.now += 1.0
    desk.report()
    assert desk.engine.policy.prefill.seconds(0, 8_000) == pytest.approx(8.0, rel=0.1)
    assert desk.engine.policy.prefill.seconds(8_000, 8_300) == pytest.approx(0.3, rel=0.2)
