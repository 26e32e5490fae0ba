import asyncio
from urllib.parse import quote

import pytest
from vllm.v1.engine.exceptions import EngineDeadError

from tests.http.driver import FakeCore, RanksCore, Server


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


@pytest.mark.parametrize(
    ("ranks", "known"), [([True], True), ([False, True], True), ([False], False)]
)
async def test_a_tool_is_told(ranks, known):
    server = server_with("tool", [{"program_id": "?", "known": each} for each in ranks])
    body = {"program_id": 7, "tool_name": "pytest", "more": [1]}
    answer = await server.post("/programs/tool", body)
    assert answer.status == 200
    assert answer.json() == {"program_id": "7", "known": known}
    assert server.core.calls == [("tool", "7", "pytest")]
    assert server.model.turns == []


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b"", None),
        (b"[]", None),
        (b'{"program_id": "a", "tool_name": "\xff"}', None),
        (b"{}", "program_id"),
        (b'{"tool_name": "pytest"}', "program_id"),
        (b'{"program_id": "", "tool_name": "pytest"}', "program_id"),
        (b'{"program_id": true, "tool_name": "pytest"}', "program_id"),
        (b'{"program_id": "a"}', "tool_name"),
        (b'{"program_id": "a", "tool_name": null}', "tool_name"),
        (b'{"program_id": "a", "tool_name": ""}', "tool_name"),
        (b'{"program_id": "a", "tool_name": 1.5}', "tool_name"),
        (b'{"program_id": "a", "tool_name": ["pytest"]}', "tool_name"),
    ],
)
async def test_a_bad_tool_is_a_400(body, field):
    server = server_with("tool", [{"program_id": "a", "known": True}])
    answer = await server.post("/programs/tool", body)
    assert answer.status == 400
    error = error_of(answer)
    assert error["param"] == field
    assert (field or '{"program_id": "a", "tool_name": "a"}') in error["message"]
    assert server.core.calls == []


PROGRAM = {"program_id": "a", "phase": "ACTING"}


async def test_list_and_summary():
    server = Server(core=FakeCore({"list": [[PROGRAM]], "summary": [{"programs": 1}]}))
    for target in ("/programs", "/programs/"):
        assert (await server.get(target)).json() == {"programs": [PROGRAM]}
    assert (await server.get("/programs/summary")).json() == {"programs": 1, "ranks": 1}
    assert server.core.calls == [("list", "", "1001"), ("list", "", "1001"), ("summary",)]


@pytest.mark.parametrize("path", ["/programs", "/programs/"])
async def test_pages(path):
    names = ["a", "a b&c", "b/\n", "z\U0001f9f5"]
    server = Server(core=RanksCore([{name: {"program_id": name} for name in names}]))
    target, pages = f"{path}?limit=2", []
    for _ in range(2):
        page = (await server.get(target)).json()
        pages.append(page)
        target = f"{path}?limit=2&after={quote(page.get('next', ''), safe='')}"
    assert pages == [
        {"programs": [{"program_id": "a"}, {"program_id": "a b&c"}], "next": "a b&c"},
        {"programs": [{"program_id": "b/\n"}, {"program_id": "z\U0001f9f5"}]},
    ]


@pytest.mark.parametrize(("query", "limit"), [("", 1000), ("limit=10000", 10_000), ("limit=1", 1)])
async def test_a_page_has_at_most_the_limit(query, limit):
    rank = {f"{number:06}": {"program_id": f"{number:06}"} for number in range(10_001)}
    page = (await Server(core=RanksCore([rank])).get("/programs?" + query)).json()
    assert len(page["programs"]) == limit
    assert page["next"] == f"{limit - 1:06}"


@pytest.mark.parametrize("path", ["/programs", "/programs/"])
@pytest.mark.parametrize(
    "limit", ["0", "-1", "10001", "1.0", "many", "", "1e3", "9" * 5000, "\xb2", "True"]
)
async def test_a_bad_limit_is_a_400(path, limit):
    server = server_with("list", [[PROGRAM]])
    answer = await server.get(f"{path}?limit={quote(limit)}")
    assert answer.status == 400
    error = error_of(answer)
    assert (error["param"], error["message"]) == (
        "limit",
        "limit: must be an integer from 1 to 10000",
    )
    assert server.core.calls == []


ODD_IDS = [
    "tool",
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
        ("PUT", "/programs/tool", "POST"),
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


@pytest.mark.parametrize("op", ["release", "tool"])
async def test_what_is_told_wants_the_api_key(op):
    server = server_with(op, [release_answer(known=True)], api_key=["k"])
    body = {"program_id": "a", "tool_name": "b"}
    assert (await server.post(f"/programs/{op}", body)).status == 401
    assert server.core.calls == []
    right = {"authorization": "Bearer k"}
    assert (await server.post(f"/programs/{op}", body, right)).status == 200


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
        ("POST", "/programs/tool"),
        ("GET", "/programs"),
        ("GET", "/programs/a"),
        ("GET", "/programs/summary"),
    ],
)
async def test_an_engine_that_fails_is_a_500(method, target, error):
    core = FakeCore(dict.fromkeys(["release", "tool", "get", "list", "summary"], error))
    body = {"program_id": "a", "tool_name": "b"}
    answer = await Server(core=core).request(method, target, body)
    assert answer.status == 500
    assert error_of(answer)["type"] == "InternalServerError"


async def test_routes_answer_side_by_side():
    server = Server(core=FakeCore({"get": [PROGRAM]}, delay=0.01))
    answers = await asyncio.gather(*[server.get(f"/programs/{i}") for i in range(20)])
    assert [answer.status for answer in answers] == [200] * 20
    assert sorted(call[1] for call in server.core.calls) == sorted(str(i) for i in range(20))
