"""Whoever is sent on by an engine stays with the coordinator."""

import asyncio
from contextlib import asynccontextmanager
from urllib.parse import urljoin, urlsplit

import fastapi
import pytest
import uvicorn

from tests.coordinator.fake_engine import FakeEngine, whole
from tests.coordinator.front import CHAT, Client, post, running_front
from vllm_thunder.coordinator.proxy.location import location_for_client
from vllm_thunder.coordinator.proxy.pool import origin_of

#: Where the engine is, what it says, and what the client gets.
PLACES = [
    ("http://e:8000", "http://e:8000/v1/x?a=%2f#b", "/v1/x?a=%2f#b"),
    ("http://e:8000", "HTTP://E:8000/v1/x", "/v1/x"),
    ("http://e:8000", "//e:8000/v1/x", "/v1/x"),
    ("http://e:8000", "http://e:8000", "/"),
    ("http://e:8000", "http://e:8000?a=1", "/?a=1"),
    ("http://e:8000", "/v1/x", "/v1/x"),
    ("http://e", "http://e:80/v1/x", "/v1/x"),
    ("http://e:80", "http://e/v1/x", "/v1/x"),
    ("http://p", "http://p/v1/x", "/v1/x"),
    # Behind something that ends TLS it does not know its own scheme.
    ("https://e", "http://e/v1/x", "/v1/x"),
    ("https://e:8443", "http://e:8443/v1/x", "/v1/x"),
    ("http://[::1]:8000", "http://[::1]:8000/v1/x", "/v1/x"),
    ("http://e:8000/pre", "http://e:8000/pre/v1/x", "/v1/x"),
    ("http://e:8000/pre", "http://e:8000/pre", "/"),
    ("http://e:8000/pre", "http://e:8000/pre?a", "/?a"),
    ("http://e:8000/pre", "/pre/v1/x", "/v1/x"),
    ("http://e:8000/pre", "http://e:8000/v1/x", "/v1/x"),
    ("http://e:8000/pre", "/prefix/x", "/prefix/x"),
    # Not the name of another host, whatever the engine was asked for.
    ("http://e:8000", "http://e:8000//evil/x", "/.//evil/x"),
    ("http://e:8000", "http://e:8000/\\evil/x", "/./\\evil/x"),
    ("http://e:8000/pre", "/pre//evil", "/.//evil"),
]
KEPT = [
    "http://other:8000/v1/x",
    "http://e:8001/v1/x",
    "https://e/login",
    "x?a=1",
    "../x",
    "?a",
    "",
    "mailto:e:8000",
    "http://[broken",
    "http://e:port/x",
    "h\xe9 ll\xf6",
]


@pytest.mark.parametrize(("engine", "said", "told"), PLACES)
def test_a_place_at_the_engine_is_one_at_the_coordinator(engine, said, told):
    origin = origin_of(engine)
    assert location_for_client(said.encode(), origin, "") == told.encode()
    mounted = location_for_client(said.encode(), origin, "/mounted")
    assert mounted == b"/mounted" + told.removeprefix("/.").encode()
    assert urlsplit(urljoin("https://coordinator/v1/y/", told)).netloc == "coordinator"


@pytest.mark.parametrize("said", KEPT)
def test_any_other_place_is_kept(said):
    said = said.encode("latin-1")
    assert location_for_client(said, origin_of("http://e:8000"), "/mounted") == said


@asynccontextmanager
async def real_server():
    """The port of a server that, as vLLM's, answers ``/a/`` with a redirection to ``/a``."""
    api = fastapi.FastAPI()

    @api.post(CHAT)
    async def chat() -> dict[str, int]:
        return {"answered": 1}

    server = uvicorn.Server(uvicorn.Config(api, port=0, log_config=None, lifespan="off"))
    serving = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
        await asyncio.sleep(0.005)
    yield server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = server.force_exit = True
    await serving


async def test_a_client_that_follows_stays_here():
    async with real_server() as port, running_front() as front:
        backend = await front.add(FakeEngine())
        backend.url = f"http://127.0.0.1:{port}"
        answer = await front.ask(post({}, CHAT + "/?a=1"))
        assert answer.status == 307
        (location,) = answer.values(b"location")
        assert location == f"{CHAT}?a=1".encode()
        client = await Client.to(front.port)
        client.send(post({}, location.decode()))
        assert (await client.answer()).json() == {"answered": 1}
        client.leave()


@pytest.mark.parametrize("path", [CHAT, "/v1/responses/r", "/tokenize"])
async def test_every_kind_of_call_has_its_location_changed(path):
    async with running_front() as front:
        engine = FakeEngine()
        await front.add(engine)
        headers = b"Location: %b/x\r\nx-a: %b\r\n" % (engine.url.encode(), engine.url.encode())
        engine.answer = whole(b"", b"307 Temporary Redirect", headers)
        answer = await front.ask(post({"program_id": "p"}, path))
        assert (answer.status, answer.values(b"location")) == (307, [b"/x"])
        assert answer.values(b"x-a") == [engine.url.encode()]
