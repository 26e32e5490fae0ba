"""Who may ask what: keys of clients, keys of engines, and which of them an engine is shown."""

import pytest

from tests.coordinator.front import CHAT, ask, post
from tests.coordinator.program_engine import (
    ProgramEngine,
    coordinator,
    delete,
    get,
    launch,
    until_up,
)

JSON = b"content-type: application/json\r\n"

#: What a client may bring.
CLIENTS = {None, "wrong", "one", "two", "engine"}
#: Requests that an engine answers, one for each way there.
FORWARDED = {
    "model call": lambda headers: post({"program_id": "p"}, CHAT, JSON + headers),
    "any other": lambda headers: get("/v1/models", headers),
    "stored": lambda headers: get("/v1/responses/resp_1", headers),
}
#: Requests for which the coordinator itself may ask engines.
OWN = {
    "release": lambda headers: post({"program_id": "p"}, "/programs/release", JSON + headers),
    "an engine": lambda headers: post({"url": "http://127.0.0.1:1"}, "/engines", JSON + headers),
    "engines": lambda headers: get("/engines", headers),
    "programs": lambda headers: get("/programs", headers),
}


def bearer(key):
    return b"" if key is None else b"authorization: Bearer %b\r\n" % key.encode()


@pytest.mark.parametrize(
    ("keys", "engine_key", "guarded"),
    [
        ([], None, False),
        *(
            (keys, engine_key, guarded)
            for guarded in (True, False)
            for keys, engine_key in (
                ([], "engine"),
                (["one"], None),
                (["one"], "engine"),
                (["one", "two"], None),
                (["one", "two"], "engine"),
                (["one", "two"], "two"),
            )
        ),
    ],
)
async def test_who_may_ask_and_what_engines_are_shown(keys, engine_key, guarded):
    own = engine_key or next(iter(keys), None)
    engine = ProgramEngine(key=own if guarded else None)
    await engine.start()
    async with coordinator(launch([engine], api_keys=keys, engine_api_key=engine_key)) as (
        port,
        control,
    ):
        await until_up(control, 1)
        for client in CLIENTS:
            checked = bool(keys) and client in keys
            for name, request in FORWARDED.items():
                seen = len(engine.requests)
                answer = await ask(port, request(bearer(client)))
                told = (name, client, answer.body)
                if keys and not checked:
                    assert answer.status == 401, told
                    assert not _forwarded(engine.requests[seen:]), told
                    continue
                shown = own if checked else client
                assert answer.status == (401 if guarded and shown != own else 200), told
                (reached,) = _forwarded(engine.requests[seen:])
                assert reached.values(b"authorization") == (
                    [] if shown is None else [f"Bearer {shown}".encode()]
                ), told
            may = checked if keys else own is None or client == own
            for name, request in OWN.items():
                answer = await ask(port, request(bearer(client)))
                assert (answer.status != 401) is may, (name, client, answer.body)
            if not may:
                refused = await ask(port, _with(delete(f"/engines/{engine.url}"), client))
                assert refused.status == 401
        assert list(control.fleet.backends) == [engine.url]
    await engine.kill()


@pytest.mark.parametrize("scheme", [b"Bearer", b"bearer", b"BEARER"])
async def test_the_scheme_is_one_in_any_letters(scheme):
    keys = {"api_keys": ["one"], "engine_api_key": "engine"}
    engine = ProgramEngine(key="engine")
    await engine.start()
    async with coordinator(launch([engine], **keys)) as (port, control):
        await until_up(control, 1)
        assert (await ask(port, get("/v1/x", b"authorization: %b one\r\n" % scheme))).status == 200
        for wrong in (b"%b ONE", b"%b  one", b"%bone", b"one", b"%b", b"Basic one", b""):
            value = wrong.replace(b"%b", scheme)
            answer = await ask(port, get("/v1/x", b"authorization: %b\r\n" % value))
            assert answer.status == 401, value
    await engine.kill()


@pytest.mark.parametrize("keys", [{"api_keys": ["key"]}, {"engine_api_key": "key"}])
async def test_browsers_ask_engines_without_a_key_whether_they_may_send_one(keys):
    engine = ProgramEngine(key="key")
    await engine.start()
    preflight = b"origin: http://b\r\naccess-control-request-method: POST\r\n\r\n"
    async with coordinator(launch([engine], **keys)) as (port, control):
        await until_up(control, 1)
        for path in (CHAT, "/v1/models", "/pause", "/v1/responses/r"):
            head = b"OPTIONS %b HTTP/1.1\r\nhost: x\r\n" % path.encode()
            answer = await ask(port, head + preflight)
            assert (answer.status, answer.values(b"access-control-allow-origin")) == (200, [b"*"])
            request = _forwarded(engine.requests)[-1]
            assert request.head.startswith(b"OPTIONS " + path.encode())
            assert not request.values(b"authorization")
        programs = b"OPTIONS /programs/release HTTP/1.1\r\nhost: x\r\n"
        assert (await ask(port, programs + preflight)).status == 405
        assert not any(b"release" in request.target for request in engine.requests)
    await engine.kill()


def _forwarded(requests):
    """Those of clients, which name no agent here: what asks for the coordinator itself does."""
    return [request for request in requests if not request.values(b"user-agent")]


def _with(request, key):
    return request.replace(b"\r\n\r\n", b"\r\n%b\r\n" % bearer(key))
