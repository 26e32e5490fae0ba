"""Wrong requests and wrong command lines: a clear error each, and no program."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.serving.client import ENDPOINTS, Client, call_body
from tests.serving.conftest import Server

WRONG_IDS: dict[str, Any] = {
    "boolean": True,
    "float": 1.5,
    "list": ["a"],
    "object": {"id": "a"},
    "empty": "",
}
PLACES = {
    "program_id": lambda value: {"program_id": value},
    "session_id": lambda value: {"session_id": value},
    "job_id": lambda value: {"job_id": value},
    "vllm_xargs.program_id": lambda value: {"vllm_xargs": {"program_id": value}},
    "agentic_context.program_id": lambda value: {"agentic_context": {"program_id": value}},
}


@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize("kind", WRONG_IDS)
async def test_an_id_of_the_wrong_type(client: Client, path: str, kind: str) -> None:
    for stream in (False, True):
        for field, place in PLACES.items():
            body = call_body(path, "hello", **place(WRONG_IDS[kind]), stream=stream)
            status, text = await client.request("POST", path, json=body)
            assert status == 400, (field, text)
            error = json.loads(text)["error"]
            assert error["message"].startswith(field + ": "), error
            if path != "/v1/messages":
                assert error["param"] == field
    assert await client.programs() == []


@pytest.mark.parametrize("value", [*WRONG_IDS.values(), None], ids=[*WRONG_IDS, "missing"])
async def test_a_release_of_what_is_no_id(client: Client, value: Any) -> None:
    status, text = await client.request("POST", "/programs/release", json={"program_id": value})
    assert status == 400
    assert "program_id" in json.loads(text)["error"]["message"]


@pytest.mark.parametrize("path", [*ENDPOINTS, "/programs/release"])
@pytest.mark.parametrize(
    "content", ["", "{", "[]", "null", '{"program_id": "a"', '{"program_id": "a"}', "\xff"]
)
async def test_malformed_bodies(client: Client, path: str, content: str) -> None:
    headers = {"Content-Type": "application/json"}
    data = content.encode("latin-1")
    status, text = await client.request("POST", path, data=data, headers=headers)
    if path == "/programs/release" and content.endswith("}"):
        assert (status, json.loads(text)["released"]) == (200, False)
    else:
        assert status == 400, text
        assert json.loads(text).keys() in ({"error"}, {"type", "error"}, {"detail"})
    assert await client.programs() == []


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": -1},
        {"temperature": "hot"},
        {"model": "another"},
        {"n": 0},
        {"structured_outputs": {"json": "{"}},
    ],
    ids=lambda fields: next(iter(fields)),
)
async def test_what_vllm_refuses_creates_no_program(client: Client, fields: dict) -> None:
    path = "/v1/chat/completions"
    plain = await client.request("POST", path, json=call_body(path, "hello") | fields)
    labelled = await client.request(
        "POST", path, json=call_body(path, "hello", program_id="p") | fields
    )
    assert plain[0] in (400, 404)
    assert labelled == plain
    assert await client.programs() == []


@pytest.mark.parametrize("key", [None, "another key", ""])
async def test_a_wrong_key(client: Client, server: Server, key: str | None) -> None:
    """Our routes, too; what vLLM leaves open stays open."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    async with aiohttp.ClientSession(headers=headers) as stranger:
        for path in ENDPOINTS:
            body = call_body(path, "hello", program_id="stranger")
            async with stranger.post(server.url + path, json=body) as answer:
                assert answer.status == 401
                assert "error" in await answer.json()
        for method, path in [
            ("GET", "/programs"),
            ("GET", "/programs/"),
            ("GET", "/programs/summary"),
            ("GET", "/programs/a"),
            ("GET", "/v1/models"),
            ("POST", "/programs/release"),
        ]:
            body = {"program_id": "a"} if method == "POST" else None
            async with stranger.request(method, server.url + path, json=body) as answer:
                assert answer.status == 401, path
        for path in ("/health", "/metrics", "/version"):
            async with stranger.get(server.url + path) as answer:
                assert answer.status == 200, path
    assert await client.programs() == []


async def test_unknown_paths_and_methods(client: Client) -> None:
    assert (await client.request("GET", "/programs/nobody"))[0] == 404
    assert (await client.request("DELETE", "/programs/nobody"))[0] == 405
    assert (await client.request("GET", "/programsomething"))[0] == 404
    assert (await client.request("POST", "/programs"))[0] == 405


def test_another_vllm(tiny_model: Path, tmp_path: Path) -> None:
    """Scenario 19: a distribution of another version, found first."""
    metadata = tmp_path / "vllm-0.33.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.33.0\n")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from vllm_thunder.cli.main import main\n"
        f"sys.exit(main(['serve', {str(tiny_model)!r}]))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 1
    assert re.search(r"needs vLLM 0\.32\.0, but vllm 0\.33\.0 is installed", ended.stderr)
    assert "Traceback" not in ended.stderr
