"""Clients that leave, at every stage, and streams that are kept open until there is an answer."""

import asyncio
import gzip
import json
import zlib

import pytest

from tests.coordinator.fake_engine import FakeEngine, chunked, hang, raw, whole
from tests.coordinator.front import CHAT, Client, post, running_front

LABELLED = {"model": "m", "program_id": "p"}
STREAM = {**LABELLED, "stream": True}
COMMENT = b": keep-alive\n\n"


async def begins(request, wire):
    await wire.send(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n")
    await wire.send(b"transfer-encoding: chunked\r\n\r\n")
    await wire.hang()


async def goes_on(request, wire):
    await wire.send(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n")
    await wire.send(b"transfer-encoding: chunked\r\n\r\n")
    while not wire.reader.at_eof():
        await wire.send(b"9\r\ndata: 1\n\n\r\n")
        await asyncio.sleep(0.01)


STAGES = {"before the head": hang, "after the head": begins, "while it streams": goes_on}


@pytest.mark.parametrize("keepalive", [15.0, 0.02], ids=["silent", "with comments"])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "plain"])
@pytest.mark.parametrize("label", [True, False], ids=["labelled", "unlabelled"])
@pytest.mark.parametrize("stage", STAGES)
async def test_a_client_that_leaves_ends_its_request_at_the_engine(stage, label, stream, keepalive):
    body = {"stream": stream, **(LABELLED if label else {})}
    async with running_front(keepalive_seconds=keepalive) as front:
        engine = FakeEngine(STAGES[stage])
        (backend,) = [await front.add(engine)]
        client = await Client.to(front.port)
        client.send(post(body))
        await front.until(lambda: engine.requests)
        if stage == "while it streams":
            await client.head()
            for _ in range(3):
                await client.piece()
        await asyncio.sleep(0.05)
        assert len(backend.running) + backend.unlabelled == 1
        (wire,) = engine.wires
        client.leave()
        await asyncio.wait_for(wire.gone.wait(), 30)
        await front.until(lambda: front.done)
        assert front.done[0].outcome == "client_gone"
        assert not backend.running
        assert not backend.unlabelled
        assert front.failures == []
        assert len(front.pool) == 0


@pytest.mark.parametrize("keepalive", [15.0, 0.02], ids=["silent", "with comments"])
async def test_a_client_that_leaves_while_it_is_held_leaves_nothing(keepalive):
    async with running_front(keepalive_seconds=keepalive) as front:
        engine = FakeEngine()
        backend = await front.add(engine)
        front.report(backend, 0)
        clients = [await Client.to(front.port) for _ in range(20)]
        for number, client in enumerate(clients):
            client.send(post({**STREAM, "program_id": f"p{number % 7}"}))
        await front.until(lambda: front.fleet.queue.held_turns == 20)
        await asyncio.sleep(0.05)
        for client in clients:
            client.leave()
        await front.until(lambda: len(front.done) == 20)
        assert {done.outcome for done in front.done} == {"client_gone"}
        assert {done.status for done in front.done} == {200 if keepalive < 1 else 0}
        assert engine.requests == []
        assert front.fleet.queue.held_turns == 0


async def test_a_client_that_leaves_while_its_engine_is_looked_at_leaves_nothing():
    looked = asyncio.Event()

    async with running_front() as front:

        async def looks_for_ever(backend):
            looked.set()
            await asyncio.Event().wait()

        front.proxy.on_failure = looks_for_ever
        await front.add(FakeEngine(whole(b"", b"500 Oh")))
        client = await Client.to(front.port)
        client.send(post(LABELLED))
        await looked.wait()
        client.leave()
        await front.until(lambda: front.done)
        assert front.done[0].outcome == "client_gone"


