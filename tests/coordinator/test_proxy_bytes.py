"""What goes through the proxy comes out as it went in, both ways."""

import asyncio
import gzip
import json
import zlib
from itertools import pairwise

import pytest

from tests.coordinator.fake_engine import FakeEngine, chunked, raw, whole
from tests.coordinator.front import CHAT, Client, ask, post, running_front
from vllm_thunder.program.body import acceptable_body
from vllm_thunder.program.identity import decode_routing_fields

LABELLED = {"model": "m", "program_id": "p", "messages": [{"role": "user", "content": "héllo ☃"}]}


def events(include_usage):
    pieces = [
        b'data: {"choices":[{"delta":{"content":"%d \xe2\x98\x83"}}]}\n\n' % n for n in range(5)
    ]
    if include_usage:
        pieces.append(b'data: {"choices":[],"usage":{"total_tokens":7}}\n\n')
    return [*pieces, b"data: [DONE]\n\n"]


def usage_on_request():
    """Answers as vLLM does: usage only where the request asks for it."""

    async def answer(request, wire):
        options = json.loads(request.body).get("stream_options") or {}
        await chunked(*events(options.get("include_usage")))(request, wire)

    return answer


LARGE = bytes(range(256)) * 20 * 1024

ANSWERS = {
    "json": whole(b'{"a": "\xc3\xa9"}'),
    "error": whole(b'{"error": {"message": "no"}}', b"422 Unprocessable Entity"),
    "events": chunked(*events(True)),
    "slow events": chunked(*events(False), delay=0.01),
    "half events": chunked(b"data: 1", b"\n", b"\ndata: 2\n\n", delay=0.01),
    "5 MB": whole(LARGE, headers=b"content-type: application/octet-stream\r\n"),
    "5 MB in chunks": chunked(*[LARGE[:100_000]] * 50),
    "gzip": whole(
        gzip.compress(b'{"a": 1}' * 100, mtime=0),
        headers=b"content-type: application/json\r\ncontent-encoding: gzip\r\n",
    ),
    "not really gzip": whole(b"plain", headers=b"content-encoding: gzip\r\n"),
    "empty": whole(b""),
    "no content": raw(b"HTTP/1.1 204 No Content\r\nx-a: 1\r\n\r\n"),
    "odd headers": whole(
        b"{}",
        headers=b"X-Mixed: \xff\xe9\xc3\xa9\r\nset-cookie: a=1; Path=/\r\nset-cookie: b=2\r\n"
        b"x-empty:\r\nx-tab: a\tb\r\nX-Mixed: again\r\nx-long: " + b"z" * 20_000 + b"\r\n",
    ),
    "hop by hop": raw(
        b"HTTP/1.1 200 OK\r\nConnection: keep-alive, X-Hop\r\nKeep-Alive: timeout=5\r\nX-Hop: 1\r\n"
        b"Proxy-Authenticate: Basic\r\nx-end: 2\r\ncontent-length: 2\r\n\r\n{}"
    ),
    "until it closes": raw(
        b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\nall of it", lambda w: w.writer.close()
    ),
    "after an interim answer": raw(
        b"HTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\n"
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"
    ),
}

#: What an engine says about its connection to the proxy.
OF_ONE_CONNECTION = {b"keep-alive", b"proxy-authenticate", b"x-hop"}
#: What may differ between an engine's own answer and the one through the proxy.
FRAMING = {b"connection", b"transfer-encoding", *OF_ONE_CONNECTION}


def kept(headers):
    return [(name, value) for name, value in headers if name not in FRAMING]


@pytest.mark.parametrize("label", [True, False], ids=["labelled", "unlabelled"])
@pytest.mark.parametrize("kind", ANSWERS)
async def test_an_answer_is_what_the_engine_sent(kind, label):
    request = post(LABELLED if label else {"model": "m"})
    async with running_front() as front:
        engine = FakeEngine(ANSWERS[kind])
        await front.add(engine)
        direct_client = await Client.to(engine.port)
        direct_client.send(request)
        if kind == "after an interim answer":
            await direct_client.head()
        direct = await direct_client.answer()
        direct_client.leave()
        through = await front.ask(request)
        assert (through.status, through.body, through.whole) == (direct.status, direct.body, True)
        assert kept(through.headers) == kept(direct.headers)
        assert not {name for name, _ in through.headers} & OF_ONE_CONNECTION
        (done,) = front.done
        assert (done.status, done.answer_bytes, done.outcome) == (
            through.status,
            len(through.body),
            "ok",
        )
        assert not front.failures


@pytest.mark.parametrize("status", [b"204 No Content", b"304 Not Modified"])
@pytest.mark.parametrize("path", [CHAT, "/v1/responses/r", "/docs"])
async def test_an_answer_without_a_body_tells_no_length_of_one(path, status):
    """An engine may tell which length the answer would have had."""
    said = raw(b"HTTP/1.1 %b\r\netag: 1\r\ncontent-length: 10\r\n\r\n" % status)
    async with running_front() as front:
        await front.add(FakeEngine(said))
        client = await Client.to(front.port)
        for _ in range(2):
            client.send(post({}, path))
            answer = await client.answer()
            assert (answer.status, answer.headers) == (int(status[:3]), [(b"etag", b"1")])
        client.leave()
        await front.until(lambda: len(front.done) == 2)
        assert {done.outcome for done in front.done} == {"ok"}


