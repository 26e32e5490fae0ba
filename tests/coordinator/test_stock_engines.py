"""Engines that know no programs, behind a coordinator: their books follow what passes."""

import asyncio
import json
import re
from urllib.parse import urlsplit

import pytest

from tests.coordinator.fake_engine import FakeEngine, chunked, reset, whole
from tests.coordinator.front import ask, post
from tests.coordinator.program_engine import MODELS, coordinator, launch, page, turn, until
from tests.coordinator.test_stock_metrics import vllm_text
from vllm_thunder.coordinator.engines import stock as stock_module

_NOBODY_WAITS = re.compile(r"(?m)^(vllm:num_requests_waiting\{.*\} ).*$")
USAGE = {"prompt_tokens": 480, "completion_tokens": 20, "total_tokens": 500}
LONG_MODELS = {**MODELS, "data": [{**MODELS["data"][0], "max_model_len": 16_000}]}
STREAM = chunked(
    b'data: {"choices": [{"delta": {"content": "a"}}]}\n\n',
    b'data: {"choices": [], "usage": %b}\n\n' % json.dumps(USAGE).encode(),
    b"data: [DONE]\n\n",
    delay=0.02,
)


class StockEngine(FakeEngine):
    """Stock vLLM: 1,000 blocks of 16 tokens, which a context may have all."""

    def __init__(self):
        super().__init__()
        self.answer = self._route
        self.chat = whole(b'{"usage": %b}' % json.dumps(USAGE).encode())

    @property
    def calls(self):
        return [request for request in self.requests if request.target.startswith(b"/v1/chat")]

    async def _route(self, request, wire):
        pages = {
            "/v1/models": json.dumps(LONG_MODELS).encode(),
            "/tokenize": b'{"tokens": [1, 2, 3]}',
            "/metrics": _NOBODY_WAITS.sub(r"\g<1>0.0", vllm_text()).encode(),
            "/health": b"",
            "/pause": b"",
            "/reset_prefix_cache": b"",
        }
        path = urlsplit(request.target.decode()).path
        if path.startswith("/v1/chat"):
            await self.chat(request, wire)
        elif path in pages:
            await whole(pages[path])(request, wire)
        else:
            await whole(b"{}", b"404 Not Found")(request, wire)


@pytest.fixture
async def stock():
    made = [StockEngine(), StockEngine()]
    for engine in made:
        await engine.start()
    yield made
    for engine in made:
        await engine.kill()


async def up(control):
    await until(lambda: sum(b.usable for b in control.fleet.backends.values()) == 2)


@pytest.mark.parametrize("stream", [False, True])
async def test_what_an_answer_says_is_the_programs_context(stock, stream):
    if stream:
        for engine in stock:
            engine.chat = STREAM
    async with coordinator(launch(stock)) as (port, control):
        await up(control)
        assert (await ask(port, turn("p", stream=stream))).status == 200
        await until(lambda: control.fleet.get("p").context_tokens == 500)
        program = control.fleet.get("p")
        assert program.claimed
        assert program.resident_blocks == pytest.approx(500 / 16, abs=1)
        for _ in range(4):
            await ask(port, turn("p", stream=stream))
        assert sorted(len(engine.calls) for engine in stock) == [0, 5]
        described = (await page(port, "/status"))["engines"]
        assert {engine["knows_programs"] for engine in described} == {False}
        assert {engine["capacity_blocks"] for engine in described} == {1000}


@pytest.mark.parametrize("delay", [0.0, 0.1], ids=["before its books tell", "after"])
async def test_of_a_program_whose_only_turn_is_refused_nothing_remains(stock, delay):
    async def refused(request, wire):
        await asyncio.sleep(delay)
        await whole(b'{"error": {"message": "no"}}', b"400 Bad Request")(request, wire)

    for engine in stock:
        engine.chat = refused
    async with coordinator(launch(stock)) as (port, control):
        await up(control)
        assert (await ask(port, turn("p"))).status == 400
        await asyncio.sleep(0.2)
        assert control.fleet.get("p") is None
        assert not any(b.residents or b.placed for b in control.fleet.backends.values())
        for engine in stock:
            engine.chat = whole(b'{"usage": %b}' % json.dumps(USAGE).encode())
        await ask(port, turn("q"))
        await until(lambda: control.fleet.get("q").context_tokens == 500)
        for engine in stock:
            engine.chat = refused
        assert (await ask(port, turn("q"))).status == 400
        await asyncio.sleep(0.2)
        assert control.fleet.get("q").context_tokens == 500
        control.fleet.check_integrity()


