"""The coordinator's own routes against their own description: whatever is sent, they answer as it
says, and nothing is created."""

import json
from collections import Counter
from urllib.parse import quote

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from tests.coordinator.front import ask, post
from tests.coordinator.program_engine import ProgramEngine, coordinator, get, launch, until_up

#: What a server answers although no route says so: a path that it does not have, or a method.
_ALWAYS = {404, 405}

_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=6,
)
#: Deeper than any decoder follows, where a name is looked for and where none is.
DEEP = b'{"program_id": %b' % (b"[" * 100_000)
DEEP_AND_VALID = DEEP + b"]" * 100_000 + b"}"
_NAMES = st.sampled_from(["program_id", "tool_name", "url", "worker_url"]) | st.text(max_size=5)
_BODIES = st.one_of(
    st.binary(max_size=60),
    st.dictionaries(_NAMES, _VALUES, max_size=4).map(lambda value: json.dumps(value).encode()),
    st.sampled_from(
        [b"", b"{}", b"[]", b"null", b"\xff\xfe", b"[" * 2000, b'{"program_id": 1e999}', DEEP]
    ),
)


@st.composite
def requests(draw, operations):
    """Any request to any of the operations."""
    path, method = draw(st.sampled_from(operations))
    while "{" in path:
        head, _, tail = path.partition("{")
        value = draw(st.text(min_size=1, max_size=12))
        path = head + quote(value.encode("utf-8", "replace"), safe="") + tail.partition("}")[2]
    query = draw(st.sampled_from([b"", b"?url=", b"?url=%00", b"?limit=-1", b"?worker_url=x%20y"]))
    body = draw(_BODIES) if method != "get" else b""
    kind = draw(st.sampled_from([b"application/json", b"text/plain", b"application/x-a"]))
    head = b"%b %b%b HTTP/1.1\r\nhost: x\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n"
    return head % (method.upper().encode(), path.encode(), query, kind, len(body)) + body


async def test_the_description_names_every_route_and_what_it_refuses():
    engine = ProgramEngine()
    await engine.start()
    async with coordinator(launch([engine])) as (port, control):
        await until_up(control, 1)
        description = (await ask(port, get("/openapi.json"))).json()
        for path in ("/programs/release", "/engines", "/status", "/metrics", "/weight_sync/begin"):
            assert path in description["paths"]
        for path, operations in description["paths"].items():
            for method, operation in operations.items():
                codes = set(operation["responses"])
                assert "200" in codes, (method, path)
                if path != "/health":
                    assert "401" in codes, (method, path)
                if method == "post":
                    assert "413" in codes, (method, path)
                if "requestBody" in operation:
                    assert "400" in codes, (method, path)
    await engine.kill()


@pytest.mark.parametrize("body", [DEEP, DEEP_AND_VALID], ids=["cut", "whole"])
@pytest.mark.parametrize("sharded", [False, True])
async def test_a_body_that_nests_too_deep_is_refused_everywhere(body, sharded):
    engine = ProgramEngine()
    await engine.start()
    shared = {"replica": "http://127.0.0.1:1", "replicas": ["http://127.0.0.1:1"]}
    async with coordinator(launch([engine], **(shared if sharded else {}))) as (port, control):
        await until_up(control, 1)
        described = (await ask(port, get("/openapi.json"))).json()["paths"]
        paths = [path for path, by_method in described.items() if "post" in by_method]
        reading = [path for path in paths if not path.startswith("/weight_sync/")]
        assert len(reading) >= 6
        for path in reading:
            assert (await ask(port, post(body, path))).status == 400, path
    await engine.kill()


@pytest.mark.timeout(120)
async def test_whatever_is_sent_is_answered_as_described():
    seen: Counter[int] = Counter()
    engine = ProgramEngine()
    await engine.start()
    async with coordinator(launch([engine])) as (port, control):
        await until_up(control, 1)
        described = (await ask(port, get("/openapi.json"))).json()["paths"]
        operations = [
            (path, method)
            for path, by_method in described.items()
            for method in by_method
            # These would change the fleet that the others are tried on.
            if (path, method) not in {("/weight_sync/begin", "post")}
        ]
        sent: list[bytes] = []

        @settings(max_examples=300, deadline=None, database=None)
        @given(requests(operations))
        def collect(request):
            sent.append(request)

        collect()
        for request in sent:
            target = request.split(b" ")[1].split(b"?")[0].decode()
            answer = await ask(port, request)
            assert answer.whole, request
            seen[answer.status] += 1
            assert answer.status < 500 or answer.status == 503, (request, answer.body)
            if answer.status >= 400:
                assert "error" in answer.json(), (request, answer.body)
                error = answer.json()["error"]
                assert error["message"], request
                assert error["code"] == answer.status
                known = _codes(described, target, request.split(b" ")[0].decode().lower())
                assert answer.status in known | _ALWAYS, (request, answer.status, known)
            assert len(control.fleet) == 0
            assert list(control.fleet.backends) == [engine.url]
    await engine.kill()
    assert min(seen[status] for status in (200, 400, 404)) > 5, seen


def _codes(described, target, method):
    """What the operations that the path may be say that they answer."""
    codes = set()
    for path, operations in described.items():
        fixed = path.partition("{")[0]
        if (target == path or ("{" in path and target.startswith(fixed))) and method in operations:
            codes |= {int(code) for code in operations[method]["responses"]}
    return codes
