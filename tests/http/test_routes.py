import asyncio
from urllib.parse import quote

import pytest
from vllm.v1.engine.exceptions import EngineDeadError

from tests.http.driver import FakeCore, Server


def release_answer(**told):
    return {"program_id": "?", "released": True, "pending": False, **told}


def server_with(op, answer, **args):
    return Server(core=FakeCore({op: answer}), **args)


def error_of(answer):
    body = answer.json()
    assert body.keys() == {"error"}
    assert body["error"].keys() >= {"message", "type", "param", "code"}
    assert body["error"]["code"] == answer.status
    return body["error"]


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([release_answer()], {"released": True}),
        ([release_answer(released=False)], {"released": False}),
        ([release_answer(pending=True)], {"released": True, "pending": True}),
        ([release_answer(released=False), release_answer()], {"released": True}),
        (
            [release_answer(released=False), release_answer(released=False, pending=True)],
            {"released": False, "pending": True},
        ),
    ],
)
async def test_release(ranks, expected):
    server = server_with("release", ranks)
    answer = await server.post("/programs/release", {"program_id": "a"})
    assert answer.status == 200
    assert answer.json() == {"program_id": "a", **expected}
    assert server.core.calls == [("release", "a")]
    assert server.model.turns == []


@pytest.mark.parametrize("program_id", ["a/b", "é\n", "summary", "x" * 5000])
async def test_release_takes_any_id(program_id):
    server = server_with("release", [release_answer()])
    answer = await server.post("/programs/release", {"program_id": program_id})
    assert answer.json()["program_id"] == program_id
    assert server.core.calls == [("release", program_id)]


async def test_release_takes_integers_and_any_content_type():
    server = server_with("release", [release_answer()])
    form = {"content-type": "application/x-www-form-urlencoded"}
    answer = await server.post("/programs/release", b'{"program_id": 42, "more": 1}', form)
    assert answer.json() == {"program_id": "42", "released": True}


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b"", None),
        (b"{", None),
        (b"[]", None),
        (b'"a"', None),
        (b'{"program_id": "\xff"}', None),
        (b"{}", "program_id"),
        (b'{"program_id": null}', "program_id"),
        (b'{"program_id": ""}', "program_id"),
        (b'{"program_id": true}', "program_id"),
        (b'{"program_id": 1.5}', "program_id"),
        (b'{"program_id": ["a"]}', "program_id"),
    ],
)
async def test_a_bad_release_is_a_400(body, field):
    server = server_with("release", [release_answer()])
    answer = await server.post("/programs/release", body)
    assert answer.status == 400
    error = error_of(answer)
    assert error["param"] == field
    assert "program_id" in error["message"]
    assert server.core.calls == []


PROGRAM = {"program_id": "a", "phase": "ACTING"}


async def test_list_and_summary():
    server = Server(core=FakeCore({"list": [[PROGRAM]], "summary": [{"programs": 1}]}))
    for target in ("/programs", "/programs/"):
        assert (await server.get(target)).json() == {"programs": [PROGRAM]}
    assert (await server.get("/programs/summary")).json() == {"programs": 1}


ODD_IDS = [
    "a",
    "a/b/c",
    "/",
    "//a//b//",
    "a\nb\n",
    "\n",
    "summary\n",
    "release",
    "é🧵",
    "a b?c#d%2F",
    "..",
    "{program_id}",
    "x" * 5000,
]


@pytest.mark.parametrize("program_id", ODD_IDS)
@pytest.mark.parametrize("safe", ["", "/"])
async def test_any_id_is_found_by_path(program_id, safe):
    server = server_with("get", [PROGRAM])
    answer = await server.get("/programs/" + quote(program_id, safe=safe))
    assert answer.status == 200
    assert answer.json() == PROGRAM
    assert server.core.calls == [("get", program_id)]


@pytest.mark.parametrize("program_id", [*ODD_IDS, "summary", ""])
async def test_any_id_is_found_by_query(program_id):
    server = server_with("get", [PROGRAM])
    answer = await server.get("/programs?program_id=" + quote(program_id, safe=""))
    assert answer.json() == PROGRAM
    assert server.core.calls == [("get", program_id)]


