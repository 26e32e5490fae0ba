"""``GET /programs/changes``: one rank is asked, its bytes are passed on, nothing stays behind."""

import asyncio
import inspect
from dataclasses import dataclass
from urllib.parse import quote

import pytest
from vllm.v1.engine.core_client import AsyncMPClient, MPClient
from vllm.v1.engine.exceptions import EngineDeadError

from tests.http.driver import FakeCore, Server
from tests.http.test_routes import PROGRAM, error_of
from vllm_thunder.engine import client
from vllm_thunder.engine.client import EnginePrograms
from vllm_thunder.engine.routes import build_routes

REPORT = b'{"cursor":"c-2",  "reset":false, "gone":["\xc3\xa9"]}'


@dataclass
class FollowedCore(FakeCore):
    """Ranks that answer ``changes`` after ``delay`` seconds, as vLLM's client reaches them."""

    report: bytes | Exception = REPORT
    alive: bool = True
    open: int = 0

    async def _call_utility_async(self, method, *args, engine):
        assert (method, args[0]) == ("programs", "changes")
        self.calls.append((int.from_bytes(engine, "little"), *args[1:]))
        self.open += 1
        try:
            await asyncio.sleep(self.delay)
        finally:
            self.open -= 1
        if isinstance(self.report, Exception):
            raise self.report
        return self.report

    def ensure_alive(self):
        if not self.alive:
            raise EngineDeadError


class RanksServer(Server):
    """The routes alone: the middleware around them follows several ranks by itself."""

    def __init__(self, ranks: int):
        super().__init__(core=FollowedCore(rank_count=ranks))
        self.middleware = build_routes(EnginePrograms(self.state.engine_client))


async def test_the_engines_bytes_are_passed_on():
    server = Server(core=FollowedCore())
    answer = await server.get("/programs/changes?after=c-1&wait=20")
    assert answer.status == 200
    assert answer.body == REPORT
    assert answer.headers["content-type"] == "application/json"
    assert server.core.calls == [(0, "c-1", "20.0")]
    assert server.model.turns == []


async def test_without_a_cursor_everything_is_asked_for_and_nothing_waited_for():
    server = Server(core=FollowedCore())
    assert (await server.get("/programs/changes")).status == 200
    assert server.core.calls == [(0, "", "0.0")]


@pytest.mark.parametrize(("wait", "seconds"), [("0", 0), ("60", 60), ("0.25", 0.25), ("60.0", 60)])
async def test_how_long_to_wait(wait, seconds):
    server = Server(core=FollowedCore())
    assert (await server.get(f"/programs/changes?wait={wait}")).status == 200
    ((_, _, told),) = server.core.calls
    assert float(told) == seconds


@pytest.mark.parametrize(
    "wait",
    ["60.1", "61", "-1", "", "soon", "nan", "inf", "1e1", "0x1", "1_0", " 1", "\xb2", "9" * 500],
)
async def test_a_bad_wait_is_a_400(wait):
    server = Server(core=FollowedCore())
    answer = await server.get(f"/programs/changes?wait={quote(wait)}")
    assert answer.status == 400
    error = error_of(answer)
    assert (error["param"], error["message"]) == (
        "wait",
        "wait: must be a number of seconds from 0 to 60",
    )
    assert server.core.calls == []


@pytest.mark.parametrize("cursor", ["garbage", "\n\xe9\U0001f9f5", "c" * 200])
async def test_what_a_cursor_means_is_the_engines_business(cursor):
    server = Server(core=FollowedCore())
    assert (await server.get("/programs/changes?after=" + quote(cursor))).status == 200
    assert server.core.calls == [(0, cursor, "0.0")]


async def test_a_cursor_that_is_too_long_is_a_400():
    server = Server(core=FollowedCore())
    answer = await server.get("/programs/changes?after=" + "c" * 201)
    assert answer.status == 400
    assert error_of(answer)["message"] == "after: must have at most 200 characters"
    assert server.core.calls == []


@pytest.mark.parametrize("rank", [0, 1, 2])
async def test_one_rank_is_asked(rank):
    server = RanksServer(3)
    assert (await server.get(f"/programs/changes?rank={rank}&after=x&wait=1")).status == 200
    assert server.core.calls == [(rank, "x", "1.0")]


@pytest.mark.parametrize("rank", ["3", "-1", "", "first", "1.0", "1_0", "\xb2", "9" * 500])
async def test_a_rank_that_is_not_there_is_a_400(rank):
    server = RanksServer(3)
    answer = await server.get(f"/programs/changes?rank={quote(rank)}")
    assert answer.status == 400
    error = error_of(answer)
    assert (error["param"], error["message"]) == (
        "rank",
        "rank: must be an integer from 0 to 2",
    )
    assert server.core.calls == []


