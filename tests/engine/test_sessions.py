"""Streaming-input sessions among other traffic: one request, whose input comes in chunks."""

import random

import pytest
from vllm.v1.request import RequestStatus

from tests.engine.harness import text
from tests.engine.worker import WorkedEngine, answer


@pytest.mark.parametrize("outstanding", [1, 2])
@pytest.mark.parametrize("seed", range(8))
def test_a_session_says_the_same_under_pressure(tiny_model, seed, outstanding):
    """Its program reasons from the first chunk to the end, and gets the model's text although
    others are paused, preempted and served around it."""
    rng = random.Random(seed)
    engine = WorkedEngine(tiny_model, blocks=24, max_num_batched_tokens=64, max_num_seqs=16)
    prompt, length = text(1, rng.randrange(20, 80)), rng.randrange(1, 12)
    session = engine.send(prompt, "s", max_tokens=length, request={"resumable": True})
    said: list[int] = []
    for chunk in range(4):
        said += answer(prompt, length)
        for _ in range(400):
            if rng.random() < 0.1 and len(engine.scheduler.requests) < 5:
                program = rng.choice(["p", "q", None])
                other = text(rng.randrange(50), rng.randrange(20, 150))
                engine.send(other, program, max_tokens=rng.randrange(1, 40))
            engine.schedule()
            while len(engine.outstanding) >= outstanding:
                engine.update()
            engine.now += 0.02
            engine.check()
            if len(engine.received.get(session.request_id, ())) >= len(said):
                break
        while engine.outstanding:
            engine.update()
        assert engine.received[session.request_id] == said
        assert session.status is RequestStatus.WAITING_FOR_STREAMING_REQ
        assert engine.scheduler.programs("get", "s")["phase"] == "REASONING"
        # vLLM drops the last token, which was never computed.
        prompt = prompt + said[-length:][:-1]
        more, length = text(90 + chunk, rng.randrange(5, 40)), rng.randrange(1, 12)
        update = engine.request(more, "s", max_tokens=length, request={"resumable": True})
        update.request_id = session.request_id
        engine.scheduler.add_request(update)
        prompt = prompt + more
        engine.check()
    engine.abort(session)
    assert engine.scheduler.programs("get", "s")["phase"] == "ACTING"
    engine.run(steps=2000)
    for program in engine.scheduler.status.list():
        engine.scheduler.programs("release", program["program_id"])
    engine.check()
    assert engine.free_blocks == 24
