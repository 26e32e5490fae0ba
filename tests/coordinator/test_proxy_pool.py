"""Connections to engines: where they go, which are used again, and for how long."""

import ssl
from pathlib import Path

import pytest

from tests.coordinator.fake_engine import FakeEngine, raw, whole
from tests.coordinator.front import post, running_front, until
from vllm_thunder.coordinator.proxy.connection import EngineLost
from vllm_thunder.coordinator.proxy.pool import ConnectionPool, Origin, origin_of
from vllm_thunder.program.errors import ConfigError

#: A key and a certificate that it has signed itself, for localhost.
CERTIFICATE = Path(__file__).parent / "localhost.pem"

GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


@pytest.mark.parametrize(
    ("url", "origin"),
    [
        ("http://h", Origin("h", 80, False, b"h", b"")),
        ("https://h/", Origin("h", 443, True, b"h", b"")),
        ("http://H:81/a/b/", Origin("h", 81, False, b"H:81", b"/a/b")),
        ("http://[::1]:8000", Origin("::1", 8000, False, b"[::1]:8000", b"")),
    ],
)
def test_where_a_server_is(url, origin):
    assert origin_of(url) == origin


@pytest.mark.parametrize(
    "url",
    [
        "",
        "h:80",
        "ftp://h",
        "http://",
        "http://h:x",
        "http://h:99999",
        "http://u:p@h",
        "http://h?q=1",
        "http://h#f",
        "http://h/a b",
        "http://h/\r\nx: y",
        "http://hö",
    ],
)
def test_what_is_no_server(url):
    with pytest.raises(ConfigError, match="engine"):
        origin_of(url)


async def exchange(pool, origin):
    connection = pool.take(origin) or await pool.connect(origin)
    connection.send(GET)
    await connection.answered()
    while await connection.chunk():
        pass
    pool.give_back(connection)
    return connection


@pytest.fixture
async def engine():
    engine = FakeEngine()
    await engine.start()
    yield engine
    await engine.kill()


async def test_the_connection_that_was_used_last_is_used_again(engine):
    pool, origin = ConnectionPool(), origin_of(engine.url)
    first = await exchange(pool, origin)
    assert await exchange(pool, origin) is first
    taken = pool.take(origin)
    second = await exchange(pool, origin)
    pool.give_back(taken)
    assert pool.take(origin) is taken is first
    assert pool.take(origin) is second
    assert pool.take(origin) is None
    pool.close()
    for connection in (first, second):
        connection.abort("over")


async def test_idle_connections_are_closed(engine):
    pool, origin = ConnectionPool(idle_seconds=0.05), origin_of(engine.url)
    connection = await exchange(pool, origin)
    await until(lambda: len(pool) == 0)
    assert connection.transport.is_closing()


async def test_only_connections_that_are_idle_for_long_are_closed(engine):
    pool, origin = ConnectionPool(idle_seconds=60.0), origin_of(engine.url)
    young = await pool.connect(origin)
    old = await exchange(pool, origin)
    old.idle_since -= 61
    young.send(GET)
    await young.answered()
    await young.chunk()
    pool.give_back(young)
    pool._close_old()
    assert pool.take(origin) is young
    assert old.transport.is_closing()
    young.abort("over")
    pool.close()


UNFIT = {
    "the engine says so": whole(b"", headers=b"connection: close\r\n"),
    "it speaks HTTP/1.0": raw(b"HTTP/1.0 200 OK\r\ncontent-length: 0\r\n\r\n"),
    "more came than was asked for": raw(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n" * 2),
    "the body had no length": raw(b"HTTP/1.1 200 OK\r\n\r\n", lambda w: w.writer.close()),
}


@pytest.mark.parametrize("why", UNFIT)
async def test_a_connection_is_not_used_again_where(why, engine):
    engine.answer = UNFIT[why]
    pool, origin = ConnectionPool(), origin_of(engine.url)
    connection = await exchange(pool, origin)
    assert len(pool) == 0
    assert connection.transport.is_closing()


async def test_what_an_idle_connection_says_unasked_closes_it(engine):
    pool, origin = ConnectionPool(), origin_of(engine.url)
    await exchange(pool, origin)
    await engine.wires[0].send(b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\n\r\n")
    await until(lambda: not engine.wires)
    assert pool.take(origin) is None


async def test_an_engine_that_closed_its_side_is_not_asked_there(engine):
    pool, origin = ConnectionPool(), origin_of(engine.url)
    first = await exchange(pool, origin)
    engine.wires[0].writer.close()
    await until(first.transport.is_closing)
    assert pool.take(origin) is None


async def test_a_server_that_is_not_there_is_named():
    with pytest.raises(EngineLost, match=r"127\.0\.0\.1:1\b"):
        await ConnectionPool().connect(origin_of("http://127.0.0.1:1"))


async def test_an_engine_behind_tls_is_verified():
    served = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    served.load_cert_chain(CERTIFICATE)
    async with running_front() as front:
        engine = FakeEngine(tls=served)
        backend = await front.add(engine)
        assert backend.url.startswith("https://")
        engine.alive = False
        assert (await front.ask(post({}))).status == 503  # nobody vouches for it
        assert engine.requests == []
    async with running_front(tls=ssl.create_default_context(cafile=CERTIFICATE)) as front:
        engine = FakeEngine(tls=served)
        await front.add(engine)
        for _ in range(2):
            assert (await front.ask(post({}))).body == b"{}"
        assert len(engine.wires) == 1


async def test_an_engine_below_a_path_is_asked_there():
    async with running_front() as front:
        engine = FakeEngine()
        backend = await front.add(engine)
        backend.url += "/engines/1"
        await front.ask(post({}))
        assert engine.requests[0].target == b"/engines/1/v1/chat/completions"
