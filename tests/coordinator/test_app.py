"""The whole coordinator in one process, in front of engines on real sockets."""

import asyncio
import json

import pytest

from tests.coordinator.fake_engine import chunked, hang, whole
from tests.coordinator.front import CHAT, Client, ask, post
from tests.coordinator.program_engine import (
    ProgramEngine,
    coordinator,
    get,
    launch,
    page,
    turn,
    until,
    until_up,
)
from vllm_thunder.coordinator.config import CoordinatorConfig
from vllm_thunder.program.report import ProgramReport

JSON = b"content-type: application/json\r\n"


# -- programs --------------------------------------------------------------------------


async def test_a_turn_goes_to_one_engine_and_its_program_is_listed(engines):
    async with coordinator(launch(engines)) as (port, control):
        await until_up(control, 2)
        answer = await ask(port, turn("p"))
        assert (answer.status, answer.body) == (200, b'{"choices": []}')
        assert sum(len(engine.calls) for engine in engines) == 1
        listed = await page(port, "/programs")
        assert listed["p"]["step_count"] == 1
        assert listed["p"]["status"] == "acting"
        assert listed["p"]["backend"] in {engine.url for engine in engines}
        assert (await page(port, "/profiles/p"))["step_count"] == 1
        assert (await ask(port, get("/programs/q"))).status == 404


async def test_ids_of_any_kind_are_found(engines):
    async with coordinator(launch(engines)) as (port, control):
        await until_up(control, 2)
        for name, path in (("a/b", "a%2Fb"), ("ü\n", "%C3%BC%0A"), ("7", "7")):
            await ask(port, turn(name))
            assert (await page(port, f"/programs/{path}"))["program_id"] == name
            assert (await page(port, f"/profiles/{path}"))["step_count"] == 1


async def test_the_turns_of_a_program_stay_together_while_its_kv_is_there(engines):
    async with coordinator(launch(engines)) as (port, control):
        await until_up(control, 2)
        await ask(port, turn("p"))
        home = next(engine for engine in engines if engine.calls)
        home.tell(ProgramReport("p", 160, 10, True))
        await until(lambda: control.fleet.get("p").claimed)
        for _ in range(5):
            await ask(port, turn("p"))
        assert len(home.calls) == 6


async def test_a_program_that_moves_is_forgotten_where_it_was(engines):
    async with coordinator(launch(engines)) as (port, control):
        await until_up(control, 2)
        await ask(port, turn("p"))
        home, other = sorted(engines, key=lambda engine: not engine.calls)
        home.room = -10.0
        home.tell(ProgramReport("p", 160, 0, False))
        await until(lambda: control.fleet.get("p").context_tokens)
        await ask(port, turn("p"))
        assert len(other.calls) == 1
        await until(lambda: home.released == ["p"])
        assert control.fleet.get("p").moves == 1


@pytest.mark.parametrize("known", [True, False], ids=["known here", "known to an engine only"])
async def test_a_release_reaches_the_engine(engines, known):
    async with coordinator(launch(engines)) as (port, control):
        await until_up(control, 2)
        if known:
            await ask(port, turn("p"))
        else:
            engines[1].programs["p"] = ProgramReport("p", 160, 10, True)  # not told of yet
        answer = await ask(port, post({"program_id": "p"}, "/programs/release"))
        assert answer.json() == {"program_id": "p", "released": True}
        assert control.fleet.get("p") is None
        assert any(engine.released == ["p"] for engine in engines)
        again = await ask(port, post({"program_id": "p"}, "/programs/release"))
        assert again.json() == {"program_id": "p", "released": False}


async def test_a_release_while_a_turn_is_in_flight_waits_for_its_end(engines):
    async with coordinator(launch(engines)) as (port, control):
        await until_up(control, 2)
        for engine in engines:
            engine.chat = chunked(b"data: 1\n\n", b"data: 2\n\n", delay=0.2)
        running = asyncio.create_task(ask(port, turn("p", stream=True)))
        await until(lambda: control.fleet.get("p") and control.fleet.get("p").running)
        answer = await ask(port, post({"program_id": "p"}, "/programs/release"))
        assert answer.json() == {"program_id": "p", "released": True, "pending": True}
        assert (await running).body == b"data: 1\n\ndata: 2\n\n"
        await until(lambda: any(engine.released == ["p"] for engine in engines))
        assert control.fleet.get("p") is None


@pytest.mark.parametrize(
    "body", [b"{}", b"[]", b"no json", b'{"program_id": 1.5}', b'{"program_id": ""}', b"\xff"]
)
async def test_a_release_of_nothing_is_refused(engines, body):
    async with coordinator(launch(engines)) as (port, _):
        answer = await ask(port, post(body, "/programs/release"))
        assert answer.status == 400
        assert answer.json()["error"]["message"]


