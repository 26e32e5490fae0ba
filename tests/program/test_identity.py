import itertools
import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_thunder.program.errors import IdentityError
from vllm_thunder.program.identity import (
    BODY_NAMES,
    HEADER_NAMES,
    RoutingFields,
    decode_routing_fields,
    resolve_turn,
)
from vllm_thunder.program.values import MAX_ID_BYTES, program_id_of

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


def resolve(body=None, headers=None, path=CHAT, turn_id="t"):
    raw = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    fields = decode_routing_fields(raw) if raw is not None else None
    return resolve_turn(headers or {}, fields, path=path, new_turn_id=lambda: turn_id)


def nested(place, name, value):
    for key in reversed(place):
        name, value = key, {name: value}
    return {name: value}


PLACES = [(), ("vllm_xargs",), ("agentic_context",), ("vllm_xargs", "agentic_context")]
#: Every way to name a program, best first: (body, headers).
RANKED = [
    *[(nested(place, "program_id", "ID"), {}) for place in PLACES],
    ({}, {"x-program-id": "ID"}),
    *[(nested(place, "session_id", "ID"), {}) for place in PLACES],
    *[(nested(place, "job_id", "ID"), {}) for place in PLACES],
    ({}, {"x-session-id": "ID"}),
    ({}, {"x-dynamo-session-id": "ID"}),
    ({}, {"x-claude-code-session-id": "ID"}),
    ({}, {"thread-id": "ID"}),
    *[(nested(place, "root_program_id", "ID"), {}) for place in PLACES],
    (nested(("extra_body",), "program_id", "ID"), {}),
    (nested(("nvext", "agent_context"), "session_id", "ID"), {}),
]


def filled(template, text):
    return json.loads(json.dumps(template).replace("ID", text))


def merged(one, other):
    result = dict(one)
    for key, value in other.items():
        both = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = merged(result[key], value) if both else value
    return result


@pytest.mark.parametrize(("body", "headers"), RANKED)
def test_each_name_alone_labels_the_request(body, headers):
    turn = resolve(filled(body, "agent"), filled(headers, "agent"))
    assert (turn.program_id, turn.turn_id, turn.parent_id) == ("agent", "t", None)


@pytest.mark.parametrize(("better", "worse"), list(itertools.combinations(range(len(RANKED)), 2)))
def test_the_better_name_wins(better, worse):
    (body_a, headers_a), (body_b, headers_b) = RANKED[better], RANKED[worse]
    body = merged(filled(body_b, "worse"), filled(body_a, "better"))
    headers = {**filled(headers_b, "worse"), **filled(headers_a, "better")}
    assert resolve(body, headers).program_id == "better"


@pytest.mark.parametrize(
    "body",
    [
        None,
        b"",
        b"not json",
        b"[]",
        b"null",
        b'"program_id"',
        {},
        {"model": "m", "messages": [{"role": "user", "content": 'my "program_id": "x"'}]},
        {"messages": [{"program_id": "x", "session_id": "y", "vllm_xargs": {"job_id": "z"}}]},
        {"metadata": {"program_id": "x"}},
        {"program_id": None, "session_id": None, "agentic_context": None, "vllm_xargs": None},
        {"vllm_xargs": {"program_id": None, "agentic_context": None}},
        {"vllm_xargs": "program_id"},
        {"vllm_xargs": ["program_id"]},
        {"extra_body": "program_id", "nvext": ["session_id"]},
        {"extra_body": {"session_id": "x"}, "nvext": {"session_id": "x", "agent_context": 7}},
        {"extra_body": {"program_id": None}, "nvext": {"agent_context": {"session_id": None}}},
        {"agentic_context": {"step_id": 3, "deadline_seconds": 1.5, "one_off": True}},
        {"deadline_seconds": "soon", "one_off": "perhaps"},
        {"is_last_step": True, "priority": 3, "parent_program_id": "p", "program_group": 1.5},
    ],
)
def test_what_names_no_program_is_unlabelled(body):
    assert resolve(body, {"x-dynamo-session-final": "what", "content-type": "x"}) is None


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ["program_id", "session_id", "job_id", "root_program_id"])
@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (True, "a boolean"),
        (False, "a boolean"),
        (1.0, "a number with a fraction"),
        ([], "a list"),
        (["a"], "a list"),
        ({}, "an object"),
        ({"program_id": "a"}, "an object"),
        ("", "empty"),
        pytest.param("é" * (MAX_ID_BYTES // 2 + 1), f"at most {MAX_ID_BYTES} bytes", id="long"),
        pytest.param(10**5000, f"at most {MAX_ID_BYTES} bytes", id="long integer"),
        ("\ud800", "valid Unicode"),
    ],
)
def test_a_wrong_id_names_the_field_and_what_is_allowed(place, name, value, problem):
    fields = RoutingFields(**nested(place, name, value))
    with pytest.raises(IdentityError, match=problem) as caught:
        resolve_turn({}, fields, path=CHAT, new_turn_id=str)
    assert caught.value.field == ".".join((*place, name))
    assert str(caught.value).startswith(caught.value.field)


