"""Bodies in chunks are read; any other transfer coding is refused, and not passed on."""

import pytest

from tests.coordinator.front import CHAT, Client, post
from tests.coordinator.program_engine import coordinator, launch, until_up

PATHS = [CHAT, "/detokenize", "/programs/release", "/pause", "/v1/responses/r"]
BODY = b"2\r\n{}\r\n0\r\n\r\n"


def in_coding(path, headers):
    head = b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n%b\r\n"
    return head % (path.encode(), headers) + BODY


@pytest.mark.parametrize("path", PATHS)
async def test_another_transfer_coding_is_a_501(engines, path):
    async with coordinator(launch(engines)) as (port, control):
        await until_up(control, 2)
        client = await Client.to(port)
        for headers in (
            b"transfer-encoding: gzip, chunked\r\n",
            b"Transfer-Encoding: GZIP,chunked\r\n",
            b"transfer-encoding: gzip\r\ntransfer-encoding: chunked\r\n",
            b"transfer-encoding: xchunked, chunked\r\n",
        ):
            client.send(in_coding(path, headers))
            answer = await client.answer()
            assert answer.status == 501, headers
            assert "transfer coding" in answer.body.decode()
        assert not any(path.encode() in request.target for e in engines for request in e.requests)
        client.send(post({"model": "m"}))  # the connection is in order
        assert (await client.answer()).status == 200
        client.leave()


@pytest.mark.parametrize("path", [CHAT, "/detokenize"])
async def test_chunks_are_read(engines, path):
    async with coordinator(launch(engines)) as (port, control):
        await until_up(control, 2)
        client = await Client.to(port)
        for value in (b"chunked", b"Chunked ", b" CHUNKED"):
            client.send(in_coding(path, b"transfer-encoding: %b\r\n" % value))
            assert (await client.answer()).status == 200
        client.leave()
        bodies = [r.body for e in engines for r in e.requests if path.encode() in r.target]
        assert bodies.count(b"{}") == 3