async def test_a_tool_is_told_to_the_engine(engines):
    async with coordinator(launch(engines)) as (port, control):
        await until_up(control, 2)
        body = {"program_id": "p", "tool_name": "pytest"}
        assert (await ask(port, post(body, "/programs/tool"))).json()["known"] is False
        await ask(port, turn("p"))
        assert (await ask(port, post(body, "/programs/tool"))).json()["known"] is True


@pytest.mark.parametrize("path", ["/programs/tool", "/programs/release"])
@pytest.mark.parametrize("how", ["silent", "an error"])
async def test_an_engine_that_cannot_be_told_is_a_502_that_names_it(engines, path, how):
    home = engines[0]
    async with coordinator(launch([home])) as (port, control):
        await until_up(control, 1)
        await ask(port, turn("p"))
        home.tell(ProgramReport("p", 160, 10, True))
        await until(lambda: control.fleet.get("p").claimed)
        routed, home.answer = home.answer, hang if how == "silent" else whole(b"{}", b"500 No")
        answer = await ask(port, post({"program_id": "p", "tool_name": "pytest"}, path))
        assert answer.status == 502
        assert home.url in answer.json()["error"]["message"]
        home.answer = routed
        if path == "/programs/release":  # it has ended here, and there as soon as it can be told
            assert control.fleet.get("p") is None
            await until(lambda: home.released == ["p"])
            await until(lambda: "p" not in home.programs)


async def test_a_release_of_an_unknown_program_is_a_502_while_an_engine_does_not_answer(engines):
    first, second = engines
    async with coordinator(launch(engines)) as (port, control):
        await until_up(control, 2)
        routed, second.answer = second.answer, hang
        answer = await ask(port, post({"program_id": "p"}, "/programs/release"))
        assert answer.status == 502
        assert second.url in answer.json()["error"]["message"]
        first.programs["q"] = ProgramReport("q", 160, 10, True)  # not told of yet
        answer = await ask(port, post({"program_id": "q"}, "/programs/release"))
        assert answer.json() == {"program_id": "q", "released": True}
        second.answer = routed


async def test_a_request_that_the_engine_refuses_leaves_no_program(engines):
    async with coordinator(launch(engines)) as (port, control):
        await until_up(control, 2)
        for engine in engines:
            engine.chat = whole(b'{"error": {"message": "too long"}}', b"400 Bad Request")
        for n in range(20):
            assert (await ask(port, turn(f"p{n}"))).status == 400
        await until(lambda: len(control.fleet) == 0)


# -- keys ------------------------------------------------------------------------------


async def test_without_the_key_nothing_is_created_and_nothing_reaches_an_engine(engines):
    async with coordinator(launch(engines, api_keys=["one", "two"])) as (port, control):
        for headers in (JSON, JSON + b"authorization: Bearer wrong\r\n"):
            for request in (
                post({"program_id": "p"}, CHAT, headers),
                post({"program_id": "p"}, "/programs/release", headers),
                get("/v1/models", headers),
                get("/programs", headers),
                post({"url": "http://x"}, "/engines", headers),
                post({}, "/pause", headers),
            ):
                answer = await ask(port, request)
                assert answer.status == 401
                assert answer.json()["error"]
        assert len(control.fleet) == 0
        assert not any(engine.calls for engine in engines)
        assert (await ask(port, get("/health"))).status in (200, 503)  # probes have no key


async def test_the_engines_key_is_not_the_clients():
    engine = ProgramEngine(key="engine's")
    await engine.start()
    keys = {"api_keys": ["client's"], "engine_api_key": "engine's"}
    async with coordinator(launch([engine], **keys)) as (port, control):
        await until_up(control, 1)
        headers = JSON + b"authorization: Bearer client's\r\n"
        assert (await ask(port, post({"program_id": "p"}, CHAT, headers))).status == 200
        assert engine.calls[0].values(b"authorization") == [b"Bearer engine's"]
        assert (await ask(port, get("/v1/models", headers))).status == 200
        released = await ask(port, post({"program_id": "p"}, "/programs/release", headers))
        assert released.json()["released"] is True
    await engine.kill()


async def test_a_wrong_key_that_is_passed_on_creates_no_program():
    engine = ProgramEngine(key="right")
    await engine.start()
    async with coordinator(launch([engine], engine_api_key=None)) as (port, control):
        # Without a key of its own the coordinator cannot ask this engine anything.
        await until(lambda: control.engines.unreachable)
        assert "engine-api-key" in next(iter(control.engines.unreachable.values()))
        health = await ask(port, get("/health"))
        assert (health.status, health.json()["status"]) == (503, "unavailable")
    await engine.kill()


# -- everything else -------------------------------------------------------------------