@pytest.mark.parametrize("stock", [False, True], ids=["knows programs", "stock"])
@pytest.mark.parametrize("options", [None, {"include_usage": True}, {"include_usage": False}])
async def test_usage_options_change_nothing(options, stock):
    body = {**LABELLED, "stream": True}
    if options is not None:
        body["stream_options"] = options
    async with running_front() as front:
        engine = FakeEngine(usage_on_request())
        await front.add(engine, stock=stock)
        direct = await ask(engine.port, post(body))
        assert (await front.ask(post(body))).body == direct.body
        assert (b"usage" in direct.body) is bool(options and options["include_usage"])


async def test_chunks_come_as_they_are_sent():
    async with running_front() as front:
        pieces = events(False)
        await front.add(FakeEngine(chunked(*pieces, delay=0.05)))
        client = await Client.to(front.port)
        client.send(post({**LABELLED, "stream": True}))
        await client.head()
        loop = asyncio.get_running_loop()
        came = []
        for piece in pieces:
            assert await client.piece() == piece
            came.append(loop.time())
        assert await client.piece() == b""
        assert min(after - before for before, after in pairwise(came)) > 0.02
        client.leave()


async def test_a_slow_client_slows_the_engine():
    sent = 0

    async def endless(request, wire):
        nonlocal sent
        await wire.send(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        while True:
            await wire.send(b"10000\r\n" + b"x" * 65536 + b"\r\n")
            sent += 65536

    async with running_front() as front:
        await front.add(FakeEngine(endless))
        client = await Client.to(front.port)
        client.send(post(LABELLED))
        await client.head()
        client.writer.transport.pause_reading()
        before = -1
        while sent != before:  # until it stands still
            before = sent
            await asyncio.sleep(0.2)
        assert sent < 32 * 1024 * 1024
        client.writer.transport.resume_reading()
        await client.reader.readexactly(20 * 1024 * 1024)
        assert sent > before
        client.leave()


REQUESTS = {
    "plain": post(LABELLED),
    "odd headers": post(
        LABELLED,
        headers=b"content-type: application/json\r\nx-odd: \xff\xe9 \xc3\xa9\r\ncookie: a=1\r\n"
        b"cookie: b=2\r\nx-empty: \r\naccept-encoding: gzip, deflate, br\r\n"
        b"authorization: Bearer client\r\nuser-agent: \xe2\x98\x83\r\nx-request-id: r1\r\n"
        b"traceparent: 00-aa-bb-01\r\n",
    ),
    "no content type": post(b"{}", headers=b""),
    "form": post(
        b"--x\r\n\r\n\xff\x00\r\n--x--",
        "/v1/audio/transcriptions",
        b"content-type: multipart/form-data; boundary=x\r\n",
    ),
    "5 MB": post({**LABELLED, "padding": "☃" * 850_000}),
    "not JSON": post(b"{'a': "),
    "lone surrogate": post(b'{"program_id": "p", "x": "\\ud800"}'),
    "empty": post(b""),
    "gzip": post(
        gzip.compress(json.dumps(LABELLED).encode()),
        headers=b"content-type: application/json\r\ncontent-encoding: gzip\r\n",
    ),
    "path": post(LABELLED, CHAT + "?a=%2F%20b&c=d+e&%C3%A9=%zz"),
}


@pytest.mark.parametrize("kind", REQUESTS)
async def test_a_request_is_what_the_client_sent(kind):
    request = REQUESTS[kind]
    async with running_front() as front:
        engine = FakeEngine()
        await front.add(engine)
        await ask(engine.port, request)
        assert (await front.ask(request)).status == 200
        direct, through = engine.requests
        assert through.body == direct.body
        assert through.target == direct.target
        changed = (b"host", b"content-length", b"x-program-waited")
        assert [h for h in through.headers if h[0] not in changed] == [
            h for h in direct.headers if h[0] not in changed
        ]
        assert through.values(b"host") == [b"127.0.0.1:%d" % engine.port]
        assert through.values(b"content-length") == [b"%d" % len(direct.body)]


async def test_a_percent_encoded_path_keeps_its_bytes():
    """The server decodes ``%2D`` to route the request; the engine gets what was sent."""
    async with running_front() as front:
        engine = FakeEngine()
        await front.add(engine)
        await front.ask(post(LABELLED, "/v1/chat%2Fcompletions?x=%41"))
        await front.ask(b"GET /v1/models/a%2fb%20%C3%A9?q=%2b HTTP/1.1\r\nhost: x\r\n\r\n")
        assert [r.target for r in engine.requests] == [
            b"/v1/chat%2Fcompletions?x=%41",
            b"/v1/models/a%2fb%20%C3%A9?q=%2b",
        ]


async def test_a_body_in_chunks_arrives_whole_and_what_is_about_the_connection_does_not():
    async with running_front() as front:
        engine = FakeEngine()
        await front.add(engine)
        client = await Client.to(front.port)
        client.send(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n"
            b"Connection: keep-alive, X-Mine\r\nX-Mine: 1\r\nKeep-Alive: 5\r\nTE: trailers\r\n"
            b"Proxy-Authorization: secret\r\nProxy-Connection: close\r\nExpect: 100-continue\r\n"
            b"X-Program-Waited: 99\r\nX-Kept: yes\r\nContent-Type: application/json\r\n\r\n"
        )
        assert (await client.head())[0] == 100
        for piece in (b'{"program', b'_id": "p', b'"}'):
            client.send(b"%x\r\n%b\r\n" % (len(piece), piece))
            await asyncio.sleep(0.01)
        client.send(b"0\r\n\r\n")
        assert (await client.answer()).status == 200
        client.leave()
        (request,) = engine.requests
        assert request.body == b'{"program_id": "p"}'
        names = [name for name, _ in request.headers if name != b"x-program-waited"]
        assert names == [b"host", b"x-kept", b"content-type", b"content-length"]
        assert request.values(b"x-program-waited") != [b"99"]
        assert front.done[0].program_id == "p"


async def test_the_label_in_a_gzip_body_is_read():
    async with running_front() as front:
        await front.add(FakeEngine())
        body = json.dumps({"program_id": "a"}).encode()
        for packed in (gzip.compress(body), gzip.compress(body[:7]) + gzip.compress(body[7:])):
            request = post(
                packed, headers=b"content-type: application/json\r\nContent-Encoding: GZIP\r\n"
            )
            assert (await front.ask(request)).status == 200
        request = post(
            b"\x1f\x8bbroken",
            headers=b"content-type: application/json\r\ncontent-encoding: gzip\r\n",
        )
        assert (await front.ask(request)).status == 200
        assert [done.program_id for done in front.done] == ["a", "a", None]


async def test_a_rank_a_key_and_the_wait_are_told_to_the_engine():
    async with running_front(engine_key="engine-key") as front:
        engine = FakeEngine()
        backend = await front.add(engine, rank=3)
        front.report(backend, 1)
        own = (
            b"X-data-parallel-rank: 0\r\nAuthorization: Bearer mine\r\n"
            b"x-program-waited: nonsense\r\n"
        )
        asked = asyncio.create_task(
            front.ask(post(LABELLED, headers=b"content-type: application/json\r\n" + own))
        )
        await front.until(lambda: front.fleet.queue.held_turns)
        await asyncio.sleep(0.1)
        front.report(backend, 1000)
        assert (await asked).status == 200
        (request,) = engine.requests
        assert request.values(b"x-data-parallel-rank") == [b"3"]
        assert request.values(b"authorization") == [b"Bearer engine-key"]
        (waited,) = request.values(b"x-program-waited")
        assert 0.09 < float(waited) < 2.0
        assert front.done[0].queue_seconds == pytest.approx(float(waited), abs=0.05)


async def test_a_rank_of_the_clients_own_is_passed_on_where_engines_have_none():
    async with running_front() as front:
        engine = FakeEngine()
        await front.add(engine)
        await front.ask(post({}, headers=b"X-data-parallel-rank: 1\r\n"))
        assert engine.requests[0].values(b"x-data-parallel-rank") == [b"1"]
        assert engine.requests[0].values(b"x-program-waited") == []


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
@pytest.mark.parametrize("stock", [False, True], ids=["ours", "stock"])
@pytest.mark.parametrize("fits", [False, True], ids=["refused by vLLM", "fits"])
async def test_a_stock_engine_gets_a_body_that_it_accepts(packed, fits, stock):
    body = json.dumps(
        {"session_id": "s"} if fits else {"session_id": 7, "vllm_xargs": {"agentic_context": {}}}
    ).encode()
    sent = zlib.compress(body, wbits=31) if packed else body
    coding = b"content-encoding: gzip\r\n" if packed else b""
    request = post(sent, headers=b"content-type: application/json\r\n" + coding)
    async with running_front() as front:
        engine = FakeEngine()
        await front.add(engine, stock=stock)
        assert (await front.ask(request)).status == 200
        (got,) = engine.requests
        if fits or not stock:
            assert got.body == sent
        else:
            assert got.body == acceptable_body(body, decode_routing_fields(body))
            assert json.loads(got.body) == {"session_id": "7", "vllm_xargs": {}}
        is_packed = packed and got.body == sent
        assert got.values(b"content-encoding") == ([b"gzip"] if is_packed else [])


async def test_one_connection_serves_many_requests():
    async with running_front() as front:
        engine = FakeEngine()
        await front.add(engine)
        client = await Client.to(front.port)
        for _ in range(5):
            client.send(post(LABELLED))
            assert (await client.answer()).body == b"{}"
        client.leave()
        assert len(engine.wires) == 1
        assert len(front.pool) == 1
