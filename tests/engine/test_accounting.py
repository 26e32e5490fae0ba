"""What is counted is what is there: for each way in which the two could differ."""

import pytest

from tests.engine.harness import BLOCK, text
from tests.engine.worker import WorkedEngine, attention, sliding_window

GROUPS = {
    "attention": lambda: [attention()],
    "windows": lambda: [sliding_window()],
    "hybrid": lambda: [attention(), sliding_window()],
}


@pytest.mark.parametrize("requests", [1, 3])
@pytest.mark.parametrize(
    "groups",
    [
        "attention",
        "windows",
        "hybrid",
    ],
)
def test_windows_that_have_passed_are_not_counted(tiny_model, groups, requests):
    """Only requests without an id run: all blocks in use are theirs."""
    engine = WorkedEngine(
        tiny_model,
        blocks=300,
        groups=GROUPS[groups](),
        max_num_batched_tokens=64,
        max_num_seqs=16,
    )
    for number in range(requests):
        engine.send(text(number, 40 * BLOCK), max_tokens=30)
    for _ in range(30 * requests):
        engine.step(0.01)
        assert engine.scheduler.memory().unlabelled_blocks == 300 - engine.free_blocks


def test_windows_that_have_passed_hold_nobody_back(tiny_model):
    """A request without an id has passed 36 of its 40 blocks; a program needs 7 of 40."""
    engine = WorkedEngine(
        tiny_model,
        blocks=40,
        groups=[sliding_window()],
        max_num_batched_tokens=64,
        max_num_seqs=16,
    )
    plain = engine.send(text(1, 40 * BLOCK), max_tokens=60)
    for _ in range(20):
        engine.step(0.01)
    assert engine.free_blocks >= 30
    turn = engine.send(text(2, 20 * BLOCK), "p", max_tokens=2)
    engine.step(0.01)
    assert engine.scheduler.programs("get", "p")["held_turns"] == 0
    engine.run(turn)
    assert not plain.is_finished()
    engine.run()


@pytest.mark.parametrize("policy", ["thunder", "paper"])
def test_shared_content_that_is_not_in_memory_is_not_borrowed(tiny_model, policy):
    """Seven pairs of programs whose contexts have left memory return at once: what is admitted
    has to fit, whatever the two of a pair have in common."""
    engine = WorkedEngine(tiny_model, blocks=60, policy=policy)
    contexts = {}
    for pair in range(7):
        for one in range(2):
            name = f"{pair}.{one}"
            prompt = text(13 * pair, 20 * BLOCK) + text(200 + 2 * pair + one, 3 * BLOCK)
            contexts[name] = engine.turn(prompt, name, max_tokens=3)
    engine.now += 100.0
    engine.run(engine.send(text(777, 60 * BLOCK - 1)))
    assert not any(p["resident_blocks"] for p in engine.scheduler.status.list())
    requests = {
        name: engine.send(context + text(400 + n, 8), name, max_tokens=30)
        for n, (name, context) in enumerate(contexts.items())
    }
    engine.step(0.01)
    admitted = set()
    for program in engine.scheduler.status.list():
        if not program["held_turns"]:
            admitted.update(requests[program["program_id"]].block_hashes)
    engine.run(*requests.values(), steps=3000)
    assert 0 < len(admitted) <= 60


def test_two_requests_of_a_side_call_leave_no_trace(tiny_model):
    """Both use the same content, which continues nothing: the program keeps its context alone."""
    engine = WorkedEngine(tiny_model, blocks=60)
    context = engine.turn(text(1, 12 * BLOCK), "p", max_tokens=3)
    side = [engine.send(text(500, 3 * BLOCK + 5), "p", max_tokens=3, turn_id="n=2") for _ in "12"]
    engine.run(*side)
    engine.check()
    program = engine.scheduler.programs("get", "p")
    assert program["unique_blocks"] == program["resident_blocks"] == (len(context) - 1) // BLOCK
    assert program["context_tokens"] == len(context)
