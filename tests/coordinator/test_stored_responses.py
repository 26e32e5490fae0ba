"""Stored responses are found at the engine that made them, and only there."""

import asyncio
import json

import pytest

from tests.coordinator.fake_engine import FakeEngine, chunked, hang, reset, whole
from tests.coordinator.front import Client, ask, post, running_front
from tests.coordinator.program_engine import coordinator, launch, until_up
from vllm_thunder.coordinator.config import CoordinatorConfig
from vllm_thunder.program.report import EngineReport, ProgramReport

UNKNOWN = whole(b'{"error": {"message": "no such response"}}', b"404 Not Found")
STORED = whole(b'{"id":  "resp_1"}', headers=b"content-type: application/json\r\nx-own: 1\r\n")
PATH = "/v1/responses/resp_1"
REQUESTS = {
    "retrieved": b"GET %b HTTP/1.1\r\nhost: x\r\n\r\n" % PATH.encode(),
    "deleted": b"DELETE %b HTTP/1.1\r\nhost: x\r\n\r\n" % PATH.encode(),
    "cancelled": post(b"", PATH + "/cancel"),
    "cancelled with a body": post({"why": "x" * 100_000}, PATH + "/cancel"),
}


async def started(front, *answers):
    engines = [FakeEngine(answer) for answer in answers]
    for engine in engines:
        await front.add(engine)
    return engines


@pytest.mark.parametrize("request_bytes", REQUESTS.values(), ids=list(REQUESTS))
@pytest.mark.parametrize("at", [0, 1, 2])
async def test_the_engine_that_knows_it_answers(request_bytes, at):
    async with running_front() as front:
        answers = [UNKNOWN] * 3
        answers[at] = STORED
        engines = await started(front, *answers)
        for _ in range(2):
            answer = await front.ask(request_bytes)
            assert (answer.status, answer.body) == (200, b'{"id":  "resp_1"}')
            assert answer.values(b"x-own") == [b"1"]
        assert [len(engine.requests) for engine in engines] == [2] * (at + 1) + [0] * (2 - at)
        head, _, body = request_bytes.partition(b"\r\n\r\n")
        for request in (request for engine in engines for request in engine.requests):
            assert request.head.split(b"\r\n")[0] == head.split(b"\r\n")[0]
            assert request.body == body
        assert {(done.attempts, done.outcome) for done in front.done} == {(1, "ok")}
        assert all(len(engine.wires) <= 1 for engine in engines)  # connections are used again


async def test_what_nobody_knows_is_the_engines_own_404():
    async with running_front() as front:
        await started(front, UNKNOWN, UNKNOWN)
        answer = await front.ask(REQUESTS["retrieved"])
        assert (answer.status, answer.json()["error"]["message"]) == (404, "no such response")
        assert front.failures == []


@pytest.mark.parametrize("status", [b"400 Bad Request", b"405 Method Not Allowed", b"500 No"])
async def test_any_other_answer_is_passed_on(status):
    async with running_front() as front:
        engines = await started(front, whole(b"{}", status), STORED)
        answer = await front.ask(REQUESTS["deleted"])
        assert (answer.status, answer.body) == (int(status[:3]), b"{}")
        assert engines[1].requests == []


async def test_a_stream_is_passed_on_as_it_comes():
    async with running_front() as front:
        more = asyncio.Event()

        async def stream(request, wire):
            await chunked(b"data: 1\n\n", end=lambda wire: None)(request, wire)
            await more.wait()
            await wire.send(b"9\r\ndata: 2\n\n\r\n0\r\n\r\n")

        await started(front, UNKNOWN, stream)
        client = await Client.to(front.port)
        client.send(b"GET %b?stream=true HTTP/1.1\r\nhost: x\r\n\r\n" % PATH.encode())
        assert (await client.head())[0] == 200
        assert await client.piece() == b"data: 1\n\n"
        more.set()
        assert await client.piece() == b"data: 2\n\n"
        assert await client.piece() == b""
        client.leave()


async def test_a_stream_that_is_cut_ends_with_an_error():
    async with running_front() as front:
        await started(front, UNKNOWN, chunked(b"data: 1\n\n", end=lambda wire: wire.reset()))
        answer = await front.ask(REQUESTS["retrieved"])
        assert answer.body.startswith(b"data: 1\n\nevent: error\n")
        await front.until(lambda: front.failures)
        assert front.done[0].outcome == "engine_lost"


