"""Bodies as the middleware forwards them, against vLLM's own request models and endpoints."""

import ast
import json
from pathlib import Path

import pytest
import vllm.entrypoints
from pydantic import ValidationError
from vllm.entrypoints.anthropic.protocol import AnthropicErrorResponse, AnthropicMessagesRequest
from vllm.entrypoints.openai.chat_completion.protocol import (
    BatchChatCompletionRequest,
    ChatCompletionRequest,
)
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.pooling.embed.protocol import EmbeddingCompletionRequest
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.exceptions import VLLMError

from tests.http.driver import Server
from vllm_thunder.program.endpoints import MODEL_CALLS

MESSAGES = [{"role": "user", "content": "hi"}]
ENDPOINTS = {
    "/v1/chat/completions": (ChatCompletionRequest, {"model": "m", "messages": MESSAGES}),
    "/v1/chat/completions/batch": (
        BatchChatCompletionRequest,
        {"model": "m", "messages": [MESSAGES, MESSAGES]},
    ),
    "/v1/completions": (CompletionRequest, {"model": "m", "prompt": "hi"}),
    "/v1/responses": (ResponsesRequest, {"model": "m", "input": "hi"}),
    "/v1/messages": (
        AnthropicMessagesRequest,
        {"model": "m", "messages": MESSAGES, "max_tokens": 5},
    ),
    "/v1/embeddings": (EmbeddingCompletionRequest, {"model": "m", "input": ["a", "b"]}),
}
OPENAI = ["/v1/chat/completions", "/v1/completions", "/v1/responses"]
CONTEXT = {
    "program_id": "a",
    "root_program_id": "r",
    "step_id": 3,
    "priority": 1,
    "deadline_seconds": 9.5,
    "kv_retention_ttl_seconds": 60,
}
LABELS = [
    {"program_id": "a"},
    {"program_id": 7},
    {"session_id": "a"},
    {"session_id": 7},
    {"session_id": 2**70},
    {"session_id": "x" * 5000},
    {"job_id": 7, "is_last_step": True},
    {"agentic_context": CONTEXT},
    {"vllm_xargs": {"program_id": 7, "session_id": 8}},
    {"vllm_xargs": {"job_id": "j", "is_last_step": True}},
    {"vllm_xargs": {"agentic_context": CONTEXT, "top": 1.5, "list": [1, "x"]}},
    {"vllm_xargs": {"program_id": "a", "session_id": None, "agentic_context": None}},
    {"program_id": "a", "session_id": 7, "vllm_xargs": {"agentic_context": {}}},
    {
        "program_id": "a",
        "parent_program_id": 3,
        "program_group": "g",
        "tool_name": "bash",
        "kv_retention_ttl_seconds": 5,
    },
]


def validated(path: str, body: bytes):
    """As FastAPI does: Python's parser, then the request model."""
    return ENDPOINTS[path][0].model_validate(json.loads(body))


async def forwarded(path: str, members: dict) -> bytes:
    server = Server()
    answer = await server.post(path, {**ENDPOINTS[path][1], **members})
    assert answer.status == 200, answer.body
    assert server.model.turns[0] is not None
    return server.model.bodies[0]


@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize("label", LABELS, ids=json.dumps)
async def test_vllm_accepts_every_labelled_body(path, label):
    request = validated(path, await forwarded(path, label))
    assert request.model == "m"


@pytest.mark.parametrize("path", OPENAI)
@pytest.mark.parametrize(
    "label",
    [
        {"session_id": 7},
        {"vllm_xargs": {"agentic_context": CONTEXT}},
        {"vllm_xargs": {"program_id": "a", "session_id": None}},
    ],
    ids=json.dumps,
)
async def test_vllm_would_refuse_what_is_changed(path, label):
    with pytest.raises((ValidationError, VLLMError)):
        validated(path, json.dumps({**ENDPOINTS[path][1], **label}).encode())
    validated(path, await forwarded(path, label))


@pytest.mark.parametrize("path", OPENAI)
async def test_vllm_still_gets_its_own_fields(path):
    label = {"session_id": 7, "vllm_xargs": {"agentic_context": CONTEXT, "k": 1.5}, "priority": 2}
    request = validated(path, await forwarded(path, label))
    assert request.session_id == "7"
    assert request.vllm_xargs == {"k": 1.5}
    assert request.priority == 2


@pytest.mark.parametrize("path", OPENAI)
async def test_our_fields_do_not_change_the_sampling_parameters(path):
    extras = {"program_id": "a", "agentic_context": CONTEXT, "tool_name": "bash"}
    plain = validated(path, json.dumps(ENDPOINTS[path][1]).encode())
    labelled = validated(path, await forwarded(path, extras))
    defaults = {"max_tokens": 16, "default_sampling_params": {}}
    if path == "/v1/responses":
        defaults = {"default_max_tokens": 16, "default_sampling_params": {}}
    assert repr(labelled.to_sampling_params(**defaults)) == repr(
        plain.to_sampling_params(**defaults)
    )


async def test_error_answers_are_vllms_models():
    answer = await Server().post("/v1/chat/completions", {"program_id": []})
    assert ErrorResponse.model_validate(answer.json()).model_dump() == answer.json()
    answer = await Server().post("/v1/messages", {"program_id": []})
    assert AnthropicErrorResponse.model_validate(answer.json()).model_dump() == answer.json()


#: POST endpoints, given as literals in vLLM's source, that start no engine request of a program.
OTHER_PATHS = {
    "/abort_requests",
    "/cohere/v2/chat/render",
    "/collective_rpc",
    "/detokenize",
    "/fault_tolerance/apply",
    "/finish_weight_update",
    "/init_weight_transfer_engine",
    "/is_scaling_elastic_ep",
    "/pause",
    "/ping",
    "/release_kv_cache_memory",
    "/reset_encoder_cache",
    "/reset_mm_cache",
    "/reset_prefix_cache",
    "/resume",
    "/scale_elastic_ep",
    "/shutdown_weight_transfer_engine",
    "/sleep",
    "/start_draft_weight_update",
    "/start_profile",
    "/start_weight_update",
    "/stop_profile",
    "/tokenize",
    "/update_weight_version",
    "/update_weights",
    "/v1/chat/completions/derender",
    "/v1/chat/completions/render",
    "/v1/completions/derender",
    "/v1/completions/render",
    "/v1/load_lora_adapter",
    "/v1/messages/count_tokens",
    "/v1/messages/render",
    "/v1/responses/render",
    "/v1/responses/{response_id}/cancel",
    "/v1/unload_lora_adapter",
    "/wake_up",
    "/weight_checker",
}


def test_every_post_endpoint_of_vllm_is_known():
    """An endpoint that vLLM adds or moves must be sorted into one of the two sets."""
    folder = Path(vllm.entrypoints.__path__[0])
    found = set()
    for file in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            first = node.args[0] if node.args else None
            path = first.value if isinstance(first, ast.Constant) else None
            if node.func.attr == "post" and isinstance(path, str) and path.startswith("/"):
                found.add(path)
    assert found == MODEL_CALLS | OTHER_PATHS
