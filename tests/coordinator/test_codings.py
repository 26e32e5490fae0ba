"""Packed bodies are unpacked as gzip does it, in time and memory that the body's size bounds."""

import gzip
import random
import time

import pytest

from tests.coordinator.fake_engine import FakeEngine
from tests.coordinator.front import post, running_front
from vllm_thunder.coordinator.proxy.codings import gunzipped
from vllm_thunder.coordinator.proxy.request_body import BodyTooLarge

PACKED = b"content-type: application/json\r\ncontent-encoding: gzip\r\n"


def packed(*members):
    return b"".join(gzip.compress(member, mtime=0) for member in members)


def of_sizes(*sizes):
    rng = random.Random(1)
    return [rng.randbytes(size) for size in sizes]


MEMBERS = {
    "one": of_sizes(500_000),
    "one that shrinks": [b" " * 3_000_000],
    "empty": of_sizes(*[0] * 1000),
    "small": of_sizes(*[1, 0, 200] * 300),
    "across every step": of_sizes(*[65_000, 500, 0, 70_000, 1] * 10),
    "none": [],
}


@pytest.mark.parametrize("kind", MEMBERS)
def test_members_are_unpacked_as_gzip_does(kind):
    whole = b"".join(MEMBERS[kind])
    body = packed(*MEMBERS[kind])
    assert gunzipped(body, max(len(whole), 1)) == whole
    if whole:
        with pytest.raises(BodyTooLarge, match=f"{len(whole) - 1} bytes"):
            gunzipped(body, len(whole) - 1)


@pytest.mark.parametrize("body", [b"{}", packed(b"a") + b"junk", b"\x1f\x8bbroken", b"\x1f"])
def test_what_no_engine_can_unpack_stays_what_it_is_or_is_a_part(body):
    assert gunzipped(body, 1000) in (body, b"")


def test_members_have_a_limit():
    with pytest.raises(BodyTooLarge, match="1000 gzip members"):
        gunzipped(packed(*[b""] * 1001), 1000)


@pytest.mark.parametrize("member", [b"", b" ", b" " * 60_000], ids=len)
async def test_a_body_of_a_hundred_thousand_members_costs_little(member):
    body = packed(member) * 100_000
    async with running_front(max_body_bytes=len(body)) as front:
        await front.add(FakeEngine())
        began = time.process_time()
        answer = await front.ask(post(body, headers=PACKED))
        assert time.process_time() - began < 1.0
        assert answer.status == 413
        assert "members" in answer.json()["error"]["message"] or len(member) > 1000
