"""Engines that break, at every stage of an answer."""

import asyncio
import json

import pytest

from tests.coordinator.fake_engine import FakeEngine, chunked, hang, raw, reset, whole
from tests.coordinator.front import CHAT, Client, post, running_front
from vllm_thunder.coordinator.fleet.backend import Health

LABELLED = {"model": "m", "program_id": "p"}
UNLABELLED = {"model": "m"}
STREAM = {**LABELLED, "stream": True}

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 20\r\n\r\n"


def abort(wire):
    wire.reset()


#: What an engine does that never sends a byte of a body.
LOST_BEFORE_A_BYTE = {
    "resets at once": reset,
    "closes at once": raw(b"", lambda wire: wire.writer.close()),
    "resets after half a head": raw(HEAD[:30], abort),
    "resets after the head": raw(HEAD, abort),
    "closes after the head": raw(HEAD, lambda wire: wire.writer.close()),
    "closes before the first chunk": raw(
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", lambda wire: wire.writer.close()
    ),
    "speaks no HTTP": raw(b"SSH-2.0-x\r\n\r\n"),
    "speaks bad HTTP": raw(b"HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n"),
    "switches protocols": raw(
        b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n"
    ),
}


def prefer_first(front):
    """Give the first engine the most room: then it is the one that requests go to."""
    front.report(next(iter(front.engines)), 5000)


async def engines(front, *answers):
    made = [FakeEngine(answer) for answer in answers]
    for engine in made:
        await front.add(engine)
    return made


@pytest.mark.parametrize("body", [LABELLED, UNLABELLED, STREAM], ids=["labelled", "not", "stream"])
@pytest.mark.parametrize("how", LOST_BEFORE_A_BYTE)
async def test_a_call_goes_elsewhere_while_no_byte_came(how, body):
    async with running_front() as front:
        first, second = await engines(front, LOST_BEFORE_A_BYTE[how], whole(b'"fine"'))
        down = next(iter(front.engines))
        prefer_first(front)
        first.alive = False
        answer = await front.ask(post(body))
        assert (answer.status, answer.body) == (200, b'"fine"')
        assert (len(first.requests), len(second.requests)) == (1, 1)
        assert first.requests[0].body == second.requests[0].body
        assert front.failures == [down]
        (done,) = front.done
        assert (done.attempts, done.backend_id, done.outcome) == (2, "e1", "ok")


@pytest.mark.parametrize("body", [LABELLED, UNLABELLED], ids=["labelled", "unlabelled"])
async def test_an_engine_that_nobody_listens_for_is_passed_over(body):
    async with running_front() as front:
        first, _ = await engines(front, whole(b"1"), whole(b"2"))
        await first.kill()
        prefer_first(front)
        assert (await front.ask(post(body))).body == b"2"
        assert front.done[0].attempts == 2


@pytest.mark.parametrize("body", [LABELLED, UNLABELLED, STREAM], ids=["labelled", "not", "stream"])
@pytest.mark.parametrize("said", [0, 1], ids=["before the head", "after the head"])
@pytest.mark.parametrize("warm", [False, True], ids=["new connection", "old connection"])
async def test_what_hangs_with_an_engine_that_is_declared_down_goes_elsewhere(warm, said, body):
    async def hangs(request, wire):
        if said:
            await wire.send(HEAD)
        await wire.hang()

    async with running_front() as front:
        first, _ = await engines(front, whole(b"{}"), whole(b'"fine"'))
        down = next(iter(front.engines))
        prefer_first(front)
        if warm:
            await front.ask(post(body))
            first.requests.clear()
            front.done.clear()
        first.answer = hangs
        asked = asyncio.create_task(front.ask(post(body)))
        await front.until(lambda: first.requests)
        (wire,) = first.wires
        await asyncio.sleep(0.02)
        front.down(down)
        assert (await asked).body == b'"fine"'
        await asyncio.wait_for(wire.gone.wait(), 5)
        assert front.failures == []  # it is known
        assert (len(first.requests), front.done[0].attempts) == (1, 2)


async def test_what_waits_for_a_connection_goes_elsewhere_when_the_engine_is_declared_down():
    async with running_front(connect_seconds=60.0) as front:
        await engines(front, whole(b"1"), whole(b"2"))
        down = next(iter(front.engines))
        front.report(down, 5000)

        async def never(origin):
            await asyncio.Event().wait()

        connect, front.pool.connect = front.pool.connect, never
        asked = asyncio.create_task(front.ask(post(LABELLED)))
        await front.until(lambda: len(front.proxy.ongoing))
        await asyncio.sleep(0.02)
        front.pool.connect = connect
        front.down(down)
        assert (await asked).body == b"2"


async def test_an_engine_that_does_not_accept_in_time_is_passed_over():
    async with running_front(connect_seconds=0.05) as front:
        await engines(front, whole(b"1"), whole(b"2"))
        slow = next(iter(front.engines))
        front.report(slow, 5000)
        connect = front.pool.connect

        async def sometimes(origin):
            if origin.port == front.engines[slow].port:
                await asyncio.Event().wait()
            return await connect(origin)

        front.pool.connect = sometimes
        front.engines[slow].alive = False
        assert (await front.ask(post(LABELLED))).body == b"2"


