"""What a client's connection may cost, and that all its requests end with it."""

import asyncio

import pytest

from tests.coordinator.fake_engine import FakeEngine, chunked, hang
from tests.coordinator.front import CHAT, Client, post, running_front
from vllm_thunder.coordinator.client_protocol import MAX_HEAD_BYTES
from vllm_thunder.coordinator.proxy.exchange import Outcome
from vllm_thunder.program.values import MAX_ID_BYTES

START = b"POST %b HTTP/1.1\r\nhost: x\r\n" % CHAT.encode()
BODY = b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n"
#: Heads without an end, as what comes first and what comes then, again and again.
ENDLESS = {
    "a target": (b"GET /", b"a" * 10_000),
    "a name": (START, b"a" * 10_000),
    "a value": (START + b"a: ", b"a" * 10_000),
    "many values": (START, b"a: %b\r\n" % (b"a" * 5000) * 2),
    "many headers": (START, b"a:\r\n" * 2500),
    "a trailer": (START + BODY + b"0\r\na: ", b"a" * 10_000),
    "many trailers": (START + BODY + b"0\r\n", b"a:\r\n" * 2500),
    "a chunk's extension": (START + BODY + b"2;a=", b"a" * 10_000),
}


@pytest.mark.parametrize("kind", ENDLESS)
async def test_a_head_without_an_end_is_not_read_for_ever(kind):
    first, then = ENDLESS[kind]
    async with running_front() as front:
        engine = FakeEngine()
        await front.add(engine)
        client = await Client.to(front.port)
        client.send(first)
        sent = len(first)
        ended = asyncio.create_task(client.reader.read())
        while not ended.done() and sent < 4 * MAX_HEAD_BYTES:
            client.send(then)
            sent += len(then)
            await asyncio.sleep(0.002)
        try:
            answer = await asyncio.wait_for(ended, 10)
        except ConnectionError:  # what is sent after the answer can cost the client the answer
            answer = b"HTTP/1.1 431 "
        assert answer.startswith(b"HTTP/1.1 431 ") or (answer, kind) == (b"", "a trailer"), answer
        assert not engine.requests
        client.leave()


async def test_a_head_with_two_of_the_longest_ids_is_passed_on():
    async with running_front() as front:
        engine = FakeEngine()
        await front.add(engine)
        name = b"a" * MAX_ID_BYTES
        headers = b"x-program-id: %b\r\nx-session-id: %b\r\n" % (name, name)
        for _ in range(2):  # each head is counted for itself
            client = await Client.to(front.port)
            for _ in range(3):
                client.send(post({}, headers=headers))
                assert (await asyncio.wait_for(client.answer(), 20)).status == 200
            client.leave()
        assert front.done[0].program_id == name.decode()


async def test_trailers_are_no_headers():
    async with running_front() as front:
        engine = FakeEngine()
        await front.add(engine)
        client = await Client.to(front.port)
        client.send(START + BODY + b"0\r\nx-program-id: p\r\nx-other: 1\r\n\r\n")
        assert (await client.answer()).status == 200
        assert front.done[0].program_id is None
        assert b"x-other" not in engine.requests[0].head
        client.leave()


goes_on = chunked(*[b"data: x\n\n"] * 2000, delay=0.01)


@pytest.mark.parametrize("packets", [1, 2])
@pytest.mark.parametrize("behind", [1, 3])
@pytest.mark.parametrize("said", [hang, goes_on], ids=["no byte yet", "it streams"])
async def test_a_client_that_leaves_ends_all_that_it_asked_for(said, behind, packets):
    request = post({"program_id": "p", "stream": said is goes_on})
    async with running_front() as front:
        engine = FakeEngine(said)
        await front.add(engine)
        client = await Client.to(front.port)
        if packets == 1:
            client.send(request * (1 + behind))
        else:
            client.send(request)
            await front.until(lambda: engine.requests)
            client.send(request * behind)
        await front.until(lambda: engine.requests)
        await asyncio.sleep(0.1)
        wire = engine.wires[0]
        client.leave()
        async with asyncio.timeout(5):
            await wire.gone.wait()
        await front.until(lambda: front.done)
        await asyncio.sleep(0.1)
        assert [each.outcome for each in front.done] == [Outcome.CLIENT_GONE]
        assert len(engine.requests) == 1


async def test_requests_in_one_packet_are_answered_in_order():
    async with running_front() as front:
        await front.add(FakeEngine(chunked(b"data: 1\n\n", delay=0.02)))
        client = await Client.to(front.port)
        client.send(post({"program_id": "p"}) * 12)
        for _ in range(12):
            assert (await asyncio.wait_for(client.answer(), 10)).body == b"data: 1\n\n"
        client.leave()


@pytest.mark.parametrize("bad", [b"\x00\x01\r\n\r\n", START + b"a: " + b"a" * 2 * MAX_HEAD_BYTES])
async def test_no_error_stands_in_the_midst_of_another_answer(bad):
    async with running_front() as front:
        await front.add(FakeEngine(goes_on))
        client = await Client.to(front.port)
        client.send(post({"stream": True}))
        await client.head()
        assert await client.piece() == b"data: x\n\n"
        client.send(bad)
        try:
            rest = await asyncio.wait_for(client.reader.read(), 10)
        except ConnectionError:
            rest = b""
        assert b"HTTP/1.1" not in rest
        client.leave()
        await front.until(lambda: front.done)


async def test_what_is_no_http_is_still_told_so():
    async with running_front() as front:
        await front.add(FakeEngine())
        for bad in (b"\x00\r\n\r\n", START + b"transfer-encoding: chunked\r\n\r\nzz\r\n"):
            client = await Client.to(front.port)
            client.send(bad)
            assert (await asyncio.wait_for(client.answer(), 10)).status == 400
            client.leave()
