"""The middleware inside vLLM's own application, as ``vllm_thunder serve`` puts it; no engine."""

from types import SimpleNamespace

import pytest
from fastapi.testclient import TestClient
from vllm.entrypoints.launchers.app import build_app

from tests.http.driver import FakeCore
from tests.http.test_client import metrics
from vllm_thunder.cli.serve import build_parsers, configure

CHAT = "/v1/chat/completions"
BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
KEY = {"authorization": "Bearer k"}


@pytest.fixture(scope="module")
def parser():
    return build_parsers()[0]


@pytest.fixture
def serve(parser):
    def served(*flags):
        args = parser.parse_args(["serve", "m", *flags])
        configure(args)
        app = build_app(args, ("generate",), None)
        answers = {
            "get": [{"program_id": "a"}],
            "list": [[]],
            "metrics": [metrics()],
            "release": [{"program_id": "a", "released": True, "pending": False}],
        }
        app.state.engine_client = SimpleNamespace(engine_core=FakeCore(answers))
        app.state.openai_serving_chat = None
        return TestClient(app, raise_server_exceptions=False)

    return served


def test_a_labelled_call_reaches_vllms_endpoint(serve):
    client = serve()
    # Without a model vLLM's own endpoint answers 501: the body was read and accepted.
    for members in ({}, {"program_id": 7}, {"session_id": 7}, {"vllm_xargs": {"job_id": 1}}):
        assert client.post(CHAT, json={**BODY, **members}).status_code == 501
    context = {"vllm_xargs": {"agentic_context": {"program_id": "a"}}}
    assert client.post(CHAT, json={**BODY, **context}).status_code == 501


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/responses", "/v1/messages"])
@pytest.mark.parametrize("content", ["", "{", "[]", '{"program_id": "a"', '{"program_id": "a"}'])
def test_malformed_bodies_are_vllms_400(serve, path, content):
    headers = {"content-type": "application/json"}
    answer = serve().post(path, content=content, headers=headers)
    assert answer.status_code == 400
    assert "error" in answer.json()


def test_a_wrong_id_is_a_400(serve):
    answer = serve().post(CHAT, json={**BODY, "program_id": True})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "program_id"


def test_the_api_key_comes_first(serve):
    client = serve("--api-key", "k")
    wrong_id = {**BODY, "program_id": True}
    refused = client.post(CHAT, json=wrong_id)
    assert (refused.status_code, refused.json()) == (401, {"error": "Unauthorized"})
    assert client.post(CHAT, json=wrong_id, headers=KEY).status_code == 400
    ours = client.get("/programs")
    assert (ours.status_code, ours.json()) == (refused.status_code, refused.json())
    assert ours.headers["content-type"] == refused.headers["content-type"]
    assert client.get("/programs", headers=KEY).json() == {"programs": []}
    release = client.post("/programs/release", json={"program_id": "a"}, headers=KEY)
    assert release.json() == {"program_id": "a", "released": True}


@pytest.mark.parametrize("prefix", ["", "/proxy"])
def test_root_path(serve, prefix):
    client = serve("--root-path", "/proxy", "--api-key", "k")
    assert client.get(prefix + "/programs/a/b").status_code == 401
    assert client.get(prefix + "/programs/a/b", headers=KEY).json() == {"program_id": "a"}
    wrong_id = {**BODY, "program_id": True}
    assert client.post(prefix + CHAT, json=wrong_id).status_code == 401
    assert client.post(prefix + CHAT, json=wrong_id, headers=KEY).status_code == 400


def test_metrics(serve):
    text = serve().get("/metrics").text
    assert "\nvllm_thunder:up 1.0\n" in text
    assert "\npython_info{" in text


def test_vllms_own_routes_are_as_before(serve):
    client = serve()
    assert client.get("/version").status_code == 200
    assert client.get("/nothing").status_code == 404
    assert client.post("/programsx").status_code == 404