async def test_a_client_that_leaves_before_its_request_is_whole_leaves_nothing():
    async with running_front() as front:
        engine = FakeEngine()
        await front.add(engine)
        client = await Client.to(front.port)
        client.send(post(LABELLED)[:-5])
        await asyncio.sleep(0.05)
        client.leave()
        await front.until(lambda: front.done)
        assert front.done[0].outcome == "client_gone"
        assert engine.requests == []
        assert len(front.fleet) == 0


async def test_leaving_again_and_again_leaks_nothing():
    async with running_front() as front:
        engine = FakeEngine(goes_on)
        await front.add(engine)
        for _ in range(50):
            client = await Client.to(front.port)
            client.send(post(STREAM))
            await client.head()
            await client.piece()
            client.leave()
        await front.until(lambda: len(front.done) == 50 and not engine.wires)
        assert len(front.fleet) == 1


async def test_a_turn_that_was_cancelled_while_held_can_be_sent_again():
    async with running_front() as front:
        backend = await front.add(FakeEngine())
        front.report(backend, 0)
        client = await Client.to(front.port)
        client.send(post(LABELLED))
        await front.until(lambda: front.fleet.queue.held_turns)
        client.leave()
        await front.until(lambda: not front.fleet.queue.held_turns)
        asked = asyncio.create_task(front.ask(post(LABELLED)))
        await front.until(lambda: front.fleet.queue.held_turns)
        front.report(backend, 1000)
        assert (await asked).status == 200
        assert front.done[-1].attempts == 1


# -- streams that are kept open ----------------------------------------------------------


async def held_stream(front, backend, engine_says, path=CHAT):
    """The body of a stream that was held until three comments had come."""
    front.report(backend, 0)
    front.engines[backend].answer = engine_says
    client = await Client.to(front.port)
    client.send(post(STREAM, path))
    status, headers = await client.head()
    assert (status, headers) == (
        200,
        [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"transfer-encoding", b"chunked"),
        ],
    )
    for _ in range(3):
        assert await client.piece() == COMMENT
    front.report(backend, 1000)
    body = b""
    while piece := await client.piece():
        body += piece
    client.leave()
    return body.replace(COMMENT, b"")


async def test_a_held_stream_is_kept_open_and_then_goes_on_as_the_engine_says():
    async with running_front(keepalive_seconds=0.02) as front:
        backend = await front.add(FakeEngine())
        pieces = [b"data: 1\n\n", b"data: [DONE]\n\n"]
        assert await held_stream(front, backend, chunked(*pieces)) == b"".join(pieces)
        (done,) = front.done
        assert (done.status, done.outcome) == (200, "ok")
        assert done.answer_bytes == len(b"".join(pieces))
        assert done.queue_seconds > 0.05


async def test_no_comment_comes_between_the_events_of_an_engine():
    async with running_front(keepalive_seconds=0.02) as front:
        pieces = [b"data: %d\n\n" % n for n in range(4)]
        await front.add(FakeEngine(chunked(*pieces, delay=0.1)))
        answer = await front.ask(post(STREAM))
        comments, _, events = answer.body.partition(pieces[0])
        assert comments.startswith(COMMENT)
        assert events == b"".join(pieces[1:])


