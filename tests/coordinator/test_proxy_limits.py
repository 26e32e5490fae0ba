"""What the coordinator refuses itself, and that nothing comes of it."""

import asyncio
import gzip
import json

import pytest

from tests.coordinator.fake_engine import FakeEngine, hang, reset
from tests.coordinator.front import CHAT, Client, post, running_front

LABELLED = {"model": "m", "program_id": "p"}
PATHS = [CHAT, "/v1/embeddings", "/v1/messages", "/cohere/v2/chat"]


def error_of(answer, path):
    """Message and type as the endpoint tells them; the type is None where it has none."""
    told = answer.json()
    assert answer.values(b"content-type") == [b"application/json"]
    if path == "/v1/messages":
        assert told["type"] == "error"
        return told["error"]["message"], told["error"]["type"]
    if path == "/cohere/v2/chat":
        return told["message"], None
    assert told["error"]["code"] == answer.status
    return told["error"]["message"], told["error"]["type"]


@pytest.mark.parametrize("path", PATHS)
async def test_an_id_that_cannot_be_used_is_a_400(path):
    async with running_front() as front:
        engine = FakeEngine()
        await front.add(engine)
        answer = await front.ask(post({"program_id": [1]}, path))
        assert answer.status == 400
        message, kind = error_of(answer, path)
        assert "program_id" in message
        assert kind in ("BadRequestError", None)
        if path == CHAT:
            assert answer.json()["error"]["param"] == "program_id"
        assert engine.requests == []
        assert len(front.fleet) == 0
        assert front.done[0].outcome == "refused"