@pytest.mark.parametrize("path", ["extra_body.program_id", "nvext.agent_context.session_id"])
def test_a_wrong_id_in_a_member_of_others_names_it_too(path):
    *place, name = path.split(".")
    with pytest.raises(IdentityError, match="must not be empty") as caught:
        resolve(nested(place, name, ""))
    assert caught.value.field == path


def test_a_wrong_id_is_refused_even_where_a_better_name_is_right():
    with pytest.raises(IdentityError, match="job_id"):
        resolve({"program_id": "a", "job_id": True})
    with pytest.raises(IdentityError, match="header x-program-id: must not be empty"):
        resolve({"program_id": "a"}, {"x-program-id": ""})


OTHERS_HEADERS = sorted(HEADER_NAMES - {"x-program-id"})


@pytest.mark.parametrize("name", OTHERS_HEADERS)
def test_an_empty_header_that_is_not_ours_is_absent(name):
    assert resolve({}, {name: ""}) is None
    assert resolve({"program_id": "a"}, {name: ""}) == resolve({"program_id": "a"})


def test_an_empty_session_header_leaves_the_place_to_the_next():
    headers = {"x-session-id": "", "x-claude-code-session-id": "", "thread-id": "7"}
    assert resolve({"root_program_id": "r"}, headers).program_id == "7"
    headers["x-program-id"] = ""
    with pytest.raises(IdentityError, match="header x-program-id: must not be empty"):
        resolve({"root_program_id": "r"}, headers)


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ("text", "a string"),
        (3, "a number"),
        (1.5, "a number"),
        ([], "a list"),
        (True, "a boolean"),
    ],
)
@pytest.mark.parametrize("place", [(), ("vllm_xargs",)])
def test_an_agentic_context_is_an_object(place, value, found):
    with pytest.raises(IdentityError, match=f"must be an object, not {found}$") as caught:
        resolve(nested(place, "agentic_context", value))
    assert caught.value.field == ".".join((*place, "agentic_context"))


@pytest.mark.parametrize(
    ("value", "program_id"),
    [
        (0, "0"),
        (-7, "-7"),
        (2**70, str(2**70)),
        ("a/b//c?d#e", "a/b//c?d#e"),
        ("line\nline\r\n", "line\nline\r\n"),
        (" ", " "),
        ("null", "null"),
        ("a\0b", "a\0b"),
        ("日本語🧵", "日本語🧵"),
        pytest.param("x" * MAX_ID_BYTES, "x" * MAX_ID_BYTES, id="longest"),
    ],
)
def test_ids_are_any_text_and_integers_their_decimals(value, program_id):
    assert resolve({"program_id": value}).program_id == program_id