@pytest.mark.parametrize("said", [hang, begins], ids=["no head", "no body"])
async def test_a_stream_is_kept_open_while_the_engine_is_silent(said):
    async def late(request, wire):
        if said is begins:
            await wire.send(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n")
            await wire.send(b"content-length: 9\r\n\r\n")
        await asyncio.sleep(0.2)
        if said is hang:
            await chunked(b"data: 1\n\n")(request, wire)
        else:
            await wire.send(b"data: 1\n\n")

    async with running_front(keepalive_seconds=0.05) as front:
        await front.add(FakeEngine(late))
        answer = await front.ask(post(STREAM))
        assert answer.body.count(COMMENT) >= 2
        assert answer.body.replace(COMMENT, b"") == b"data: 1\n\n"
        assert answer.body.endswith(b"data: 1\n\n")


@pytest.mark.parametrize("body", [LABELLED, {**LABELLED, "stream": False}])
async def test_other_answers_are_not_begun_before_they_come(body):
    async with running_front(keepalive_seconds=0.02) as front:
        engine = FakeEngine(whole(b"no", b"418 Teapot"))
        backend = await front.add(engine)
        front.report(backend, 0)
        asked = asyncio.create_task(front.ask(post(body)))
        await front.until(lambda: front.fleet.queue.held_turns)
        await asyncio.sleep(0.1)
        front.report(backend, 1000)
        answer = await asked
        assert (answer.status, answer.body) == (418, b"no")


ERRORS = {
    "OpenAI's": b'{"error": {"message": "too long", "type": "T", "param": "p", "code": 400}}',
    "Anthropic's": b'{"type": "error", "error": {"type": "T", "message": "too long"}}',
    "Cohere's": b'{"message": "too long"}',
    "text": b'{"error": "too long"}',
    "no JSON": b"too long",
}


@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize("path", [CHAT, "/v1/responses", "/v1/messages", "/cohere/v2/chat"])
async def test_an_error_after_a_stream_has_begun_is_an_event_of_the_endpoint(path, kind):
    async with running_front(keepalive_seconds=0.02) as front:
        backend = await front.add(FakeEngine())
        body = await held_stream(front, backend, whole(ERRORS[kind], b"400 Bad"), path)
        first, *rest = body.decode().split("\n\n")
        data = json.loads(first.split("data: ")[1])
        if path == CHAT:
            message, named = data["error"]["message"], data["error"]["code"]
            assert named == 400
            assert rest == ["data: [DONE]", ""]
            if kind == "OpenAI's":
                assert data == json.loads(ERRORS[kind])
        elif path == "/v1/responses":
            assert first.startswith("event: error\n")
            assert data["code"] == "400"
            message = data["message"]
        elif path == "/v1/messages":
            assert first.startswith("event: error\n")
            assert data["type"] == "error"
            message = data["error"]["message"]
        else:
            message = data["delta"]["error"]
            assert rest == ["data: [DONE]", ""]
        assert message == "too long"


def unpackable(body):
    return b"br", b"???"


PACKED = {
    "gzip": lambda body: (b"GZIP", gzip.compress(body)),
    "deflate": lambda body: (b"deflate", zlib.compress(body)),
    "identity": lambda body: (b"identity", body),
    "unknown": unpackable,
}


@pytest.mark.parametrize("how", PACKED)
async def test_a_packed_error_after_a_stream_has_begun_is_told_unpacked(how):
    coding, body = PACKED[how](ERRORS["OpenAI's"])
    headers = b"content-type: application/json\r\ncontent-encoding: %b\r\n" % coding
    async with running_front(keepalive_seconds=0.02) as front:
        backend = await front.add(FakeEngine())
        told = await held_stream(front, backend, whole(body, b"400 Bad", headers))
        error = json.loads(told.split(b"\n\n")[0][6:])["error"]
        assert error["code"] == 400
        assert error["message"] == ("too long" if how != "unknown" else STATUS_400)
        assert front.failures == []


STATUS_400 = "the engine answered with status 400"

WHOLE = {
    "compact": b'{"id":"resp_1","status":"queued"}',
    "indented": b'{\n  "id": "resp_1",\r\n  "status": "queued"\n}\n',
    "3 MB": json.dumps({"id": "x" * 3_000_000}).encode(),
    "empty": b"",
}


@pytest.mark.parametrize("how", PACKED)
@pytest.mark.parametrize("kind", WHOLE)
@pytest.mark.parametrize("path", [CHAT, "/v1/responses", "/v1/messages", "/invocations"])
async def test_a_whole_answer_after_a_stream_has_begun_is_its_event(path, kind, how):
    coding, body = PACKED[how](WHOLE[kind])
    headers = b"content-type: application/json\r\ncontent-encoding: %b\r\n" % coding
    async with running_front(keepalive_seconds=0.02) as front:
        backend = await front.add(FakeEngine())
        body = await held_stream(front, backend, whole(body, headers=headers), path)
        if how == "unknown":
            assert b"content coding" in body
            assert front.done[0].outcome == "engine_lost"
            return
        first, *rest = body.split(b"\n\n")
        lines = [line.removeprefix(b"data: ") for line in first.split(b"\n")]
        assert all(line.startswith(b"data: ") for line in first.split(b"\n"))
        assert b"\n".join(lines).split() == WHOLE[kind].split()
        has_end = path in (CHAT, "/invocations")
        assert rest == ([b"data: [DONE]", b""] if has_end else [b""])
        assert front.done[0].outcome == "ok"


async def test_a_whole_answer_that_breaks_after_a_stream_has_begun_is_an_error():
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 9\r\n\r\n{"
    async with running_front(keepalive_seconds=0.02) as front:
        backend = await front.add(FakeEngine())
        body = await held_stream(front, backend, raw(head, lambda wire: wire.reset()))
        error = json.loads(body.split(b"\n\n")[0][6:])["error"]
        assert error["code"] == 502
        assert front.done[0].outcome in ("engine_lost", "refused")


async def test_a_packed_stream_goes_on_unpacked_where_it_has_begun():
    async with running_front(keepalive_seconds=0.02) as front:
        backend = await front.add(FakeEngine())
        packed = gzip.compress(b"data: 1\n\n" * 100)
        headers = b"content-type: text/event-stream\r\ncontent-encoding: %b\r\n"
        said = chunked(packed[:20], packed[20:], headers=headers % b"gzip")
        assert await held_stream(front, backend, said) == b"data: 1\n\n" * 100
        said = chunked(b"???", headers=headers % b"br")
        assert b"content coding" in await held_stream(front, backend, said)


async def test_a_stream_that_has_begun_with_comments_still_goes_elsewhere():
    async with running_front(keepalive_seconds=0.02) as front:
        first, second = FakeEngine(hang), FakeEngine(chunked(b"data: 2\n\n"))
        backend = await front.add(first)
        await front.add(second)
        front.report(backend, 5000)
        client = await Client.to(front.port)
        client.send(post(STREAM))
        await client.head()
        assert await client.piece() == COMMENT
        assert len(first.requests) == 1
        front.down(backend)
        body = b""
        while piece := await client.piece():
            body += piece
        client.leave()
        assert body.replace(COMMENT, b"") == b"data: 2\n\n"
        assert front.done[0].attempts == 2


async def test_a_stream_that_has_begun_with_comments_is_refused_by_an_event():
    async def late_reset(request, wire):
        await asyncio.sleep(0.1)
        wire.reset()

    async with running_front(keepalive_seconds=0.02) as front:
        engine = FakeEngine(late_reset)
        await front.add(engine)
        engine.alive = False
        answer = await front.ask(post({"stream": True}))
        assert (answer.status, answer.whole) == (200, True)
        told = answer.body.replace(COMMENT, b"")
        assert told.endswith(b"\n\ndata: [DONE]\n\n")
        assert json.loads(told.split(b"\n\n")[0][6:])["error"]["code"] == 503
        assert front.done[0].outcome == "refused"


async def test_an_answer_that_comes_in_pieces_is_whole_before_it_decides():
    """The head of an error comes before the first comment, its body after."""
    head = b"HTTP/1.1 400 Bad\r\ncontent-length: 2\r\n\r\nn"

    async def slowly(request, wire):
        await raw(head)(request, wire)
        await asyncio.sleep(0.1)
        await wire.send(b"o")

    async with running_front(keepalive_seconds=0.05) as front:
        await front.add(FakeEngine(slowly))
        answer = await front.ask(post(STREAM))
        assert answer.status == 200
        assert b'"message":"no"' in answer.body