@pytest.mark.parametrize("others", [[UNKNOWN, STORED], [STORED, UNKNOWN]])
@pytest.mark.parametrize("how", ["dead", "declared down", "resets"])
async def test_an_engine_that_is_lost_does_not_keep_the_others_from_answering(others, how):
    async with running_front() as front:
        engines = await started(front, reset, *others)
        lost = next(iter(front.engines))
        if how != "resets":
            await engines[0].kill()
        if how == "declared down":
            front.down(lost)
        assert (await front.ask(REQUESTS["retrieved"])).status == 200
        if how != "declared down":
            await front.until(lambda: front.failures == [lost])


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("how", ["dead", "declared down", "resets", "hangs", "goes down with 503"])
async def test_what_a_lost_engine_may_know_is_a_502_that_names_it(at, how):
    async with running_front() as front:
        answers = [UNKNOWN, UNKNOWN]
        going_down = whole(b"{}", b"503 Service Unavailable")
        answers[at] = {"hangs": hang, "goes down with 503": going_down}.get(how, reset)
        engines = await started(front, *answers)
        lost = list(front.engines)[at]
        if how in ("dead", "declared down"):
            await engines[at].kill()
        if how == "declared down":
            front.down(lost)
        if how == "goes down with 503":
            engines[at].alive = False
        asked = asyncio.create_task(front.ask(REQUESTS["retrieved"]))
        if how == "hangs":
            await front.until(lambda: engines[at].requests)
            front.down(lost)
        answer = await asked
        assert answer.status == 502
        message = answer.json()["error"]["message"]
        assert lost.backend_id in message
        assert list(front.engines)[1 - at].backend_id not in message
        await front.until(lambda: front.done)
        assert front.done[0].outcome == "engine_lost"


async def test_without_an_engine_it_is_a_503():
    async with running_front() as front:
        assert (await front.ask(REQUESTS["retrieved"])).status == 503
        (engine,) = await started(front, STORED)
        front.down(next(iter(front.engines)))
        assert (await front.ask(REQUESTS["retrieved"])).status == 503
        assert engine.requests == []


async def test_the_ranks_of_a_server_are_asked_once():
    async with running_front() as front:
        (engine,) = await started(front, UNKNOWN)
        second = await front.add(FakeEngine(), rank=1)
        second.url = engine.url
        assert (await front.ask(REQUESTS["retrieved"])).status == 404
        assert len(engine.requests) == 1


@pytest.mark.parametrize("chunks", [False, True], ids=["declared", "in chunks"])
async def test_a_body_over_the_limit_is_refused(chunks):
    async with running_front(max_body_bytes=1000) as front:
        engines = await started(front, STORED)
        request = post(b"x" * 1001, PATH + "/cancel")
        if chunks:
            head = b"POST %b/cancel HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
            request = head % PATH.encode() + b"3e9\r\n" + b"x" * 1001 + b"\r\n0\r\n\r\n"
        assert (await front.ask(request)).status == 413
        assert engines[0].requests == []


async def test_a_client_that_leaves_ends_it():
    async with running_front() as front:
        engines = await started(front, UNKNOWN, hang)
        client = await Client.to(front.port)
        client.send(REQUESTS["retrieved"])
        await front.until(lambda: engines[1].requests)
        (wire,) = engines[1].wires
        client.leave()
        await asyncio.wait_for(wire.gone.wait(), 30)
        await front.until(lambda: front.done)
        assert (front.done[0].outcome, front.failures) == ("client_gone", [])


async def test_the_coordinator_asks_every_engine(engines):
    def route(engine, stored):
        routed = engine.answer

        async def answer(request, wire):
            about = request.target.startswith(b"/v1/responses/")
            await ((STORED if stored else UNKNOWN) if about else routed)(request, wire)

        engine.answer = answer

    config = CoordinatorConfig(engine_timeout=1.0)
    async with coordinator(launch(engines, config)) as (port, control):
        await until_up(control, 2)
        for stored_at in (0, 1):
            for n, engine in enumerate(engines):
                route(engine, n == stored_at)
            for request in REQUESTS.values():
                answer = await ask(port, request)
                assert answer.status == 200
                assert json.loads(answer.body) == {"id": "resp_1"}