@given(st.text(min_size=1, max_size=200) | st.integers())
def test_every_string_and_integer_is_an_id(value):
    assert resolve({"program_id": value}).program_id == str(value)
    assert program_id_of(value) == str(value)


@given(st.text(min_size=1).filter(lambda text: text.strip()))
def test_header_ids_are_utf8_sent_as_latin1(text):
    sent = text.encode().decode("latin-1")
    assert resolve(headers={"x-session-id": sent}).program_id == text


def test_header_ids_that_are_no_utf8_stay_latin1():
    assert resolve(headers={"x-session-id": "caf\xe9"}).program_id == "caf\xe9"
    assert resolve(headers={"x-session-id": "já ☃"}).program_id == "já ☃"


def test_a_root_program_is_the_parent_of_the_others():
    context = {"program_id": "child", "root_program_id": "root", "step_id": 3}
    assert resolve({"agentic_context": context}).parent_id == "root"
    context = {"program_id": "root", "root_program_id": "root"}
    assert resolve({"agentic_context": context}).parent_id is None
    context = {"root_program_id": "r"}
    body = {"program_id": "a", "parent_program_id": "p", "agentic_context": context}
    assert resolve(body).parent_id == "p"


def test_dynamo_headers():
    headers = {
        "x-dynamo-session-id": "s",
        "x-dynamo-parent-session-id": "p",
        "x-dynamo-session-final": "true",
    }
    turn = resolve({}, headers)
    assert (turn.program_id, turn.parent_id, turn.final) == ("s", "p", True)
    turn = resolve({"is_last_step": False, "parent_program_id": "q"}, headers)
    assert (turn.parent_id, turn.final) == ("q", False)


@pytest.mark.parametrize(
    ("path", "members", "fans_out"),
    [
        (CHAT, {}, False),
        (CHAT, {"n": 1}, False),
        (CHAT, {"n": None}, False),
        (CHAT, {"n": "x"}, False),
        (CHAT, {"n": 2}, True),
        (CHAT, {"n": "2"}, True),
        (CHAT, {"n": 2.0}, True),
        pytest.param(CHAT, {"n": 10**400}, False, id="huge n"),
        (CHAT, {"best_of": 3}, True),
        (CHAT, {"use_beam_search": True}, True),
        (CHAT, {"use_beam_search": "yes"}, True),
        (CHAT, {"use_beam_search": False}, False),
        (CHAT, {"prompt": ["a", "b"]}, False),
        (COMPLETIONS, {"prompt": "a"}, False),
        (COMPLETIONS, {"prompt": None}, False),
        (COMPLETIONS, {"prompt": []}, False),
        (COMPLETIONS, {"prompt": ["a"]}, False),
        (COMPLETIONS, {"prompt": ["a", "b"]}, True),
        (COMPLETIONS, {"prompt": [1, 2, 3]}, False),
        (COMPLETIONS, {"prompt": [[1, 2, 3]]}, False),
        (COMPLETIONS, {"prompt": [[1], [2]]}, True),
        (COMPLETIONS, {"prompt_embeds": "AAAA"}, False),
        (COMPLETIONS, {"prompt_embeds": ["AAAA", "BBBB"]}, True),
        (COMPLETIONS, {"prompt_embeds": "AAAA", "prompt": "a"}, True),
        (COMPLETIONS, {"n": 2, "prompt": "a"}, True),
        ("/v1/responses", {}, False),
        ("/v1/messages", {}, False),
        ("/cohere/v2/chat", {}, False),
        ("/inference/v1/generate", {"sampling_params": {"n": 1}}, False),
        ("/inference/v1/generate", {"sampling_params": {"n": 2}}, True),
        ("/v1/chat/completions/batch", {}, True),
        ("/v1/embeddings", {"input": ["a", "b"]}, True),
        ("/score", {}, True),
    ],
)
def test_fan_out(path, members, fans_out):
    assert resolve({"program_id": "a", **members}, path=path).fans_out is fans_out


