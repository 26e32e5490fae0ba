"""Nothing is held back for longer than a decision takes."""

import pytest

from tests.engine.harness import BLOCK, text
from tests.engine.worker import WorkedEngine


@pytest.mark.parametrize("arrival", [1000.0, 1023.8071966514364])
def test_a_deadline_that_is_hit_exactly_is_not_missed(tiny_model, arrival):
    """The core sleeps as long as it is told and wakes up at that very instant; 1023.8... + 0.25 is
    a time that is less than 0.25 later when it is subtracted again."""
    engine = WorkedEngine(tiny_model, blocks=14, idle_grace=0.25)
    engine.now = arrival - 1.0
    for number in range(2):
        engine.turn(text(number, 6 * BLOCK), f"acting{number}", max_tokens=2)
    engine.now = arrival
    request = engine.send(text(9, 9 * BLOCK), "p", max_tokens=2)
    engine.step()
    assert engine.scheduler.programs("get", "p")["held_turns"] == 1
    engine.now = engine.scheduler.program_policy.deadline
    assert engine.now == arrival + 0.25
    engine.step()
    assert engine.scheduler.programs("get", "p")["held_turns"] == 0
    engine.run(request)