async def test_a_release_needs_no_engine(stock):
    async with coordinator(launch(stock)) as (port, control):
        await up(control)
        await ask(port, turn("p"))
        await until(lambda: control.fleet.get("p").claimed)
        released = await ask(port, post({"program_id": "p"}, "/programs/release"))
        assert released.json()["released"] is True
        await asyncio.sleep(0.05)
        assert control.fleet.get("p") is None
        assert not any(b"release" in r.target for engine in stock for r in engine.requests)


async def test_a_label_that_vllm_would_refuse_is_made_acceptable(stock):
    async with coordinator(launch(stock)) as (port, control):
        await up(control)
        body = {"model": "m", "messages": [], "session_id": 7}
        assert (await ask(port, post(body))).status == 200
        (call,) = [call for engine in stock for call in engine.calls]
        assert json.loads(call.body) == {**body, "session_id": "7"}


EVENTS = [b"data: %d\n\n" % number for number in range(20)]
BROKEN = {
    "an error": whole(b"busy", b"503 Service Unavailable"),
    "no metrics": whole(b"<html>"),
    "no answer": reset,
}


@pytest.mark.parametrize("times", [1, 3, 1000])
@pytest.mark.parametrize("how", BROKEN)
async def test_a_few_lost_answers_of_a_server_that_is_well_cut_nothing(
    stock, how, times, monkeypatch
):
    monkeypatch.setattr(stock_module, "_ASK_SECONDS", 0.05)
    (engine, *_) = stock
    routed, left = engine.answer, 0

    async def answer(request, wire):
        nonlocal left
        if request.target == b"/metrics" and left:
            left -= 1
            await BROKEN[how](request, wire)
        else:
            await routed(request, wire)

    engine.answer = answer
    engine.chat = chunked(*EVENTS, delay=0.05)
    async with coordinator(launch([engine])) as (port, control):
        (backend,) = control.fleet.backends.values()
        await until(lambda: backend.usable)
        running = asyncio.create_task(ask(port, turn("p", stream=True)))
        await until(lambda: backend.running)
        await asyncio.sleep(0.1)
        left = times
        streamed = await running
        if times == 1000:
            assert not backend.usable
            assert streamed.body != b"".join(EVENTS)
        else:
            assert left == 0
            assert backend.usable
            assert streamed.body == b"".join(EVENTS)


@pytest.mark.parametrize("how", ["/weight_sync/end", "/reset_prefix_cache", "/pause"])
async def test_new_weights_and_a_reset_empty_the_books_caches(stock, how):
    async with coordinator(launch(stock)) as (port, control):
        await up(control)
        await ask(port, turn("p"))
        await until(lambda: control.fleet.get("p").resident_blocks)
        assert (await ask(port, post({}, how))).status == 200
        await until(lambda: control.fleet.get("p").resident_blocks == 0)


@pytest.mark.parametrize("query", ["mode=keep", "clear_cache=false", "mode=wait&clear_cache=0"])
async def test_a_pause_that_keeps_the_caches_keeps_the_books(stock, query):
    async with coordinator(launch(stock)) as (port, control):
        await up(control)
        await ask(port, turn("p"))
        await until(lambda: control.fleet.get("p").resident_blocks)
        assert (await ask(port, post({}, f"/pause?{query}"))).status == 200
        await asyncio.sleep(0.1)
        assert control.fleet.get("p").resident_blocks


async def test_programs_that_do_not_fit_wait_here(stock):
    """1,000 blocks hold 16,000 tokens: two contexts of 8,000 fill an engine."""
    large = {"prompt_tokens": 7900, "completion_tokens": 100, "total_tokens": 8000}
    for engine in stock:
        engine.chat = chunked(
            b'data: {"choices": [], "usage": %b}\n\n' % json.dumps(large).encode(), delay=0.3
        )
    prompt = [{"role": "user", "content": "x" * 31_000}]
    async with coordinator(launch(stock)) as (port, control):
        await up(control)
        turns = [
            asyncio.create_task(ask(port, turn(f"p{n}", stream=True, messages=prompt)))
            for n in range(5)
        ]
        await until(lambda: control.fleet.queue.held_turns)
        assert max(len(engine.calls) for engine in stock) <= 2
        assert [answer.status for answer in await asyncio.gather(*turns)] == [200] * 5