async def test_of_several_ranks_one_has_to_be_named():
    server = RanksServer(2)
    answer = await server.get("/programs/changes")
    assert answer.status == 400
    message = "rank: is missing: it must be an integer from 0 to 1"
    assert error_of(answer)["message"] == message
    assert server.core.calls == []


async def test_the_only_rank_may_be_named():
    server = Server(core=FollowedCore())
    assert (await server.get("/programs/changes?rank=0")).status == 200
    answer = await server.get("/programs/changes?rank=1")
    assert error_of(answer)["message"] == "rank: must be an integer from 0 to 0"


@pytest.mark.parametrize("ranks", [1, 3])
async def test_the_summary_says_how_many_ranks_there_are(ranks):
    summary = {"programs": 0, "by_phase": {}, "by_status": {}}
    core = FakeCore({"summary": [summary] * ranks, "list": [[]] * ranks})
    answer = await Server(core=core).get("/programs/summary")
    assert answer.json() == {**summary, "ranks": ranks}


async def test_a_program_called_changes_is_found_by_query():
    server = Server(core=FollowedCore({"get": [PROGRAM]}))
    assert (await server.get("/programs?program_id=changes")).json() == PROGRAM
    assert (await server.get("/programs/changes%0A")).json() == PROGRAM
    assert server.core.calls == [("get", "changes"), ("get", "changes\n")]


async def test_changes_want_the_api_key():
    server = Server(core=FollowedCore(), api_key=["k"])
    assert (await server.get("/programs/changes?wait=60")).status == 401
    assert server.core.calls == []
    right = {"authorization": "Bearer k"}
    assert (await server.get("/programs/changes", right)).status == 200


async def test_a_wrong_method_is_a_405():
    answer = await Server(core=FollowedCore()).post("/programs/changes", {})
    assert (answer.status, answer.headers["allow"]) == (405, "GET")


@pytest.mark.parametrize("error", [EngineDeadError(), RuntimeError("Server shutting down")])
async def test_an_engine_that_fails_is_a_500(error):
    answer = await Server(core=FollowedCore(report=error)).get("/programs/changes?wait=60")
    assert answer.status == 500
    assert error_of(answer)["type"] == "InternalServerError"


async def test_an_engine_that_dies_leaves_nobody_waiting(monkeypatch):
    """vLLM never answers a call to an engine core that has died."""
    monkeypatch.setattr(client, "_ALIVE_SECONDS", 0.02)
    core = FollowedCore(delay=1000.0)
    asked = asyncio.create_task(Server(core=core).get("/programs/changes?wait=60"))
    await asyncio.sleep(0.1)
    assert not asked.done()
    core.alive = False
    async with asyncio.timeout(5):
        assert (await asked).status == 500
    await asyncio.sleep(0)
    assert core.open == 0


async def test_a_request_that_is_cancelled_leaves_no_question_open():
    core = FollowedCore(delay=1000.0)
    asked = asyncio.create_task(Server(core=core).get("/programs/changes?wait=60"))
    await asyncio.sleep(0.05)
    assert core.open == 1
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    await asyncio.sleep(0)
    assert core.open == 0


async def test_many_wait_side_by_side():
    server = Server(core=FollowedCore(delay=0.05))
    answers = await asyncio.gather(*[server.get("/programs/changes?wait=1") for _ in range(50)])
    assert [answer.status for answer in answers] == [200] * 50


def test_vllms_client_is_called_as_it_wants_to_be():
    parameters = inspect.signature(AsyncMPClient._call_utility_async).parameters
    assert list(parameters) == ["self", "method", "args", "engine"]
    assert list(inspect.signature(MPClient.ensure_alive).parameters) == ["self"]
    assert "self.core_engines: list[EngineIdentity]" in inspect.getsource(MPClient.__init__)


# -- how long a turn has waited --------------------------------------------------------

CHAT = "/v1/chat/completions"


async def test_a_turn_brings_the_time_that_it_has_waited():
    server = Server()
    await server.post(CHAT, {"program_id": "a"}, {"x-program-waited": "12.5"})
    await server.post(CHAT, {"program_id": "a"})
    assert [turn.waited_seconds for turn in server.model.turns] == [12.5, 0.0]


async def test_a_wait_that_is_no_number_is_a_400():
    server = Server()
    answer = await server.post(CHAT, {"program_id": "a"}, {"x-program-waited": "long"})
    assert answer.status == 400
    assert error_of(answer)["param"] == "header x-program-waited"
    assert server.model.turns == []