@pytest.mark.parametrize("path", PATHS)
async def test_a_declared_length_over_the_limit_is_refused_unread(path):
    async with running_front(max_body_bytes=1000) as front:
        engine = FakeEngine()
        await front.add(engine)
        client = await Client.to(front.port)
        client.send(b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: 1001\r\n\r\n" % path.encode())
        answer = await client.answer()
        assert answer.status == 413
        assert "1000 bytes" in error_of(answer, path)[0]
        client.send(b"x" * 1001 + post({}))  # what was refused is skipped, the next is served
        assert (await client.answer()).status == 200
        client.leave()
        assert len(engine.requests) == 1


async def test_a_body_that_grows_over_the_limit_is_refused():
    async with running_front(max_body_bytes=1000) as front:
        engine = FakeEngine()
        await front.add(engine)
        client = await Client.to(front.port)
        client.send(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        client.send(b"3e8\r\n" + b"x" * 1000 + b"\r\n")
        await asyncio.sleep(0.02)
        client.send(b"1\r\nx\r\n")
        assert (await client.answer()).status == 413
        client.leave()
        assert engine.requests == []


async def test_a_body_at_the_limit_is_served():
    async with running_front(max_body_bytes=1000) as front:
        await front.add(FakeEngine())
        assert (await front.ask(post(b" " * 1000))).status == 200


async def test_a_packed_body_that_unpacks_over_the_limit_is_refused():
    async with running_front(max_body_bytes=1000) as front:
        await front.add(FakeEngine())
        coding = b"content-type: application/json\r\ncontent-encoding: gzip\r\n"
        for size, status in ((1000, 200), (1001, 413), (900_000, 413)):
            request = post(gzip.compress(b" " * size), headers=coding)
            assert (await front.ask(request)).status == status


@pytest.mark.parametrize("path", PATHS)
async def test_a_full_queue_is_a_429_with_a_reason(path):
    async with running_front(max_held_turns=1) as front:
        backend = await front.add(FakeEngine())
        front.report(backend, 0)
        held = asyncio.create_task(front.ask(post(LABELLED)))
        await front.until(lambda: front.fleet.queue.held_turns == 1)
        answer = await front.ask(post({**LABELLED, "program_id": "q"}, path))
        assert answer.status == 429
        assert answer.values(b"retry-after") == [b"1"]
        message, kind = error_of(answer, path)
        assert "limit" in message
        assert kind in ("TooManyRequestsError", None)
        assert len(front.fleet) == 1
        front.report(backend, 1000)
        assert (await held).status == 200


@pytest.mark.parametrize("path", PATHS)
async def test_bodies_that_wait_and_are_too_large_together_are_a_429_with_a_reason(path):
    async with running_front(max_held_bytes=3000) as front:
        backend = await front.add(FakeEngine())
        front.report(backend, 0)
        large = {**LABELLED, "messages": ["x" * 2000]}
        held = asyncio.create_task(front.ask(post(large)))
        await front.until(lambda: front.fleet.queue.held_turns == 1)
        assert front.fleet.queue.held_bytes == len(json.dumps(large))
        answer = await front.ask(post({**large, "program_id": "q"}, path))
        assert answer.status == 429
        assert answer.values(b"retry-after") == [b"1"]
        message, kind = error_of(answer, path)
        assert "3000, the limit" in message
        assert kind in ("TooManyRequestsError", None)
        assert len(front.fleet) == 1
        small = asyncio.create_task(front.ask(post({**LABELLED, "program_id": "r"})))
        await front.until(lambda: front.fleet.queue.held_turns == 2)
        front.report(backend, 1000)
        assert ((await held).status, (await small).status) == (200, 200)
        assert front.fleet.queue.held_bytes == 0


async def test_a_packed_body_counts_as_it_came_and_unpacked():
    async with running_front() as front:
        backend = await front.add(FakeEngine())
        front.report(backend, 0)
        text = json.dumps({**LABELLED, "messages": ["x" * 10_000]}).encode()
        packed = gzip.compress(text)
        headers = b"content-type: application/json\r\ncontent-encoding: gzip\r\n"
        held = asyncio.create_task(front.ask(post(packed, headers=headers)))
        await front.until(lambda: front.fleet.queue.held_turns == 1)
        assert front.fleet.queue.held_bytes == len(text) + len(packed)
        front.report(backend, 1000)
        assert (await held).status == 200


async def test_what_is_sent_again_counts_while_it_waits_again():
    async with running_front() as front:
        engine = FakeEngine(reset)
        backend = await front.add(engine)
        asked = asyncio.create_task(front.ask(post(LABELLED)))
        await front.until(lambda: engine.requests)
        await engine.kill()
        await front.until(lambda: front.fleet.queue.held_turns == 1)
        assert not backend.usable
        assert front.fleet.queue.held_bytes == len(json.dumps(LABELLED))
        await front.add(FakeEngine())
        assert (await asked).status == 200


@pytest.mark.parametrize("path", PATHS)
async def test_without_an_engine_a_call_without_a_program_is_a_503(path):
    async with running_front() as front:
        answer = await front.ask(post({}, path))
        assert answer.status == 503
        assert "no engine" in error_of(answer, path)[0]


async def test_what_is_told_of_a_request():
    async with running_front() as front:
        await front.add(FakeEngine())
        headers = b"content-type: application/json\r\nx-request-id: r-1\r\n"
        request = post(LABELLED, headers=headers)
        await front.ask(request)
        (done,) = front.done
        assert (done.path, done.program_id, done.request_id) == (CHAT, "p", "r-1")
        assert (done.backend_id, done.status, done.outcome) == ("e0", 200, "ok")
        assert done.turn_id
        assert done.prompt_bytes == len(request.split(b"\r\n\r\n", 1)[1])
        assert (done.answer_bytes, done.attempts) == (2, 1)
        assert 0 <= done.queue_seconds < 1
        assert 0 < done.first_byte_seconds <= done.total_seconds < 5


# -- everything but model calls ----------------------------------------------------------


@pytest.mark.parametrize("method", ["GET", "DELETE", "OPTIONS", "HEAD"])
async def test_a_request_without_a_body_is_passed_on(method):
    async with running_front() as front:
        engine = FakeEngine()
        await front.add(engine, rank=2)
        request = f"{method} /v1/models?x=1 HTTP/1.1\r\nhost: x\r\nx-a: \xe9\r\n\r\n"
        for _ in range(2):
            answer = await front.ask(request.encode("latin-1"), has_body=method != "HEAD")
            assert answer.status == 200
            assert answer.body == (b"" if method == "HEAD" else b"{}")
            assert answer.values(b"content-length") == [b"2"]
        for got in engine.requests:
            assert got.head.startswith(method.encode() + b" /v1/models?x=1 HTTP/1.1\r\n")
            assert got.values(b"x-a") == [b"\xe9"]
            assert got.values(b"content-length") == []
        assert [done.status for done in front.done] == [200, 200]


async def test_bodies_stream_both_ways_at_once():
    async def echo(request, wire):
        raise AssertionError("the fake reads whole requests: this one never is")

    async def echoing(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        while data := await reader.readline():
            piece = await reader.readexactly(int(data, 16) + 2)
            writer.write(data + piece)
            if piece == b"\r\n":
                break
        writer.close()

    async with running_front() as front:
        engine = FakeEngine(echo)
        backend = await front.add(engine)
        server = await asyncio.start_server(echoing, "127.0.0.1", 0)
        backend.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        client = await Client.to(front.port)
        client.send(b"PUT /any HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
        for word in (b"one", b"two", b"three"):
            client.send(b"%x\r\n%b\r\n" % (len(word), word))
            if word == b"one":
                await client.head()
            assert await client.piece() == word
        client.send(b"0\r\n\r\n")
        assert await client.piece() == b""
        client.leave()
        server.close()
        await front.until(lambda: front.done)
        assert (front.done[0].prompt_bytes, front.done[0].answer_bytes) == (11, 11)


async def test_an_engine_that_answers_before_it_has_all_is_not_asked_there_again():
    async def early(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 400 No\r\ncontent-length: 2\r\n\r\nno")
        await reader.read()
        writer.close()

    async with running_front() as front:
        backend = await front.add(FakeEngine())
        server = await asyncio.start_server(early, "127.0.0.1", 0)
        backend.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        client = await Client.to(front.port)
        client.send(b"POST /tokenize HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
        client.send(b"2\r\n{}\r\n")
        answer = await client.answer()
        assert (answer.status, answer.body) == (400, b"no")
        client.leave()
        await front.until(lambda: front.done)
        assert len(front.pool) == 0
        server.close()


async def test_a_body_with_a_length_is_passed_on():
    async with running_front() as front:
        engine = FakeEngine()
        await front.add(engine)
        assert (await front.ask(post(b"x" * 3_000_000, "/tokenize"))).status == 200
        assert engine.requests[0].body == b"x" * 3_000_000
        assert engine.requests[0].values(b"content-length") == [b"3000000"]


async def test_any_body_has_the_limit():
    async with running_front(max_body_bytes=1000) as front:
        await front.add(FakeEngine())
        assert (await front.ask(post(b"x" * 1001, "/tokenize"))).status == 413
        client = await Client.to(front.port)
        client.send(b"POST /tokenize HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
        client.send(b"3e9\r\n" + b"x" * 1001 + b"\r\n")
        assert (await client.answer()).status == 413
        client.leave()
        assert front.failures == []


@pytest.mark.parametrize("body", [b"", b"{}"], ids=["without a body", "with one"])
async def test_an_engine_that_does_not_answer_is_a_502(body):
    async with running_front() as front:
        engine = FakeEngine()
        backend = await front.add(engine)
        await engine.kill()
        answer = await front.ask(post(body, "/tokenize"))
        assert answer.status == 502
        assert "e0" in answer.json()["error"]["message"]
        await front.until(lambda: front.failures == [backend])
        assert front.done[0].outcome == "engine_lost"


@pytest.mark.parametrize("body", [b"", b"{}"], ids=["without a body", "with one"])
async def test_a_client_that_leaves_ends_any_request(body):
    async with running_front() as front:
        engine = FakeEngine(hang)
        await front.add(engine)
        client = await Client.to(front.port)
        client.send(post(body, "/tokenize"))
        await front.until(lambda: engine.requests)
        (wire,) = engine.wires
        client.leave()
        await asyncio.wait_for(wire.gone.wait(), 30)
        await front.until(lambda: front.done)
        assert front.done[0].outcome == "client_gone"
        assert front.failures == []


async def test_what_hangs_in_an_engine_that_is_declared_down_is_a_502():
    async with running_front() as front:
        engine = FakeEngine(hang)
        backend = await front.add(engine)
        asked = asyncio.create_task(front.ask(b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n"))
        await front.until(lambda: engine.requests)
        front.down(backend)
        assert (await asked).status == 502
