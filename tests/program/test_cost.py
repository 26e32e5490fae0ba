import random

import pytest

from vllm_thunder.program.cost import ContextBlocks, Ewma, PrefillCost, decay, discounted_age


def test_decay_halves_every_half_life():
    assert decay(0.0, 3.0) == 1.0
    assert decay(3.0, 3.0) == 0.5
    assert decay(1e9, 3.0) == 0.0


def test_discounted_age_grows_and_never_exceeds_the_true_age():
    ages = [discounted_age(t / 10, 2.0) for t in range(500)]
    assert ages == sorted(ages)
    assert all(age <= t / 10 for t, age in enumerate(ages))
    assert discounted_age(100.0, 2.0) == pytest.approx(100.0)


def test_context_blocks_of_full_attention():
    blocks = ContextBlocks([(16, None)])
    assert [blocks(n) for n in (0, 1, 16, 17, 160)] == [0, 1, 1, 2, 10]
    assert blocks.tokens_in(10) == 160


def test_a_sliding_window_keeps_a_bounded_number_of_blocks():
    blocks = ContextBlocks([(16, None), (16, 64)])
    assert blocks(32) == 4
    assert blocks(16_000) == 1000 + 5
    assert blocks.tokens_in(1000) == 16_000


def test_prefill_cost_follows_the_engine():
    cost = PrefillCost()
    assert cost.tokens_per_second is None
    cost.add(0, 0.0, 1.0)  # a decode step says nothing
    assert cost.tokens_per_second is None
    assert cost.seconds(0, 10) is None
    for _ in range(20):
        cost.add(2048, 0.0, 2048 / 400)
    assert cost.tokens_per_second == pytest.approx(400)
    for _ in range(200):
        cost.add(2048, 0.0, 2048 / 4000)
    assert cost.tokens_per_second == pytest.approx(4000, rel=0.05)
    assert cost.seconds(0, 8000) == pytest.approx(2.0, rel=0.05)


@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_prefill_cost_learns_that_later_tokens_cost_more(noise):
    rng = random.Random(3)
    cost = PrefillCost()
    for _ in range(200):
        n, start = rng.randint(1, 2048), rng.randint(0, 30_000)
        positions = n * (start + n / 2)
        seconds = 1e-4 * n + 2e-8 * positions
        cost.add(n, positions, seconds * rng.uniform(1 - noise, 1 + noise))
    rel = 0.01 + noise
    assert cost.seconds(0, 1000) == pytest.approx(0.1 + 0.01, rel=rel)
    assert cost.seconds(0, 20_000) == pytest.approx(2 + 4, rel=rel)
    # The last thousand tokens of a long context cost more than those of a short one.
    assert cost.seconds(19_000, 20_000) > 3 * cost.seconds(0, 1000)


def test_prefill_cost_is_never_negative():
    cost = PrefillCost()
    cost.add(100, 100 * 50, 1.0)
    cost.add(1000, 1000 * 10_000, 1.0)
    cost.add(10, 10 * 20_000, 0.001)
    assert 0 <= cost.seconds(0, 100) <= cost.seconds(0, 1000)


def test_ewma_replaces_a_prior_without_weight_and_keeps_one_with():
    light, heavy = Ewma(10.0, 0.1), Ewma(10.0, 0.1, prior_samples=4)
    light.add(20.0)
    heavy.add(20.0)
    assert light.value == 20.0
    assert heavy.value == 12.0