def test_token_ids_may_be_written_with_space():
    body = b'{"program_id": "a", "prompt": [\n\t  1, 2, 3 ]}'
    assert resolve(body, path=COMPLETIONS).fans_out is False


def test_without_a_body_a_header_labels():
    turn = resolve(None, {"thread-id": "7"}, path=CHAT)
    assert (turn.program_id, turn.fans_out) == ("7", False)


def test_every_turn_gets_a_new_turn_id_and_unlabelled_ones_none():
    ids = iter("ab")
    for expected in "ab":
        fields = decode_routing_fields(b'{"program_id": 1}')
        turn = resolve_turn({}, fields, path=CHAT, new_turn_id=lambda: next(ids))
        assert turn.turn_id == expected
    assert resolve_turn({}, None, path=CHAT, new_turn_id=lambda: next(ids)) is None


BODY = '{"program_id": "é", "prompt": [1, 2]}'


@pytest.mark.parametrize(
    "raw",
    [
        BODY.encode(),
        BODY.encode("utf-8-sig"),
        BODY.encode("utf-16"),
        BODY.encode("utf-16-le"),
        BODY.encode("utf-32-be"),
        BODY.encode("ascii", "backslashreplace").replace(b"\\xe9", b"\\u00e9"),
        BODY.replace("program_id", "program\\u005fid").encode(),
        BODY.replace("}", ', "temperature": NaN, "n": -Infinity}').encode(),
        BODY.replace("}", ', "x": "\\ud83d"}').encode(),
        BODY.replace("{", '{"program_id": "old", ', 1).encode(),
        BODY.replace("}", ', "x": ' + "9" * 4000 + "}").encode(),
    ],
    ids=lambda raw: repr(raw[:24]),
)
def test_whatever_vllms_parser_reads_is_read(raw):
    assert json.loads(raw)["program_id"] == "é"
    assert resolve(raw, path=COMPLETIONS).program_id == "é"


@pytest.mark.parametrize(
    "raw",
    [
        b'{"program_id": "a"',
        b'{"program_id": "a"} {}',
        b'{"program_id": "\xff"}',
        b'{"program_id": ' + b"1" * 5000 + b"}",
        b'{"program_id": "a", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
    ids=["cut off", "two", "no utf-8", "long integer", "deep"],
)
def test_whatever_vllms_parser_refuses_names_no_program(raw):
    with pytest.raises((ValueError, RecursionError)):
        json.loads(raw)
    assert decode_routing_fields(raw) is None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=12,
)


@given(st.dictionaries(st.text() | st.sampled_from(sorted(BODY_NAMES)), JSON, max_size=6))
def test_any_object_is_resolved_or_refused_by_name(body):
    try:
        turn = resolve(body)
    except IdentityError as error:
        refused = error.field.rpartition(".")[2]
    else:
        refused = None
    if refused is not None:
        assert refused in BODY_NAMES
        return
    named = [body.get(n) for n in ("program_id", "session_id", "job_id", "root_program_id")]
    expected = next((str(value) for value in named if value is not None), None)
    assert (turn.program_id if turn else None) == expected


def test_header_names_are_lower_case():
    assert all(name == name.lower() for name in HEADER_NAMES)


def test_a_large_body_costs_a_fraction_of_vllms_own_parse():
    content = 'A line with "program_id" in it, é and 🧵.\n' * 200
    body = {"program_id": "a", "messages": [{"role": "user", "content": content}] * 1200}
    raw = json.dumps(body, ensure_ascii=False).encode()
    assert len(raw) > 8 * 2**20

    def seconds(parse):
        times = []
        for _ in range(5):
            start = time.perf_counter()
            parse(raw)
            times.append(time.perf_counter() - start)
        return min(times)

    assert seconds(decode_routing_fields) < 0.8 * seconds(json.loads)
    assert resolve(raw).program_id == "a"
