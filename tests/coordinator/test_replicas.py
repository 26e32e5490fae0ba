"""Coordinators that share programs: whichever a request comes to, one of them has its program."""

import asyncio
import gzip
import json

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import format_span_id

from tests.coordinator.fake_engine import chunked, raw, whole
from tests.coordinator.front import CHAT, Client, ask, post
from tests.coordinator.program_engine import ProgramEngine, get, page, turn, until
from tests.coordinator.replica_set import all_alive, replica_set
from vllm_thunder.coordinator.config import CoordinatorConfig
from vllm_thunder.coordinator.replicas import replicas as replicas_module
from vllm_thunder.coordinator.tracing import Tracing
from vllm_thunder.program.report import ProgramReport

JSON = b"content-type: application/json\r\n"


@pytest.fixture(autouse=True)
def _quick_looks(monkeypatch):
    monkeypatch.setattr(replicas_module, "_LOOK_SECONDS", 0.05)


@pytest.fixture
async def full():
    """An engine that has no room."""
    engine = ProgramEngine(room=-1.0)
    await engine.start()
    yield engine
    if engine.alive:
        await engine.kill()


def make_room(engine):
    engine.room = 1000.0
    engine.tell()


def client_view(answer):
    return answer.status, answer.headers, answer.body, answer.whole


def engine_view(request):
    """What an engine saw, but for how long the turn was held: that depends on how busy we are."""
    headers = sorted(each for each in request.headers if each[0] != b"x-program-waited")
    return request.head.split(b"\r\n")[0], headers, request.body


# -- one queue -------------------------------------------------------------------------


async def test_the_turns_of_a_program_wait_in_one_queue_wherever_they_come(full):
    async with replica_set(3, [full]) as nodes:
        await all_alive(nodes)
        ids = [nodes.id_of(node) for node in nodes]
        turns = [
            asyncio.create_task(ask(node.port, turn(name)))
            for node in nodes
            for name in ids
            for _ in range(2)
        ]
        await until(lambda: [node.held for node in nodes] == [6, 6, 6])
        for node, name in zip(nodes, ids, strict=True):
            assert len(node.control.fleet.get(name).waiting) == 6
            others = [each.control.fleet.get(name) for each in nodes if each is not node]
            assert not any(others)
        make_room(full)
        assert {answer.status for answer in await asyncio.gather(*turns)} == {200}
        assert len(full.calls) == 18
        assert not any(request.values(b"x-program-replica") for request in full.requests)


async def test_a_call_without_a_program_is_served_where_it_came(engines):
    async with replica_set(2, engines) as nodes:
        await all_alive(nodes)
        for node in nodes:
            for _ in range(3):
                assert (await ask(node.port, post({"model": "m"}))).status == 200
            assert node.control.metrics._turns.labels("ok", "true")._value.get() == 3


async def test_a_call_is_counted_by_the_replica_that_has_it(engines):
    async with replica_set(2, engines) as nodes:
        await all_alive(nodes)
        first, second = nodes
        name = nodes.id_of(second)
        await ask(first.port, turn(name))
        prefix = "vllm_thunder_coordinator:requests"
        one, two = [(await ask(n.port, get("/metrics"))).body.decode() for n in nodes]
        assert prefix + '_passed_on_total{outcome="ok"} 1.0' in one
        assert prefix + '_total{outcome="ok"' not in one
        assert prefix + '_total{outcome="ok",without_program="false"} 1.0' in two
        assert second.control.fleet.get(name).profile.turns == 1


async def test_a_limit_of_the_owner_holds_for_all_that_is_passed_on(full):
    config = CoordinatorConfig(max_held_turns=1, engine_timeout=1.0, keepalive=0.02)
    async with replica_set(2, [full], config=config) as nodes:
        await all_alive(nodes)
        first, second = nodes
        name = nodes.id_of(second)
        held = asyncio.create_task(ask(first.port, turn(name)))
        await until(lambda: second.held == 1)
        for node in nodes:
            refused = await ask(node.port, turn(name))
            assert refused.status == 429
            assert "1 turns wait" in refused.json()["error"]["message"]
        make_room(full)
        assert (await held).status == 200


# -- bytes -----------------------------------------------------------------------------

ODD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nX-Odd: \xff\xfe\r\nset-cookie: a=1\r\n"
    b"set-cookie: b=2\r\ncontent-length: 3\r\n\r\n\x00\xff{"
)
ZIPPED = gzip.compress(b'{"choices": [1, 2, 3]}' * 100)
ANSWERS = {
    "odd headers": raw(ODD),
    "gzip": whole(ZIPPED, headers=b"content-type: application/json\r\ncontent-encoding: gzip\r\n"),
    "a stream": chunked(b"data: 1\n\n", b"data: 2", b"\n\ndata: [DONE]\n\n", delay=0.01),
    "an error": whole(b'{"error": {"message": "no"}}', b"422 Unprocessable Entity"),
    "a server's error": whole(b'{"error": {"message": "oh"}}', b"500 Internal Server Error"),
    "nothing": whole(b""),
}


