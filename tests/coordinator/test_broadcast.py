"""What is for every engine reaches every engine, as it was sent and with the right key."""

import pytest

from tests.coordinator.fake_engine import FakeEngine, raw, whole
from tests.coordinator.front import ask, post
from tests.coordinator.program_engine import ProgramEngine, coordinator, launch, until_up
from vllm_thunder.coordinator.broadcast import BROADCAST_PATHS

JSON = b"content-type: application/json\r\n"


def sent_on(engine):
    """What clients sent, as an engine got it."""
    own = (b"/v1/models", b"/programs/", b"/tokenize", b"/health")
    return [request for request in engine.requests if not request.target.startswith(own)]


@pytest.mark.parametrize("root_path", ["", "/behind"])
async def test_every_path_reaches_every_engine_once(engines, root_path):
    async with coordinator(launch(engines), root_path=root_path) as (port, control):
        await until_up(control, 2)
        for path in sorted(BROADCAST_PATHS):
            for engine in engines:
                engine.requests.clear()
            answer = await ask(port, post({"a": "ü"}, f"{path}?b=%2F1&b=2"))
            assert (answer.status, answer.json()) == (200, {"path": path})
            for engine in engines:
                (request,) = sent_on(engine)
                assert request.head.startswith(b"POST %b?b=%%2F1&b=2 " % path.encode())
                assert request.body == b'{"a": "\\u00fc"}'


async def test_other_methods_go_everywhere_too(engines):
    async with coordinator(launch(engines)) as (port, control):
        await until_up(control, 2)
        for line in (b"DELETE /adapters/a%2Fb", b"GET /flush_cache"):
            for engine in engines:
                engine.requests.clear()
            answer = await ask(port, line + b" HTTP/1.1\r\nhost: x\r\n\r\n")
            assert answer.status == 200
            for engine in engines:
                (request,) = sent_on(engine)
                assert request.head.startswith(line + b" ")


@pytest.mark.parametrize(
    ("keys", "client", "shown"),
    [
        ({"api_keys": ["c"], "engine_api_key": "e"}, "c", "e"),
        ({"api_keys": ["e", "c"]}, "c", "e"),
        ({"engine_api_key": "e"}, "e", "e"),
        ({"engine_api_key": "e"}, "c", "c"),
        ({"engine_api_key": "e"}, None, None),
    ],
)
async def test_engines_are_shown_the_key_that_other_requests_show(keys, client, shown):
    made = [ProgramEngine(key="e"), ProgramEngine(key="e")]
    for engine in made:
        await engine.start()
    async with coordinator(launch(made, **keys)) as (port, control):
        await until_up(control, 2)
        named = b"" if client is None else b"authorization: Bearer %b\r\n" % client.encode()
        answer = await ask(port, post({}, "/v1/load_lora_adapter", JSON + named))
        assert answer.status == (200 if shown == "e" else 401)
        for engine in made:
            (request,) = sent_on(engine)
            values = [] if shown is None else [b"Bearer " + shown.encode()]
            assert request.values(b"authorization") == values
    for engine in made:
        await engine.kill()


@pytest.mark.parametrize(
    ("first", "second", "status"),
    [
        (b"200 OK", b"202 Accepted", 200),
        (b"400 Bad", b"400 Bad", 400),
        (b"401 No", b"401 No", 401),
        (b"200 OK", b"400 Bad", 502),
        (b"400 Bad", b"404 Not", 502),
        (b"200 OK", b"307 Go", 502),
    ],
)
async def test_what_all_say_is_the_answer_else_what_each_says(engines, first, second, status):
    async with coordinator(launch(engines)) as (port, control):
        await until_up(control, 2)
        elsewhere = FakeEngine()
        await elsewhere.start()
        location = b"location: %b/pause\r\n" % elsewhere.url.encode()
        for engine, said in zip(engines, (first, second), strict=True):
            routed, answer = engine.answer, whole(b"{}", said, location)

            async def route(request, wire, routed=routed, answer=answer):
                await (answer if request.target == b"/pause" else routed)(request, wire)

            engine.answer = route
        told = await ask(port, post({}, "/pause"))
        assert told.status == status
        if status == 502:
            each = {url: said["status"] for url, said in told.json()["engines"].items()}
            codes = (int(first[:3]), int(second[:3]))
            assert each == dict(zip((engine.url for engine in engines), codes, strict=True))
        assert not elsewhere.requests
        await elsewhere.kill()


async def test_no_answer_from_any_is_a_502(engines):
    async with coordinator(launch(engines)) as (port, control):
        await until_up(control, 2)
        for engine in engines:
            routed, broken = engine.answer, raw(b"", lambda wire: wire.reset())

            async def route(request, wire, routed=routed, broken=broken):
                await (broken if request.target == b"/pause" else routed)(request, wire)

            engine.answer = route
        assert (await ask(port, post({}, "/pause"))).status == 502
