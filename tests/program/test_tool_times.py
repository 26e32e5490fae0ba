"""What is learned of tool times, and when an acting program is given up."""

import random

import pytest

from vllm_thunder.program.tool_times import ProgramTimes, ToolTimes


def cost_of(hold, price, times):
    """What holding until ``hold`` costs on average: the time held, and the price if given up."""
    return sum(min(t, hold) + (price if t > hold else 0.0) for t in times) / len(times)


def best_cost(price, times):
    return min(cost_of(hold, price, times) for hold in [0.0, *times])


def learn(times, *, half_life=1.0, tool=None, usual=None):
    learned = ToolTimes(half_life)
    for seconds in times:
        learned.add(seconds, tool, usual or ProgramTimes())
    return learned


def test_before_anything_is_seen_tools_end_by_the_decay_score():
    # Memoryless tools of mean 1.44 s: worth waiting for if recomputing takes longer, for ever.
    learned = ToolTimes(half_life=1.0)
    assert learned.hold_seconds(10.0, None, ProgramTimes()) > 10.0
    assert learned.hold_seconds(0.1, None, ProgramTimes()) == 0.0
    # But one program in 64 has ended: the hazard falls to 1/10 a second after 8.5 s, which a
    # bucket tells to a half octave.
    assert learned.returning == 63 / 64
    assert 6.0 < learned.hold_seconds(10.0, None, ProgramTimes(), 63 / 64) < 12.0


@pytest.mark.parametrize("factor", [10.0, 0.1])
@pytest.mark.parametrize("price", [0.5, 2.0, 8.0])
def test_twenty_turns_correct_a_prior_that_is_ten_times_wrong(factor, price):
    rng = random.Random(7)
    times = [rng.lognormvariate(0.0, 0.8) for _ in range(2000)]
    learned = learn(times[:20], half_life=factor)
    hold = learned.hold_seconds(price, None, ProgramTimes())
    assert cost_of(hold, price, times) <= 1.15 * best_cost(price, times)


def test_a_heavy_tail_is_not_waited_for():
    """Nine of ten calls take a tenth of a second, one takes minutes: the mean says nothing."""
    times = ([0.1] * 9 + [300.0]) * 5
    hold = learn(times).hold_seconds(5.0, None, ProgramTimes())
    assert 0.1 <= hold < 2.0
    assert cost_of(hold, 5.0, times) <= 1.3 * best_cost(5.0, times)


def test_a_tool_is_told_from_others_by_its_name():
    learned = ToolTimes(1.0)
    for _ in range(30):
        learned.add(0.05, "edit", ProgramTimes())
        learned.add(20.0, "build", ProgramTimes())
    assert learned.hold_seconds(4.0, "edit", ProgramTimes()) >= 0.05
    assert learned.hold_seconds(4.0, "build", ProgramTimes()) < 0.1
    assert learned.hold_seconds(60.0, "build", ProgramTimes()) >= 20.0


def test_a_program_whose_tools_take_longer_than_usual_is_held_for_longer():
    learned, usual, slow = ToolTimes(1.0), ProgramTimes(), ProgramTimes()
    rng = random.Random(1)
    for _ in range(100):
        learned.add(rng.lognormvariate(-2.0, 0.3), None, usual)
    for _ in range(10):
        learned.add(rng.lognormvariate(1.0, 0.3), None, slow)
    assert learned.hold_seconds(20.0, None, slow) > 3.0
    assert learned.hold_seconds(1.0, None, usual) < 1.0


def test_programs_that_end_without_a_word_are_waited_for_less():
    """One in eight never comes back: nobody holds for it as for tools of which all end."""
    rng = random.Random(3)
    released, silent = ToolTimes(1.0), ToolTimes(1.0)
    for turn in range(400):
        seconds = rng.lognormvariate(0.3, 0.8)
        for learned in (released, silent):
            if learned is silent and turn % 8 == 7:
                learned.lost()
            else:
                learned.add(seconds, None, ProgramTimes())
                learned.came_back()
    assert released.returning > 0.98
    assert silent.returning == pytest.approx(7 / 8, abs=0.02)
    price = 6.0
    times = [rng.lognormvariate(0.3, 0.8) for _ in range(700)] + [1e9] * 100
    hold = silent.hold_seconds(price, None, ProgramTimes(), silent.returning)
    assert hold < released.hold_seconds(price, None, ProgramTimes(), released.returning)
    assert cost_of(hold, price, times) <= 1.1 * best_cost(price, times)


def test_a_program_that_counted_as_lost_can_be_found():
    learned = learn([1.0] * 50)
    before = learned.returning
    learned.lost()
    assert learned.returning < before
    learned.found()
    assert learned.returning >= before
    assert learn([]).patience == float("inf")
    assert learn([1.0] * 50).patience >= 2.0


def test_what_is_known_of_returns_counts_at_once():
    """A tool that was seen once, and after which all programs have ended since."""
    learned = learn([1.0] * 40)
    learned.add(1.0, "submit", ProgramTimes())
    patient = learned.hold_seconds(6.0, "submit", ProgramTimes(), 1.0)
    assert learned.hold_seconds(6.0, "submit", ProgramTimes(), 0.1) < patient


def test_what_is_learned_follows_a_change():
    learned = learn([0.1] * 300)
    for _ in range(300):
        learned.add(5.0, None, ProgramTimes())
    assert learned.hold_seconds(20.0, None, ProgramTimes()) >= 5.0


def test_many_tool_names_are_bounded_and_extreme_times_are_counted():
    learned = ToolTimes(1.0)
    for i in range(3000):
        learned.add(1e9 if i % 2 else 0.0, f"tool{i}", ProgramTimes())
    assert len(learned._tools) == 1000
    for price in (0.0, 1e-9, 1e12):
        assert learned.hold_seconds(price, "tool2999", ProgramTimes()) >= 0.0
