"""What a call needs of an engine: never so much that it is held although nothing runs there."""

import asyncio
import json
import time

import pytest

from tests.coordinator.desk import Desk
from tests.coordinator.fake_engine import hang
from tests.coordinator.front import ask, post
from tests.coordinator.program_engine import (
    ProgramEngine,
    coordinator,
    launch,
    turn,
    until,
    until_up,
)
from vllm_thunder.coordinator.config import CoordinatorConfig
from vllm_thunder.coordinator.fleet.backend import Backend
from vllm_thunder.program.endpoints import MODEL_CALLS

FORM = b'--x\r\ncontent-disposition: form-data; name="file"\r\n\r\n%b\r\n--x--' % (bytes(250) * 400)
WORDS = "word " * 20_000
#: Content types, and bodies that are large beside an engine of 16,000 tokens.
BODIES = {
    "multipart/form-data; boundary=x": [FORM],
    "application/octet-stream": [FORM],
    "": [FORM, b"{}"],
    "application/json": [
        FORM,  # which is none
        b'{"messages": "' + WORDS.encode(),
        *(
            json.dumps({"model": "m", **body}).encode()
            for body in (
                {"messages": [{"role": "user", "content": WORDS}]},
                {"messages": [[{"role": "user", "content": "word " * 20}]] * 1000},
                {"prompt": WORDS, "system": WORDS},
                {"prompt": [7] * 50_000},
                {"input": ["word " * 20] * 1000},
                {"input": [[1, 2, 3]] * 10_000},
                {"query": "q", "documents": ["word " * 20] * 1000},
                {"file": "AAAA" * 100_000},
            )
        ),
    ],
}


@pytest.fixture
async def idle():
    """Port, control and engines of a coordinator with two idle ones, which would hold for 15 s. A
    context may be as long as the memory of one."""
    engines = [ProgramEngine(), ProgramEngine()]
    for engine in engines:
        engine.models = {"data": [{"id": "m", "max_model_len": 16_000}]}
        await engine.start()
    config = CoordinatorConfig(engine_timeout=1.0, max_wait=30.0)
    async with coordinator(launch(engines, config)) as (port, control):
        await until_up(control, 2)
        yield port, control, engines
    for engine in engines:
        await engine.kill()


@pytest.mark.parametrize("path", sorted(MODEL_CALLS | {"/generate"}))
async def test_nothing_is_held_while_nothing_runs(idle, path):
    port, _, _ = idle
    for kind, bodies in BODIES.items():
        for number, body in enumerate(bodies):
            headers = f"content-type: {kind}\r\n" if kind else ""
            headers += f"x-program-id: {kind.split(';')[0]} {number}\r\n"
            began = time.perf_counter()
            answer = await ask(port, post(body, path, headers.encode()))
            assert time.perf_counter() - began < 1.0, (kind, number)
            assert answer.status == 200


def hangs_at_audio(otherwise):
    async def answer(request, wire):
        await (hang if b"audio" in request.target else otherwise)(request, wire)

    return answer


async def test_recordings_do_not_keep_engines_from_others(idle):
    port, control, engines = idle
    for engine in engines:
        engine.answer = hangs_at_audio(engine.answer)
    headers = b"content-type: multipart/form-data; boundary=x\r\nx-program-id: a%d\r\n"
    audio = [
        asyncio.create_task(ask(port, post(FORM, "/v1/audio/transcriptions", headers % n)))
        for n in range(2)
    ]
    await until(lambda: sum(len(b.running) for b in control.fleet.backends.values()) == 2)
    began = time.perf_counter()
    assert (await ask(port, turn("small"))).status == 200
    assert time.perf_counter() - began < 1.0
    for task in audio:
        task.cancel()
    await asyncio.gather(*audio, return_exceptions=True)


def test_a_prompt_longer_than_the_longest_context_needs_no_more_than_that():
    desk = Desk([])
    for name in ("e0", "e1"):
        desk.fleet.joined(Backend(name, longest_context=800.0))
        desk.report(name, 60)
    assert desk.send("p", 5000) is None
    assert desk.fleet.blocks_needed(desk.fleet.get("p")) == 50
    assert [name for name, _ in desk.decide()] == ["p"]
    assert sorted(b.room for b in desk.fleet.backends.values()) == [10, 60]


def test_a_prompt_larger_than_every_engine_needs_all_of_the_largest():
    desk = Desk([1000, 300])
    desk.send("p", 5000)
    assert desk.decide() == [("p", "e0")]
    desk.send("q", 5000)
    assert desk.fleet.blocks_needed(desk.fleet.get("q")) == 1000
    assert desk.decide() == []  # it is not squeezed into the small one
    desk.end("p")
    assert desk.decide() == [("q", "e0")]