@pytest.mark.parametrize("kind", ANSWERS)
async def test_bytes_are_the_same_through_another_replica(kind):
    engine = ProgramEngine()
    await engine.start()
    engine.chat = ANSWERS[kind]
    async with replica_set(2, [engine]) as nodes:
        await all_alive(nodes)
        first, second = nodes
        body = json.dumps({"program_id": nodes.id_of(second), "stream": "stream" in kind})
        plain = body.encode("utf-16")
        odd = JSON + b"x-odd: \xff\xfe\r\nx-a: 1\r\nx-a: 2\r\n"
        for request in (
            post(body.encode(), CHAT + "?a=%2F&b", odd),
            post(plain, CHAT, JSON),
            post(gzip.compress(body.encode()), CHAT, JSON + b"content-encoding: gzip\r\n"),
        ):
            there, here = await ask(second.port, request), await ask(first.port, request)
            assert client_view(there) == client_view(here)
            assert engine_view(engine.calls[-1]) == engine_view(engine.calls[-2])
            assert engine.calls[-1].body == request.partition(b"\r\n\r\n")[2]
    await engine.kill()


async def test_a_trace_goes_through_both_replicas():
    engine = ProgramEngine()
    await engine.start()
    exporters = [InMemorySpanExporter() for _ in range(2)]
    tracings = [Tracing(exporter) for exporter in exporters]
    trace, parent = b"4bf92f3577b34da6a3ce929d0e0e4736", b"00f067aa0ba902b7"
    async with replica_set(2, [engine]) as nodes:
        await all_alive(nodes)
        for node, tracing in zip(nodes, tracings, strict=True):
            node.proxy.tracing = tracing
        given = b"traceparent: 00-%b-%b-01\r\n" % (trace, parent)
        body = {"program_id": nodes.id_of(nodes[1])}
        assert (await ask(nodes[0].port, post(body, headers=JSON + given))).status == 200
    for tracing in tracings:
        await tracing.close()
    (passed_on,), (served,) = (exporter.get_finished_spans() for exporter in exporters)
    assert format_span_id(passed_on.parent.span_id).encode() == parent
    assert served.parent.span_id == passed_on.context.span_id
    last = format_span_id(served.context.span_id).encode()
    assert engine.calls[-1].values(b"traceparent") == [b"00-%b-%b-01" % (trace, last)]
    await engine.kill()


async def test_a_held_stream_gets_comments_and_then_its_answer(full):
    config = CoordinatorConfig(keepalive=0.05, engine_timeout=1.0)
    full.chat = chunked(b"data: 1\n\n", b"data: [DONE]\n\n")
    async with replica_set(2, [full], config=config) as nodes:
        await all_alive(nodes)
        first, second = nodes
        answer = asyncio.create_task(ask(first.port, turn(nodes.id_of(second), stream=True)))
        await until(lambda: second.held == 1)
        await asyncio.sleep(0.3)
        make_room(full)
        body = (await answer).body
        comments, rest = body.count(b": keep-alive\n\n"), body.replace(b": keep-alive\n\n", b"")
        assert 3 <= comments <= 8  # of one replica, not of each
        assert rest == b"data: 1\n\ndata: [DONE]\n\n"


# -- keys ------------------------------------------------------------------------------


async def test_the_clients_key_goes_along_and_without_one_nothing_does():
    engine = ProgramEngine(key="engine's")
    await engine.start()
    keys = {"api_keys": ["client's"], "engine_api_key": "engine's"}
    async with replica_set(2, [engine], **keys) as nodes:
        await all_alive(nodes)
        first, second = nodes
        body = {"program_id": nodes.id_of(second)}
        right, wrong = JSON + b"authorization: Bearer client's\r\n", JSON
        for path in (CHAT, "/programs/release"):
            assert (await ask(first.port, post(body, path, wrong))).status == 401
        assert engine.calls == []
        assert not any(len(node.control.fleet) for node in nodes)
        assert (await ask(first.port, post(body, CHAT, right))).status == 200
        assert second.control.fleet.get(body["program_id"]) is not None
        assert engine.calls[0].values(b"authorization") == [b"Bearer engine's"]
        released = await ask(first.port, post(body, "/programs/release", right))
        assert released.json() == {**body, "released": True}
    await engine.kill()


# -- clients that leave ----------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_while_held_leaves_the_owners_queue(full, stream):
    async with replica_set(2, [full]) as nodes:
        await all_alive(nodes)
        first, second = nodes
        client = await Client.to(first.port)
        client.send(turn(nodes.id_of(second), stream=stream))
        await until(lambda: second.held == 1)
        client.leave()
        await until(lambda: second.held == 0)
        assert full.calls == []


