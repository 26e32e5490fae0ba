import asyncio
import json
import re

import pytest

from tests.http.driver import JSON, FakeCore, Model, Server
from vllm_thunder.program.context import current_turn
from vllm_thunder.program.endpoints import MODEL_CALLS
from vllm_thunder.program.turn import Turn

CHAT = "/v1/chat/completions"
MAIN_PATHS = [CHAT, "/v1/completions", "/v1/responses", "/v1/messages"]


@pytest.mark.parametrize("path", sorted(MODEL_CALLS))
async def test_a_labelled_call_runs_with_its_turn(path):
    server = Server()
    answer = await server.post(path, {"program_id": "a", "model": "m"})
    assert answer.status == 200
    assert answer.body == b"model"
    assert server.model.turns[0].program_id == "a"
    assert re.fullmatch("[0-9a-f]{32}", server.model.turns[0].turn_id)
    assert current_turn.get() is None


async def test_every_request_has_a_turn_id_of_its_own():
    server = Server()
    for _ in range(20):
        await server.post(CHAT, {"program_id": "a"})
    assert len({turn.turn_id for turn in server.model.turns}) == 20


@pytest.mark.parametrize(
    "header",
    "X-Session-ID X-Dynamo-Session-ID x-claude-code-session-id Thread-ID X-PROGRAM-ID".split(),
)
async def test_headers_label_in_any_case(header):
    server = Server()
    await server.post(CHAT, {"messages": []}, {header: "é".encode().decode("latin-1")})
    assert server.model.turns[0].program_id == "é"


async def test_headers_label_what_is_not_json():
    server = Server()
    form = {"content-type": "multipart/form-data; boundary=x", "x-session-id": "s"}
    await server.request("POST", "/v1/audio/transcriptions", b"--x--", form)
    assert server.model.turns[0].program_id == "s"
    assert server.model.bodies == [b"--x--"]


async def test_of_a_repeated_header_the_first_counts():
    server = Server()
    seen = []

    async def model(scope, receive, send):
        seen.append(current_turn.get())

    server.middleware._app = model
    scope = {
        "type": "http",
        "method": "POST",
        "path": CHAT,
        "headers": [(b"x-session-id", b"one"), (b"x-session-id", b"two")],
    }
    await server(scope, None, None)
    assert seen[0].program_id == "one"


@pytest.mark.parametrize(
    ("method", "path", "headers"),
    [
        ("GET", CHAT, JSON),
        ("POST", "/tokenize", JSON),
        ("POST", "/v1/chat/completions/render", JSON),
        ("POST", "/v1/load_lora_adapter", JSON),
        ("POST", CHAT, {}),
        ("POST", CHAT, {"content-type": "text/plain"}),
    ],
)
async def test_what_is_no_model_call_passes_untouched(method, path, headers):
    server = Server()
    body = b'{"program_id": true}'
    answer = await server.request(method, path, body, headers)
    assert answer.status == 200
    assert server.model.turns == [None]
    assert server.model.bodies == [body]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[1, 2]",
        b'{"program_id": "a"',
        b'{"program_id": "\xff"}',
        b'{"messages": [{"content": "\\"program_id\\": \\"x\\""}], "seed": 1.0 , "a":1e2}',
        b'\xef\xbb\xbf{"a" :\t"\xf0\x9f\xa7\xb5"}\n',
        b'{"vllm_xargs": {"agentic_context": {"step_id": 1}}}',
    ],
)
async def test_an_unlabelled_body_passes_byte_for_byte(body):
    server = Server()
    await server.post(CHAT, body, JSON)
    assert server.model.turns == [None]
    assert server.model.bodies == [body]


async def test_a_labelled_body_passes_byte_for_byte():
    body = b'{ "program_id":"a",\n "temperature": 1.0, "seed": 1234567890123456789, "x": "\\u00e9"}'
    server = Server()
    await server.post(CHAT, body, JSON)
    assert server.model.turns[0].program_id == "a"
    assert server.model.bodies == [body]


async def test_a_body_that_vllm_would_refuse_is_changed_with_its_length():
    body = b'{"session_id": 12, "vllm_xargs": {"agentic_context": {"step_id": 1}, "k": 1.50}}'
    server = Server()
    await server.post(CHAT, body, JSON)
    expected = b'{"session_id":"12","vllm_xargs":{"k":1.50}}'
    assert server.model.turns[0].program_id == "12"
    assert server.model.bodies == [expected]
    assert server.model.headers[0]["content-length"] == str(len(expected))