async def test_a_held_call_waits_until_an_engine_comes_back():
    async with running_front() as front:
        (engine,) = await engines(front, reset)
        (backend,) = front.engines
        engine.alive = False
        asked = asyncio.create_task(front.ask(post(LABELLED)))
        await front.until(lambda: front.fleet.queue.held_turns)
        await asyncio.sleep(0.02)
        engine.alive, engine.answer = True, whole(b'"back"')
        front.dispatcher.came_up(backend)
        front.report(backend, 1000)
        assert (await asked).body == b'"back"'


async def test_a_call_without_a_program_is_refused_when_no_engine_is_left():
    async with running_front() as front:
        first, second = await engines(front, reset, reset)
        first.alive = second.alive = False
        answer = await front.ask(post(UNLABELLED))
        assert answer.status == 503
        assert "no engine" in answer.json()["error"]["message"]
        assert answer.values(b"retry-after") == [b"1"]
        (done,) = front.done
        assert (done.attempts, done.outcome) == (2, "refused")


@pytest.mark.parametrize("body", [LABELLED, UNLABELLED], ids=["labelled", "unlabelled"])
async def test_a_call_that_engines_lose_although_they_are_up_is_not_sent_for_ever(body):
    async with running_front() as front:
        (engine,) = await engines(front, reset)
        answer = await front.ask(post(body))
        assert answer.status == 502
        assert "3 times" in answer.json()["error"]["message"]
        assert len(engine.requests) == 3
        assert front.done[0].outcome == "refused"


async def test_a_connection_that_the_engine_closed_for_idleness_is_no_failure():
    async def once(request, wire):
        await whole(b"{}")(request, wire)
        wire.stale = True

    async def closing(request, wire):
        """As a server that closes while the request is on its way: read, and nothing said."""
        if getattr(wire, "stale", False):
            wire.reset()
        else:
            await once(request, wire)

    async with running_front() as front:
        (engine,) = await engines(front, closing)
        for body in (LABELLED, UNLABELLED):
            assert (await front.ask(post(body))).body == b"{}"
        assert len(engine.requests) == 3  # the second call was sent twice
        assert front.failures == []
        assert [done.attempts for done in front.done] == [1, 1]


@pytest.mark.parametrize("status", [500, 502, 503, 504])
@pytest.mark.parametrize("body", [LABELLED, UNLABELLED], ids=["labelled", "unlabelled"])
async def test_an_error_of_an_engine_that_is_up_is_its_answer(status, body):
    sick = whole(b'{"error": "mine"}', b"%d Oh" % status)
    async with running_front() as front:
        await engines(front, sick, whole(b"2"))
        prefer_first(front)
        answer = await front.ask(post(body))
        assert (answer.status, answer.body) == (status, b'{"error": "mine"}')
        assert len(front.failures) == 1
        assert (front.done[0].status, front.done[0].outcome) == (status, "ok")


@pytest.mark.parametrize("status", [500, 502, 503, 504])
@pytest.mark.parametrize("body", [LABELLED, UNLABELLED], ids=["labelled", "unlabelled"])
async def test_an_error_of_an_engine_that_is_down_is_nobodys(status, body):
    async with running_front() as front:
        first, _ = await engines(front, whole(b"x", b"%d Oh" % status), whole(b"2"))
        prefer_first(front)
        first.alive = False
        assert (await front.ask(post(body))).body == b"2"
        assert len(front.failures) == 1


@pytest.mark.parametrize("status", [400, 401, 404, 422, 429, 501])
async def test_other_errors_are_passed_on_unasked(status):
    async with running_front() as front:
        await engines(front, whole(b"no", b"%d No" % status))
        assert (await front.ask(post(LABELLED))).status == status
        assert front.failures == []


ENDS = {
    "reset": abort,
    "close": lambda wire: wire.writer.close(),
    "nonsense": lambda wire: wire.writer.write(b"zzz\r\n"),
}


async def test_a_program_whose_first_call_was_wrong_leaves_nothing():
    async with running_front() as front:
        await engines(front, whole(b"no", b"400 No"))
        await front.ask(post(LABELLED))
        assert len(front.fleet) == 0


def last_event(body):
    """Name and data of the last event that is not the end mark, and whether that came."""
    blocks = [block for block in body.decode().split("\n\n") if block]
    done = blocks[-1] == "data: [DONE]"
    lines = dict(line.split(": ", 1) for line in blocks[-2 if done else -1].split("\n"))
    return lines.get("event"), json.loads(lines["data"]), done


