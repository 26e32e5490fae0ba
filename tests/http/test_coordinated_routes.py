"""What a coordinator does with each request that vLLM's own server takes."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from vllm.entrypoints.launchers.app import build_app

from vllm_thunder.cli.serve import build_parsers, configure
from vllm_thunder.coordinator.broadcast import SINGLE_ENGINE_PATHS, is_broadcast
from vllm_thunder.coordinator.proxy.stored import STORED_PREFIX
from vllm_thunder.program.endpoints import MODEL_CALLS

#: They change nothing, and any engine may answer them.
ANY_ENGINE = {
    "/cohere/v2/chat/render",
    "/detokenize",
    "/is_scaling_elastic_ep",
    "/ping",
    "/tokenize",
    "/v1/chat/completions/derender",
    "/v1/chat/completions/render",
    "/v1/completions/derender",
    "/v1/completions/render",
    "/v1/messages/count_tokens",
    "/v1/messages/render",
}

_POST = re.compile(r'(?:\.post|\.api_route|add_api_route)\(\s*"(/[^"]*)"')


def of_sources():
    """Every path that vLLM has a POST route for, whatever switches it on."""
    (folder,) = find_spec("vllm.entrypoints").submodule_search_locations
    texts = (path.read_text() for path in Path(folder).rglob("*.py"))
    return {path for text in texts for path in _POST.findall(text)}


def of_application(monkeypatch):
    """Those of an application with everything that can be switched on without a model."""
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
    args = build_parsers()[0].parse_args(["serve", "m", "--tokens-only"])
    configure(args)
    app = build_app(args, ("generate", "transcription", "render"), None)
    return {route.path for route in app.routes if "POST" in (getattr(route, "methods", None) or ())}


@pytest.mark.parametrize("source", ["sources", "application"])
def test_every_route_is_dealt_with_in_one_way(source, monkeypatch):
    paths = of_sources() if source == "sources" else of_application(monkeypatch)
    assert len(paths) > 30
    for path in paths:
        ways = [
            path in MODEL_CALLS,
            is_broadcast(path),
            path in SINGLE_ENGINE_PATHS,
            path.startswith(STORED_PREFIX),
            path in ANY_ENGINE,
        ]
        assert sum(ways) == 1, path
