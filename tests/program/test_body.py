import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_thunder.program.body import acceptable_body
from vllm_thunder.program.identity import BODY_NAMES, decode_routing_fields


def accepted(body: bytes) -> bytes:
    return acceptable_body(body, decode_routing_fields(body))


@pytest.mark.parametrize(
    "body",
    [
        b'{"program_id": 1}',
        b'{"session_id": "1", "agentic_context": {"program_id": "a"}}',
        b'{"session_id": null, "vllm_xargs": {"job_id": "a", "is_last_step": 1, "k": [1, "x"]}}',
        b'{"vllm_xargs": null}',
        b'{"vllm_xargs": {"other": {"agentic_context": 1}, "program_id": "a"}}',
    ],
)
def test_what_vllm_accepts_or_answers_for_is_the_same_object(body):
    assert accepted(body) is body


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"session_id": 7}', b'{"session_id":"7"}'),
        (b'{"a" : 1.0 , "session_id":-0, "b":[ 1 ]}', b'{"a":1.0,"session_id":"0","b":[ 1 ]}'),
        (
            b'{"vllm_xargs": {"agentic_context": {"program_id": "a"}, "x": 1e5}, "z": 1E400}',
            b'{"vllm_xargs":{"x":1e5},"z":1E400}',
        ),
        (b'{"vllm_xargs": {"program_id": null, "job_id": 1}}', b'{"vllm_xargs":{"job_id":1}}'),
        (b'{"session_id": 1, "session_id": 2}', b'{"session_id":"2"}'),
        (b'{"session\\u005fid": 1, "k\\n": 2}', b'{"session_id":"1","k\\n":2}'),
    ],
)
def test_only_the_refused_values_change(body, expected):
    assert accepted(body) == expected


@pytest.mark.parametrize(
    "body",
    [
        b'{"session_id": 5, "t": NaN, "u": -Infinity, "v": 0.1}',
        b'{"session_id": 5, "t": "\\ud83d", "v": 123456789012345678901234567890}',
        '{"session_id": 5, "t": "é🧵", "vllm_xargs": {"agentic_context": {}}}'.encode("utf-16"),
        '{"session_id": 5, "t": "é"}'.encode("utf-8-sig"),
    ],
)
def test_what_only_pythons_parser_reads_is_kept(body):
    expected = json.loads(body)
    expected["session_id"] = "5"
    expected.get("vllm_xargs", {}).pop("agentic_context", None)
    assert repr(json.loads(accepted(body))) == repr(expected)


VALUE = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)
OURS = BODY_NAMES | {"agentic_context"}
NAMES = st.text().filter(lambda name: name not in ("session_id", "vllm_xargs"))


def written(members: dict, *, ascii_only: bool, indent: int | None) -> bytes:
    return json.dumps(members, ensure_ascii=ascii_only, indent=indent).encode()


@given(
    members=st.dictionaries(NAMES, VALUE, max_size=6),
    extra=st.dictionaries(st.text().filter(lambda n: n not in OURS), VALUE, max_size=4),
    session_id=st.integers(),
    position=st.integers(0, 6),
    ascii_only=st.booleans(),
    indent=st.sampled_from([None, 1]),
)
def test_every_other_member_keeps_its_bytes_and_place(
    members, extra, session_id, position, ascii_only, indent
):
    items = list(members.items())
    extra_items = [*extra.items(), ("agentic_context", {"program_id": "a"})]
    items[position:position] = [("session_id", session_id), ("vllm_xargs", dict(extra_items))]
    body = written(dict(items), ascii_only=ascii_only, indent=indent)
    result = accepted(body)

    before = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    after = msgspec.json.decode(result, type=dict[str, msgspec.Raw])
    assert list(after) == list(before)
    for name, raw in before.items():
        if name == "session_id":
            assert bytes(after[name]) == json.dumps(str(session_id)).encode()
        elif name == "vllm_xargs":
            inner = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
            kept = msgspec.json.decode(after[name], type=dict[str, msgspec.Raw])
            assert inner.keys() - kept.keys() == {"agentic_context"}
            assert all(bytes(kept[n]) == bytes(inner[n]) for n in kept)
            assert list(kept) == [n for n in inner if n != "agentic_context"]
        else:
            assert bytes(after[name]) == bytes(raw)


def test_a_large_body_is_changed_without_being_parsed_twice():
    text = "word " * (9 * 2**20 // 5)
    body = json.dumps({"prompt": text, "session_id": 1, "last": 1.0}).encode()
    assert accepted(body) == body.replace(b'": ', b'":').replace(b', "', b',"').replace(
        b'"session_id":1', b'"session_id":"1"'
    )