@pytest.mark.parametrize("cut", [b"data: 2\n\n", b"data: 2\n", b"data: 2"], ids=repr)
@pytest.mark.parametrize("end", [*ENDS, "abandoned"])
@pytest.mark.parametrize(
    "path", [CHAT, "/v1/completions", "/v1/responses", "/v1/messages", "/cohere/v2/chat"]
)
async def test_a_stream_that_breaks_ends_with_an_error_of_its_endpoint(path, end, cut):
    first = b"data: 1\n\n"
    async with running_front() as front:

        def ends(wire):
            if end == "abandoned":
                front.down(next(iter(front.engines)))
            else:
                ENDS[end](wire)

        (engine,) = await engines(front, chunked(first, cut, end=ends))
        engine.alive = end == "nonsense"
        answer = await front.ask(post(STREAM, path))
        assert (answer.status, answer.whole) == (200, True)
        assert answer.body.startswith(first + cut)
        told = answer.body[len(first + cut) :]
        assert len(told) - len(told.lstrip()) == 2 - cut.count(b"\n")
        event, data, done = last_event(answer.body)
        if path == "/v1/messages":
            assert (event, data["type"], done) == ("error", "error", False)
            message = data["error"]["message"]
        elif path == "/v1/responses":
            assert (event, data["type"], done) == ("error", "error", False)
            message = data["message"]
        elif path == "/cohere/v2/chat":
            assert (event, data["delta"]["finish_reason"], done) == (None, "ERROR", True)
            message = data["delta"]["error"]
        else:
            assert (event, data["error"]["code"], done) == (None, 502, True)
            message = data["error"]["message"]
        assert "lost" in message
        (done_call,) = front.done
        assert (done_call.outcome, done_call.attempts) == ("engine_lost", 1)
        suspects = [] if end == "abandoned" else list(front.engines)
        await front.until(lambda: front.failures == suspects)


@pytest.mark.parametrize("end", ["reset", "close"])
@pytest.mark.parametrize(
    "answer",
    [
        lambda end: raw(HEAD + b"half", end),
        lambda end: chunked(b"half", headers=b"content-type: application/json\r\n", end=end),
        lambda end: chunked(
            b"half",
            headers=b"content-type: text/event-stream\r\ncontent-encoding: gzip\r\n",
            end=end,
        ),
        lambda end: raw(HEAD.replace(b"application/json", b"text/event-stream") + b"half", end),
    ],
    ids=["with a length", "in chunks", "a stream that is packed", "a stream with a length"],
)
async def test_any_other_answer_that_breaks_is_seen_to_be_incomplete(answer, end):
    async with running_front() as front:
        await engines(front, answer(ENDS[end]))
        got = await front.ask(post(LABELLED))
        assert (got.status, got.whole) == (200, False)
        assert got.body.startswith(b"half")
        assert front.done[0].outcome == "engine_lost"
        await front.until(lambda: len(front.failures) == 1)


async def test_an_engine_that_is_declared_down_while_the_client_reads_slowly_is_cut_there():
    async def much(request, wire):
        await wire.send(b"HTTP/1.1 200 OK\r\ncontent-length: 90000000\r\n\r\n")
        await wire.send(b"x" * 30_000_000)

    async with running_front() as front:
        engine, *_ = await engines(front, much)
        (backend,) = front.engines
        client = await Client.to(front.port)
        client.send(post(LABELLED))
        await client.head()
        client.writer.transport.pause_reading()
        (wire,) = engine.wires
        await asyncio.sleep(0.3)  # until everybody waits for the client
        front.down(backend)
        await wire.gone.wait()
        client.writer.transport.resume_reading()
        with pytest.raises(asyncio.IncompleteReadError):
            await client.reader.readexactly(90_000_000)
        client.leave()
        assert front.done[0].outcome == "engine_lost"


async def test_killing_an_engine_under_load_loses_no_call_that_had_no_byte():
    async def slowly(request, wire):
        await asyncio.sleep(0.05)
        await whole(b"{}")(request, wire)

    async with running_front() as front:
        made = await engines(front, slowly, slowly, slowly)
        backends = list(front.engines)

        async def program(name):
            client = await Client.to(front.port)
            for _ in range(6):
                client.send(post({"program_id": name}))
                assert (await client.answer()).status == 200
            client.leave()

        calls = [asyncio.create_task(program(f"p{n}")) for n in range(20)]
        for n in (0, 1, 2, 0):
            await asyncio.sleep(0.06)
            await made[n].kill()
            await asyncio.sleep(0.06)
            if backends[n].health is not Health.DOWN:
                front.down(backends[n])
            await made[n].start()
            front.dispatcher.came_up(backends[n])
            front.report(backends[n], 1000)
        await asyncio.gather(*calls)
        assert len(front.done) == 120
        assert {done.outcome for done in front.done} == {"ok"}
        assert max(done.attempts for done in front.done) > 1


async def test_a_hung_engine_is_hung_for_one_rank_only():
    """Two ranks of one server share its address, not their fate."""
    async with running_front() as front:
        engine = FakeEngine(hang)
        first = await front.add(engine, rank=0)
        client = await Client.to(front.port)
        client.send(post(LABELLED))
        await front.until(lambda: engine.requests)
        engine.answer = whole(b'"other"')
        other = type(first)("other", engine.url, 1)
        front.engines[other] = engine
        front.fleet.joined(other)
        front.report(other, 1000)
        front.down(first)
        assert (await client.answer()).body == b'"other"'
        client.leave()
        assert [r.values(b"x-data-parallel-rank") for r in engine.requests] == [[b"0"], [b"1"]]