@pytest.mark.parametrize("labelled", [True, False])
@pytest.mark.parametrize("size", [1 << 10, 64 << 10])
async def test_large_bodies_in_chunks(labelled, size):
    text = 'A "program_id" in a prompt, é and 🧵. ' * (9 * 2**20 // 40)
    document = {"messages": [{"role": "user", "content": text}]}
    if labelled:
        document["agentic_context"] = {"program_id": "big"}
    body = json.dumps(document, ensure_ascii=False).encode()
    assert len(body) > 8 * 2**20
    chunks = [body[i : i + size] for i in range(0, len(body), size)]
    server = Server()
    await server.post(CHAT, b"", JSON, chunks=chunks)
    assert server.model.bodies == [body]
    assert (server.model.turns[0] is not None) is labelled


@pytest.mark.parametrize("path", MAIN_PATHS)
@pytest.mark.parametrize("value", [True, 1.5, [], {}, ""])
async def test_a_wrong_id_is_a_400_and_reaches_nobody(path, value):
    server = Server()
    answer = await server.post(path, {"program_id": value})
    assert answer.status == 400
    assert server.model.turns == []
    assert server.core.calls == []
    error = answer.json()["error"]
    assert error["type"] == "BadRequestError"
    assert error["message"].startswith("program_id: must ")
    if path == "/v1/messages":
        assert answer.json().keys() == {"type", "error"}
        assert answer.json()["type"] == "error"
    else:
        assert error["code"] == 400
        assert error["param"] == "program_id"


async def test_coheres_error_shape():
    answer = await Server().post("/cohere/v2/chat", {"program_id": []})
    assert answer.status == 400
    assert answer.json() == {"message": "program_id: must be a string or an integer, not a list"}


async def test_an_identity_error_has_the_headers_of_vllms_own_answers():
    server = Server(enable_request_id_headers=True, allowed_origins=["http://a"])
    headers = {"x-request-id": "r1", "origin": "http://a"}
    answer = await server.post(CHAT, {"program_id": []}, headers)
    assert answer.headers["x-request-id"] == "r1"
    assert answer.headers["access-control-allow-origin"] == "http://a"


async def test_without_the_key_vllm_answers_before_any_identity_error(monkeypatch):
    for server in (Server(api_key=["k", "l"]), Server()):
        monkeypatch.setenv("VLLM_API_KEY", "k")
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic k"}):
            assert (await server.post(CHAT, {"program_id": []}, headers)).status == 200
        assert server.model.turns == [None] * 3  # vLLM's own middleware is inside: it says 401
        answer = await server.post(CHAT, {"program_id": []}, {"authorization": "Bearer k"})
        assert answer.status == 400
        await server.post(CHAT, {"program_id": "a"}, {"authorization": "Bearer k"})
        assert server.model.turns[-1].program_id == "a"


async def test_the_body_of_a_refused_request_is_not_read():
    server = Server(api_key=["k"])

    async def model(scope, receive, send):
        await send({"type": "http.response.start", "status": 401, "headers": []})

    server.middleware._app = model
    scope = {"type": "http", "method": "POST", "path": CHAT, "headers": [(b"x", b"y")]}
    sent = []

    async def send(message):
        sent.append(message)

    async def receive():
        raise AssertionError("read")

    await server(scope, receive, send)
    assert sent[0]["status"] == 401


async def test_paths_that_vllm_does_not_guard_need_no_key():
    server = Server(api_key=["k"])
    await server.post("/invocations", {"program_id": "a"})
    assert server.model.turns[0].program_id == "a"


async def test_root_path():
    server = Server(root_path="/proxy")
    for path in ("/proxy" + CHAT, CHAT):
        await server.post(path, {"program_id": "a"})
    assert [turn.program_id for turn in server.model.turns] == ["a", "a"]
    assert server.model.paths == ["/proxy" + CHAT, CHAT]


async def test_the_clients_disconnect_reaches_the_model():
    class Streaming(Model):
        async def answer(self, scope, receive, send):
            self.last = await receive()

    server = Server(Streaming())
    await server.post(CHAT, {"program_id": "a"})
    assert server.model.last == {"type": "http.disconnect"}


@pytest.mark.parametrize("headers", [JSON, {**JSON, "x-session-id": "s"}])
async def test_a_disconnect_inside_the_body_reaches_the_model(headers):
    server = Server()
    part = {"type": "http.request", "body": b'{"program_', "more_body": True}
    await server.post(CHAT, b"", headers, chunks=[], then=[part, {"type": "http.disconnect"}])
    assert server.model.disconnected == 1
    assert server.model.turns == []


async def test_the_response_is_passed_on_message_by_message():
    server = Server()
    await server.post(CHAT, {"program_id": "a"})
    assert [m.get("body") for m in server.sent] == [None, b"mod", b"el"]
    assert server.sent[0]["headers"] == [(b"content-type", b"text/plain"), (b"x-model", b"yes")]


async def test_a_pipelined_request_does_not_inherit_the_turn_before_it():
    server = Server()
    token = current_turn.set(Turn(program_id="before", turn_id="x"))
    try:
        await server.post(CHAT, {"messages": []})
        await server.get("/health")
        await server({"type": "websocket", "path": "/v1/realtime"}, None, None)
        assert current_turn.get().program_id == "before"
    finally:
        current_turn.reset(token)
    assert server.model.turns == [None] * 3


async def test_concurrent_calls_keep_their_turns_apart():
    class Slow(Model):
        async def answer(self, scope, receive, send):
            before = current_turn.get()
            await asyncio.sleep(0.01)
            assert current_turn.get() is before

    server = Server(Slow())
    await asyncio.gather(*[server.post(CHAT, {"program_id": i}) for i in range(20)])
    assert [turn.program_id for turn in server.model.turns] == [str(i) for i in range(20)]
    assert [json.loads(body)["program_id"] for body in server.model.bodies] == list(range(20))


async def test_tasks_that_the_model_starts_inherit_the_turn():
    class Background(Model):
        async def answer(self, scope, receive, send):
            async def later():
                await asyncio.sleep(0)
                return current_turn.get()

            self.task = asyncio.create_task(later())

    server = Server(Background())
    await server.post("/v1/responses", {"program_id": "a", "background": True})
    assert (await server.model.task).program_id == "a"


async def test_other_scope_types_pass():
    seen = []

    async def model(scope, receive, send):
        seen.append(scope["type"])

    server = Server(model)
    await server({"type": "lifespan"}, None, None)
    assert seen == ["lifespan"]


async def settle():
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.mark.parametrize("members", [{"n": 4}, {"use_beam_search": True}])
async def test_the_engine_hears_when_a_fanned_out_turn_is_over(members):
    server = Server()
    await server.post(CHAT, {"program_id": "a", **members})
    await settle()
    assert server.core.calls == [("turn_end", "a", server.model.turns[0].turn_id)]


async def test_the_engine_does_not_hear_of_other_turns():
    server = Server()
    await server.post(CHAT, {"program_id": "a", "n": 1})
    await server.post(CHAT, {"n": 4})
    await settle()
    assert server.core.calls == []


async def test_the_engine_hears_after_the_model_has_finished_and_not_before():
    class Waiting(Model):
        async def answer(self, scope, receive, send):
            await settle()
            self.calls_then = list(server.core.calls)

    server = Server(Waiting())
    await server.post(CHAT, {"program_id": "a", "n": 4})
    await settle()
    assert server.model.calls_then == []
    assert len(server.core.calls) == 1


async def test_the_engine_hears_when_the_model_fails():
    class Failing(Model):
        async def answer(self, scope, receive, send):
            raise RuntimeError("no model")

    server = Server(Failing())
    with pytest.raises(RuntimeError, match="no model"):
        await server.post(CHAT, {"program_id": "a", "n": 4})
    await settle()
    assert [call[:2] for call in server.core.calls] == [("turn_end", "a")]
    assert current_turn.get() is None


async def test_the_engine_hears_when_the_request_is_cancelled():
    class Endless(Model):
        async def answer(self, scope, receive, send):
            await asyncio.sleep(3600)

    server = Server(Endless(), FakeCore(delay=0.01))
    task = asyncio.create_task(server.post(CHAT, {"program_id": "a", "n": 4}))
    await settle()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(0.05)
    assert [call[:2] for call in server.core.calls] == [("turn_end", "a")]


async def test_an_engine_that_does_not_hear_is_logged_and_harms_nobody(caplog):
    server = Server(core=FakeCore({"turn_end": RuntimeError("engine gone")}))
    answer = await server.post(CHAT, {"program_id": "a", "n": 4})
    await settle()
    assert answer.status == 200
    assert "engine gone" in caplog.text
    assert server.model.turns[0].turn_id in caplog.text