async def test_a_client_that_leaves_ends_its_request_at_the_engine(engines):
    async def endless(request, wire):
        await wire.send(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n")
        await wire.send(b"transfer-encoding: chunked\r\n\r\n")
        while not wire.reader.at_eof():
            await wire.send(b"9\r\ndata: 1\n\n\r\n")
            await asyncio.sleep(0.01)
        gone.set()

    gone = asyncio.Event()
    for engine in engines:
        engine.chat = endless
    async with replica_set(2, engines) as nodes:
        await all_alive(nodes)
        first, second = nodes
        client = await Client.to(first.port)
        client.send(turn(nodes.id_of(second), stream=True))
        await client.head()
        assert await client.piece()
        client.leave()
        await asyncio.wait_for(gone.wait(), 20)
        await until(lambda: not second.control.fleet.get(nodes.id_of(second)).running)


# -- requests about a program ----------------------------------------------------------


async def test_what_is_asked_about_a_program_is_answered_where_it_is(engines):
    async with replica_set(2, engines) as nodes:
        await all_alive(nodes)
        first, second = nodes
        name = nodes.id_of(second)
        await ask(second.port, turn(name))
        told = await page(first.port, f"/programs/{name}")
        assert (told["program_id"], told["step_count"]) == (name, 1)
        assert told["replica"] == second.url
        assert (await page(first.port, f"/profiles/{name}"))["step_count"] == 1
        tool = {"program_id": name, "tool_name": "pytest"}
        assert (await ask(first.port, post(tool, "/programs/tool"))).json()["known"] is True
        released = await ask(first.port, post({"program_id": name}, "/programs/release"))
        assert released.json() == {"program_id": name, "released": True}
        assert second.control.fleet.get(name) is None
        for path in (f"/programs/{name}", f"/profiles/{name}"):
            assert (await ask(first.port, get(path))).status == 404


async def test_a_release_sees_the_turn_that_is_in_flight_at_the_owner(full):
    async with replica_set(2, [full]) as nodes:
        await all_alive(nodes)
        first, second = nodes
        name = nodes.id_of(second)
        held = asyncio.create_task(ask(second.port, turn(name)))
        await until(lambda: second.held == 1)
        released = await ask(first.port, post({"program_id": name}, "/programs/release"))
        assert released.json()["pending"] is True
        make_room(full)
        assert (await held).status == 200
        await until(lambda: second.control.fleet.get(name) is None)


@pytest.mark.parametrize(
    "request_",
    [
        post({}, "/programs/release"),
        post(b"no json", "/programs/release"),
        post({"program_id": 1.5}, "/programs/tool"),
        post({"program_id": ""}, "/programs/tool"),
        get("/programs/nobody"),
        get("/programs/" + "x" * 5000),
        get("/programs/%FF%0A"),
        get("/profiles/a%2Fb"),
        b"PUT /programs/release HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n",
    ],
)
async def test_what_is_wrong_is_refused_alike_by_all(engines, request_):
    async with replica_set(2, engines) as nodes:
        await all_alive(nodes)
        answers = [await ask(node.port, request_) for node in nodes]
        assert 400 <= answers[0].status < 500
        assert client_view(answers[0]) == client_view(answers[1])


async def test_lists_and_pages_are_a_replicas_own_and_say_whose(engines):
    async with replica_set(2, engines) as nodes:
        await all_alive(nodes)
        first, second = nodes
        name = nodes.id_of(second)
        await ask(first.port, turn(name))
        assert (await page(second.port, "/programs"))[name]["replica"] == second.url
        assert name not in await page(first.port, "/programs")
        for node in nodes:
            status = await page(node.port, "/status")
            assert status["replica"] == node.url
            assert await node.health() == {first.url: "up", second.url: "up"}
            assert [each["url"] for each in status["replicas"]] == sorted(n.url for n in nodes)


# -- ids that name no program of another replica's --------------------------------------


async def test_ids_of_any_kind_are_the_same_program_everywhere(engines):
    async with replica_set(2, engines) as nodes:
        await all_alive(nodes)
        for name, path in (
            ("a/b", "a%2Fb"),
            ("ü\n", "%C3%BC%0A"),
            (7, "7"),
            ("release", "release"),
        ):
            for node in nodes:
                assert (await ask(node.port, turn(name))).status == 200
            for node in nodes:
                told = await page(node.port, f"/programs/{path}")
                assert (told["program_id"], told["step_count"]) == (str(name), 2)


async def test_a_program_whose_engine_tells_of_it_is_listed_by_all(engines):
    async with replica_set(2, engines) as nodes:
        engines[0].tell(ProgramReport("p", 160, 10, True))
        for node in nodes:
            await until(lambda node=node: node.control.fleet.get("p"))
            assert (await page(node.port, "/programs"))["p"]["replica"] == node.url