# -- calls that go on from a stored response -------------------------------------------

RESPONSES = "/v1/responses"


def knows(stored, answer=STORED):
    """An engine that serves what goes on from nothing, and from its own responses."""

    async def serve(request, wire):
        previous = json.loads(request.body).get("previous_response_id")
        await (answer if previous in (None, stored) else UNKNOWN)(request, wire)

    return serve


def told(front, named, at):
    """The engine tells what it has of the program."""
    backend = list(front.engines)[at]
    programs = [ProgramReport("p", 160, 10, True)] if named else []
    report = EngineReport("1", False, True, backend.report, programs, [])
    front.dispatcher.reported(backend, report)


def call(named, previous="resp_1", **fields):
    return post({"model": "m", "previous_response_id": previous, **named, **fields}, RESPONSES)


NAMED = pytest.mark.parametrize("named", [{"program_id": "p"}, {}], ids=["program", "none"])


@NAMED
@pytest.mark.parametrize("at", [0, 1, 2])
async def test_a_call_goes_on_where_its_response_is(named, at):
    async with running_front() as front:
        engines = await started(front, *(knows("resp_1" if n == at else "x") for n in range(3)))
        for _ in range(3):
            answer = await front.ask(call(named))
            assert (answer.status, answer.body) == (200, b'{"id":  "resp_1"}')
            told(front, named, at)
        assert len(engines[at].requests) == 3
        assert all(len(engine.requests) <= (1 if named else 3) for engine in engines[:at])
        assert {(done.attempts, done.backend_id) for done in front.done} == {(1, f"e{at}")}
        if named:  # its later turns were sent there at once
            assert front.fleet.get("p").home is list(front.engines)[at]


@NAMED
async def test_what_no_engine_has_is_the_engines_own_404_and_nothing_moves(named):
    async with running_front() as front:
        engines = await started(front, knows("x"), knows("y"))
        assert (await front.ask(call(named, None))).status == 200
        home = front.fleet.get("p").home if named else None
        told(front, named, list(front.engines).index(home) if named else 0)
        answer = await front.ask(call(named))
        assert (answer.status, answer.json()["error"]["message"]) == (404, "no such response")
        assert sum(len(engine.requests) for engine in engines) == 3
        if named:
            assert front.fleet.get("p").home is home
            assert front.fleet.counts.moves == 0


@NAMED
async def test_a_404_of_any_other_call_is_passed_on_at_once(named):
    async with running_front() as front:
        engines = await started(front, UNKNOWN, UNKNOWN)
        for request in (call(named, None), post({"previous_response_id": "x", **named})):
            before = sum(len(engine.requests) for engine in engines)
            assert (await front.ask(request)).status == 404
            assert sum(len(engine.requests) for engine in engines) == before + 1


@NAMED
async def test_a_stream_goes_on_where_its_response_is(named):
    async with running_front(keepalive_seconds=0.02) as front:

        async def slow(request, wire):
            await asyncio.sleep(0.1)  # a comment has gone out by then
            await chunked(b"data: 1\n\n")(request, wire)

        await started(front, knows("x"), knows("resp_1", slow))
        answer = await front.ask(call(named, stream=True))
        assert answer.status == 200
        assert answer.body.endswith(b"\n\ndata: 1\n\n")
        assert b"error" not in answer.body


@NAMED
async def test_an_engine_that_is_lost_does_not_keep_a_call_from_its_response(named):
    async with running_front() as front:
        engines = await started(front, knows("x"), reset, knows("resp_1"))
        engines[1].alive = False
        assert (await front.ask(call(named))).status == 200
        assert len(engines[2].requests) == 1


async def test_a_client_that_leaves_while_its_response_is_looked_for_leaves_nothing():
    async with running_front() as front:
        engines = await started(front, knows("x"), hang)
        client = await Client.to(front.port)
        client.send(call({"program_id": "p"}))
        await front.until(lambda: engines[1].requests)
        client.leave()
        await front.until(lambda: front.done)
        assert front.done[0].outcome == "client_gone"