async def test_turns_wait_while_weights_are_updated(engines):
    async with coordinator(launch(engines)) as (port, control):
        await until_up(control, 2)
        begun = await ask(port, post({}, "/weight_sync/begin"))
        assert begun.json() == {"status": "ok", "weight_sync_active": True}
        waiting = [asyncio.create_task(ask(port, turn(f"p{n}"))) for n in range(3)]
        await until(lambda: control.fleet.queue.held_turns == 3)
        assert not any(engine.calls for engine in engines)
        assert "weights" in (await page(port, "/status"))["waiting"][0]["reason"]
        ended = await ask(port, post({}, "/weight_sync/end"))
        assert ended.json() == {"status": "ok", "weight_sync_active": False}
        assert [answer.status for answer in await asyncio.gather(*waiting)] == [200] * 3


async def test_what_changes_a_server_goes_to_all_of_them(engines):
    async with coordinator(launch(engines)) as (port, control):
        await until_up(control, 2)
        answer = await ask(port, post({}, "/pause?mode=keep"))
        assert answer.json() == {"path": "/pause"}
        for engine in engines:
            assert [r.target for r in engine.requests if b"pause" in r.target] == [
                b"/pause?mode=keep"
            ]
        await engines[0].kill()
        await until_up(control, 1)
        failed = await ask(port, post({}, "/resume"))
        assert failed.status == 502
        assert set(failed.json()["engines"]) == {engine.url for engine in engines}


@pytest.mark.parametrize("path", ["/collective_rpc", "/init_weight_transfer_engine"])
async def test_what_is_for_a_single_engine_is_refused(engines, path):
    async with coordinator(launch(engines)) as (port, control):
        await until_up(control, 2)
        answer = await ask(port, post({}, path))
        assert answer.status == 400
        assert "engine" in answer.json()["error"]["message"]


async def test_workers_by_the_names_of_rollout_frameworks(engines):
    first, second = engines
    async with coordinator(launch([first])) as (port, control):
        await until_up(control, 1)
        added = await ask(port, post({}, f"/add_worker?url={second.url}"))
        assert added.json()["worker_urls"] == [first.url, second.url]
        assert (await page(port, "/list_workers"))["urls"] == [first.url, second.url]
        await ask(port, post({"url": first.url}, "/remove_worker"))
        await until(lambda: list(control.fleet.backends) == [second.url])
        assert (await ask(port, post({}, "/add_worker"))).status == 400


async def test_metrics_count_what_happened(engines):
    async with coordinator(launch(engines)) as (port, control):
        await until_up(control, 2)
        await ask(port, turn("p"))
        await ask(port, post({"model": "m", "messages": []}))
        await ask(port, turn(1.5))
        text = (await ask(port, get("/metrics"))).body.decode()
        prefix = "vllm_thunder_coordinator:"
        for sample in (
            'requests_total{outcome="ok",without_program="false"} 1.0',
            'requests_total{outcome="ok",without_program="true"} 1.0',
            'requests_total{outcome="refused",without_program="true"} 1.0',
            "programs_created_total 1.0",
            "placements_total 1.0",
            'engines{health="up"} 2.0',
        ):
            assert prefix + sample in text, text
        as_json = await page(port, "/metrics", b"accept: application/json\r\n")
        assert set(as_json["backends"]) == {engine.url for engine in engines}


async def test_too_many_turns_and_too_large_bodies_are_refused(engines):
    config = CoordinatorConfig(max_held_turns=2, max_body_bytes=1000, engine_timeout=1.0)
    for engine in engines:
        engine.room = -1.0
    async with coordinator(launch(engines, config)) as (port, control):
        await until_up(control, 2)
        clients = [await Client.to(port) for _ in range(2)]
        for n, client in enumerate(clients):
            client.send(turn(f"p{n}"))
        await until(lambda: control.fleet.queue.held_turns == 2)
        held = sum(len(turn(f"p{n}").split(b"\r\n\r\n")[1]) for n in range(2))
        assert (await page(port, "/status"))["held_bytes"] == held
        assert b"coordinator:held_bytes %.1f" % held in (await ask(port, get("/metrics"))).body
        refused = await ask(port, turn("p2"))
        assert refused.status == 429
        assert "2 turns wait" in refused.json()["error"]["message"]
        assert control.fleet.get("p2") is None
        assert (await ask(port, turn("p", messages=["x" * 1000]))).status == 413
        for path in (
            "/programs/release",
            "/programs/tool",
            "/engines",
            "/pause",
            "/weight_sync/end",
        ):
            told = {"program_id": "p", "tool_name": "x" * 1000}
            assert (await ask(port, post(told, path))).status == 413, path
        for client in clients:
            client.leave()
        await until(lambda: control.fleet.queue.held_turns == 0)


async def test_a_websocket_and_an_unknown_path_are_answered(engines):
    async with coordinator(launch(engines)) as (port, control):
        await until_up(control, 2)
        assert json.loads((await ask(port, get("/version"))).body) == {"path": "/version"}
        assert (await ask(port, get("/engines/x"))).status in (404, 405)
