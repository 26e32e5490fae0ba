"""Every endpoint takes an id, and answers as if there were none."""

import json
from typing import Any

import pytest

from tests.serving.client import ENDPOINTS, Client, call_body, completion, shape, words

#: Ids that have to survive JSON, msgpack, URLs and metrics.
IDS = ["plain", "a/b/../c", "näme ✓", "new\nline", "%2F?x=1#y", "summary", "release", "x" * 4000, 7]

#: Where a client may put the id: fields of the body, headers.
WAYS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "session_id": ({"session_id": "way"}, {}),
    "integer session_id": ({"session_id": 3}, {}),
    "job_id": ({"job_id": "way"}, {}),
    "vllm_xargs": ({"vllm_xargs": {"program_id": "way"}}, {}),
    "context in vllm_xargs": ({"vllm_xargs": {"agentic_context": {"program_id": "way"}}}, {}),
    "X-Session-ID": ({}, {"X-Session-ID": "way"}),
    "X-Dynamo-Session-ID": ({}, {"X-Dynamo-Session-ID": "way"}),
    "claude code": ({}, {"x-claude-code-session-id": "way"}),
    "thread": ({}, {"thread-id": "way"}),
}


def kinds(events: list[dict[str, Any]]) -> list[str]:
    """The kinds of events in order of their first one: how many tokens share an event is chance."""
    return list(dict.fromkeys(json.dumps(shape(event), sort_keys=True) for event in events))


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_labelled_and_unlabelled_answers_look_alike(client: Client, path: str) -> None:
    text = words(100, path)
    plain = await client.json("POST", path, json=call_body(path, text))
    labelled = await client.json("POST", path, json=call_body(path, text, program_id="p"))
    assert shape(labelled) == shape(plain)
    async with client.stream(path, call_body(path, text)) as stream:
        plain_events = await stream.rest()
    async with client.stream(path, call_body(path, text, program_id="p")) as stream:
        labelled_events = await stream.rest()
    assert kinds(labelled_events) == kinds(plain_events)
    await client.until_idle()
    program = await client.program("p")
    assert (program["turns"], program["phase"]) == (2, "ACTING")
    assert program["context_tokens"] > 100


@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize("way", WAYS)
async def test_every_way_to_name_a_program(client: Client, path: str, way: str) -> None:
    fields, headers = WAYS[way]
    if path == "/v1/messages" and "vllm_xargs" not in fields and "session_id" in fields:
        headers = {"X-Session-ID": str(fields["session_id"])}
    answer = await client.json(
        "POST", path, json=call_body(path, "hello", **fields), headers=headers
    )
    assert answer["usage"]
    (program,) = await client.programs()
    assert program["program_id"] == ("3" if way == "integer session_id" else "way")
    assert program["turns"] == 1


@pytest.mark.parametrize("program_id", IDS, ids=lambda value: str(value)[:8])
async def test_any_text_is_an_id(client: Client, program_id: str | int) -> None:
    text = str(program_id)
    await client.complete(words(40, "id"), program_id)
    (program,) = await client.programs()
    assert program["program_id"] == text
    by_query = await client.json("GET", "/programs", params={"program_id": text})
    assert by_query["program_id"] == text
    if text != "summary":
        assert (await client.program(text))["program_id"] == text
    assert (await client.json("POST", "/programs/release", json={"program_id": program_id})) == {
        "program_id": text,
        "released": True,
    }
    assert await client.programs() == []


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_a_body_of_nine_megabytes(client: Client, path: str) -> None:
    """In a field that vLLM ignores; then as a prompt, which is longer than the model allows."""
    padding = "x" * (9 << 20)
    body = {"padding": padding, **call_body(path, "hello"), "program_id": "large"}
    assert (await client.json("POST", path, json=body))["usage"]
    assert (await client.program("large"))["turns"] == 1
    await client.release("large")

    too_long = "word " * (2 << 20)
    plain = await client.request("POST", path, json=call_body(path, too_long))
    labelled = await client.request("POST", path, json=call_body(path, too_long, program_id="long"))
    assert plain[0] == labelled[0] == 400
    assert shape(json.loads(labelled[1])) == shape(json.loads(plain[1]))
    assert await client.programs() == []


async def test_other_ways_into_the_engine(client: Client) -> None:
    """Endpoints that are not about text completion: labelled or not, the same answer."""
    body = {"model": "replayed", "prompt": "hello"}
    for path in ("/tokenize", "/detokenize"):
        content = body if path == "/tokenize" else {"model": "replayed", "tokens": [300, 301]}
        plain = await client.json("POST", path, json=content)
        labelled = await client.json("POST", path, json={**content, "program_id": "none"})
        assert shape(plain) == shape(labelled)
    batch = {
        "model": "replayed",
        "messages": [[{"role": "user", "content": f"hello {n}"}] for n in range(3)],
        "max_tokens": 3,
        "program_id": "batch",
    }
    answer = await client.json("POST", "/v1/chat/completions/batch", json=batch)
    assert len(answer["choices"]) == 3
    await client.until_idle()
    assert (await client.program("batch"))["turns"] == 1


async def test_structured_output_and_logprobs(client: Client) -> None:
    body = call_body(
        "/v1/chat/completions",
        words(50, "grammar"),
        tokens=30,
        structured_outputs={"choice": ["yes", "no"]},
        logprobs=True,
    )
    answer = await client.json("POST", "/v1/chat/completions", json={**body, "program_id": "g"})
    assert answer["choices"][0]["message"]["content"] in ("yes", "no")
    await client.until_idle()
    assert (await client.program("g"))["turns"] == 1


async def test_a_grammar_error_of_a_held_turn_surfaces(client: Client) -> None:
    """The turn would be held; what is wrong with it is told all the same, and at once."""
    body = completion(words(2600, "bad grammar"), "g", tokens=5)
    body["structured_outputs"] = {"grammar": "root ::= nothing here is a grammar ("}
    # Nothing is held yet, and vLLM loads its grammar library: its front end stands still for that.
    alone = await client.request("POST", "/v1/completions", json=body, own_connection=True)
    assert alone[0] == 400, alone
    async with client.crowd():
        held = await client.request("POST", "/v1/completions", json=body, own_connection=True)
        assert held == alone
        summary = await client.summary()
        assert summary["held_turns"] == 0
        assert summary["by_phase"]["REASONING"] == 2


async def test_turns_after_one_another_hit_their_own_blocks(client: Client) -> None:
    context = words(600, "hits")
    for turn in range(4):
        answer = await client.complete(context, "hits", tokens=8)
        usage = answer["usage"]
        cached = (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0
        if turn:
            assert cached >= 600 // 32 * 32, f"turn {turn}: {usage}"
        context += answer["choices"][0]["text"] + words(40, f"hits {turn}")
    program = await client.program("hits")
    assert program["resident_blocks"] == program["unique_blocks"] == program["context_tokens"] // 32


async def test_a_parent_a_group_and_a_priority(client: Client) -> None:
    fields = {
        "agentic_context": {"parent_program_id": "root", "program_group": "g"},
        "priority": 0,
    }
    await client.complete(words(40, "child"), "child", **fields)
    program = await client.program("child")
    assert (program["parent_id"], program["group"], program["priority"]) == ("root", "g", 0)


async def test_a_shared_prefix_is_counted_once(client: Client) -> None:
    prefix = words(640, "shared")
    for number in range(5):
        await client.complete(prefix + words(40, f"own {number}"), f"sharer {number}", tokens=2)
    summary = await client.until_idle()
    assert summary["shared_blocks"] == 20
    assert summary["unique_blocks"] == 5
