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


@pytest.mark.parametrize("guarded", [True, False], ids=["keyed engine", "open engine"])
@pytest.mark.parametrize(
    ("keys", "engine_key"),
    [
        ([], None),
        ([], "engine"),
        (["one"], None),
        (["one"], "engine"),
        (["one", "two"], None),
        (["one", "two"], "engine"),
        (["one", "two"], "two"),
    ],
)
async def test_who_may_ask_and_what_engines_are_shown(keys, engine_key, guarded):
    own = engine_key or next(iter(keys), None)
    if guarded and own is None:
        pytest.skip("such an engine cannot be followed at all")
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


def _forwarded(requests):
    """Those of clients, which name no agent here: what asks for the coordinator itself does."""
    return [request for request in requests if not request.values(b"user-agent")]


def _with(request, key):
    return request.replace(b"\r\n\r\n", b"\r\n%b\r\n" % bearer(key))