async def test_an_unknown_id_is_a_404():
    server = server_with("get", [None, None])
    for target in ("/programs/nobody", "/programs?program_id=nobody"):
        answer = await server.get(target)
        assert answer.status == 404
        assert error_of(answer)["type"] == "NotFoundError"


@pytest.mark.parametrize(
    ("method", "target", "allowed"),
    [
        ("POST", "/programs", "GET"),
        ("DELETE", "/programs/a", "GET"),
        ("PUT", "/programs/a/b", "GET"),
        ("POST", "/programs/summary", "GET"),
        ("PUT", "/programs/release", "POST"),
    ],
)
async def test_a_wrong_method_is_a_405_with_allow(method, target, allowed):
    server = Server()
    answer = await server.request(method, target)
    assert answer.status == 405
    assert answer.headers["allow"] == allowed
    assert error_of(answer)["message"] == "Method Not Allowed"
    assert server.core.calls == []


async def test_similar_paths_are_vllms():
    server = Server()
    await server.get("/programsx")
    await server.get("/v1/programs")
    assert server.model.paths == ["/programsx", "/v1/programs"]


@pytest.mark.parametrize("root_path", ["/proxy", "/proxy/"])
@pytest.mark.parametrize("prefix", ["", "/proxy"])
async def test_root_path(root_path, prefix):
    server = server_with("get", [PROGRAM], root_path=root_path.rstrip("/"))
    assert (await server.get(prefix + "/programs/a/b")).status == 200
    assert server.core.calls == [("get", "a/b")]


@pytest.mark.parametrize(
    "target", ["/programs", "/programs/a", "/programs/summary", "/programs?program_id=a"]
)
@pytest.mark.parametrize("from_environment", [True, False])
async def test_routes_want_the_api_key(target, from_environment, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "secret" if from_environment else "other")
    args = {} if from_environment else {"api_key": ["secret", "second"]}
    core = FakeCore({"get": [PROGRAM], "list": [[]], "summary": [{}]})
    server = Server(core=core, **args)
    for headers in ({}, {"authorization": "Bearer no"}, {"authorization": "secret"}):
        answer = await server.get(target, headers)
        assert answer.status == 401
        assert answer.json() == {"error": "Unauthorized"}
    assert core.calls == []
    assert (await server.get(target, {"authorization": "Bearer secret"})).status == 200


async def test_a_release_wants_the_api_key():
    server = server_with("release", [release_answer()], api_key=["k"])
    body = {"program_id": "a"}
    assert (await server.post("/programs/release", body)).status == 401
    assert server.core.calls == []
    right = {"authorization": "Bearer k"}
    assert (await server.post("/programs/release", body, right)).status == 200


async def test_options_needs_no_key_and_preflight_works():
    server = Server(api_key=["k"], allowed_origins=["http://a"])
    assert (await server.request("OPTIONS", "/programs")).status == 405
    preflight = {"origin": "http://a", "access-control-request-method": "GET"}
    answer = await server.request("OPTIONS", "/programs", headers=preflight)
    assert answer.status == 200
    assert answer.headers["access-control-allow-origin"] == "http://a"


@pytest.mark.parametrize("error", [EngineDeadError(), RuntimeError("call failed")])
@pytest.mark.parametrize(
    ("method", "target"),
    [
        ("POST", "/programs/release"),
        ("GET", "/programs"),
        ("GET", "/programs/a"),
        ("GET", "/programs/summary"),
    ],
)
async def test_an_engine_that_fails_is_a_500(method, target, error):
    core = FakeCore(dict.fromkeys(["release", "get", "list", "summary"], error))
    answer = await Server(core=core).request(method, target, {"program_id": "a"})
    assert answer.status == 500
    assert error_of(answer)["type"] == "InternalServerError"


async def test_routes_answer_side_by_side():
    server = Server(core=FakeCore({"get": [PROGRAM]}, delay=0.01))
    answers = await asyncio.gather(*[server.get(f"/programs/{i}") for i in range(20)])
    assert [answer.status for answer in answers] == [200] * 20
    assert sorted(call[1] for call in server.core.calls) == sorted(str(i) for i in range(20))
