"""Engines come, die, hang, come back and leave; a coordinator starts again, or there are two."""

import asyncio

import pytest

from tests.coordinator.fake_engine import chunked, hang, reset, whole
from tests.coordinator.front import Client, ask, post
from tests.coordinator.program_engine import (
    ProgramEngine,
    coordinator,
    delete,
    get,
    launch,
    page,
    turn,
    until,
    until_up,
)
from vllm_thunder.coordinator.config import CoordinatorConfig
from vllm_thunder.coordinator.engines.client import EngineError
from vllm_thunder.coordinator.engines.engines import engine_url
from vllm_thunder.coordinator.fleet.backend import Health
from vllm_thunder.program.errors import ConfigError
from vllm_thunder.program.report import ProgramReport


async def test_engines_come_and_go(engines):
    first, second = engines
    async with coordinator(launch([first])) as (port, control):
        await until_up(control, 1)
        added = await ask(port, post({"url": second.url + "/"}, "/engines"))
        assert [engine["id"] for engine in added.json()["engines"]] == [second.url]
        await until_up(control, 2)
        twice = await ask(port, post({"url": second.url}, "/engines"))
        assert twice.status == 409
        removed = await ask(port, delete(f"/engines/{first.url}"))
        assert removed.status == 200
        await until(lambda: list(control.fleet.backends) == [second.url])
        assert (await ask(port, delete(f"/engines/{first.url}"))).status == 404
        for n in range(3):
            await ask(port, turn(f"p{n}"))
        assert len(second.calls) == 3


async def test_an_engine_that_is_taken_out_ends_its_turns_first(engines):
    async with coordinator(launch(engines)) as (port, control):
        await until_up(control, 2)
        for engine in engines:
            engine.chat = chunked(b"data: 1\n\n", b"data: 2\n\n", delay=0.3)
        running = asyncio.create_task(ask(port, turn("p", stream=True)))
        await until(lambda: control.fleet.get("p") and control.fleet.get("p").running)
        home = control.fleet.get("p").home
        await ask(port, delete(f"/engines/{home.backend_id}"))
        assert home.backend_id in control.fleet.backends
        assert (await running).body == b"data: 1\n\ndata: 2\n\n"
        await until(lambda: home.backend_id not in control.fleet.backends)
        assert (await ask(port, turn("p", stream=True))).status == 200


@pytest.mark.parametrize(
    "text",
    [
        "",
        "http://",
        "https:///",
        "http://:8000",
        "ftp://a",
        "http://a:port",
        "a?b",
        "a b",
        "http://a/v1/",
    ],
)
def test_an_address_that_is_none(text):
    with pytest.raises(ConfigError, match="engine"):
        engine_url(text)


@pytest.mark.parametrize("text", ["a:1", " http://a:1 ", "http://a:1/", "http://a:1//"])
def test_an_address_is_kept_in_one_form(text):
    assert engine_url(text) == "http://a:1"


async def test_a_file_lists_the_engines(engines, tmp_path):
    first, second = engines
    listed = tmp_path / "engines"
    listed.write_text(f"# ours\n{first.url}\n")
    async with coordinator(launch([], engines_file=listed)) as (_, control):
        await until_up(control, 1)
        listed.write_text(f"{first.url}\n{second.url}  # new\n")
        await until_up(control, 2)
        listed.write_text(f"{second.url}\n")
        await until(lambda: list(control.fleet.backends) == [second.url])
        listed.write_text("no address?\n")
        await asyncio.sleep(1.2)
        assert list(control.fleet.backends) == [second.url]


@pytest.mark.parametrize("what", ["model", "tokenizer", "block size", "longest context"])
async def test_engines_that_differ_are_refused(engines, what):
    first, second = engines
    if what == "model":
        second.models = {"data": [{"id": "other", "max_model_len": 4096}]}
    elif what == "tokenizer":
        second.tokens = [1, 2, 4]
    elif what == "block size":
        second.block_size = 32
    else:
        second.models = {"data": [{"id": "m", "max_model_len": 2048}]}
    with pytest.raises(EngineError, match="one fleet"):
        async with coordinator(launch(engines)):
            pass
    async with coordinator(launch([first])) as (port, control):
        await until_up(control, 1)
        answer = await ask(port, post({"url": second.url}, "/engines"))
        assert answer.status == 409
        assert "one fleet" in answer.json()["error"]["message"]
        assert list(control.fleet.backends) == [first.url]


def tokenizing(engine, answer):
    """Answer /tokenize like that."""
    routed = engine.answer

    async def route(request, wire):
        await (answer if request.target == b"/tokenize" else routed)(request, wire)

    engine.answer = route


@pytest.mark.parametrize("status", [400, 404, 405, 422, 500, 501])
async def test_a_server_that_has_no_tokenizer_is_an_engine(engines, status):
    first, second = engines
    tokenizing(second, whole(b'{"error": "the tokenizer is None"}', b"%d No" % status))
    async with coordinator(launch([first])) as (port, control):
        await until_up(control, 1)
        assert (await ask(port, post({"url": second.url}, "/engines"))).status == 200
        await until_up(control, 2)


@pytest.mark.parametrize("status", [401, 403, 503])
async def test_a_tokenizer_that_cannot_be_asked_now_is_none_that_is_missing(engines, status):
    first, second = engines
    tokenizing(second, whole(b"{}", b"%d No" % status))
    async with coordinator(launch([first])) as (port, control):
        await until_up(control, 1)
        assert (await ask(port, post({"url": second.url}, "/engines"))).status == 409
        assert list(control.fleet.backends) == [first.url]


async def test_what_the_first_server_did_not_tell_is_what_the_next_one_tells(engines):
    first, second = engines
    third = ProgramEngine()
    await third.start()
    third.tokens = [1, 2, 4]
    tokenizing(first, whole(b"{}", b"404 Not Found"))
    async with coordinator(launch([first])) as (port, control):
        await until_up(control, 1)
        assert (await ask(port, post({"url": second.url}, "/engines"))).status == 200
        answer = await ask(port, post({"url": third.url}, "/engines"))
        assert answer.status == 409
        assert "tokenizer" in answer.json()["error"]["message"]
    await third.kill()


async def test_a_fleet_without_engines_takes_any(engines):
    first, second = engines
    second.models = {"data": [{"id": "other", "max_model_len": 2048}]}
    async with coordinator(launch([first])) as (port, control):
        await until_up(control, 1)
        assert (await ask(port, post({"url": second.url}, "/engines"))).status == 409
        assert (await ask(port, delete(f"/engines/{first.url}"))).status == 200
        await until(lambda: not control.fleet.backends)
        assert (await ask(port, post({"url": second.url}, "/engines"))).status == 200
        assert (await ask(port, post({"url": first.url}, "/engines"))).status == 409


async def test_adapters_may_differ(engines):
    adapter = {"id": "lora", "parent": "m"}
    engines[1].models = {"data": [{"id": "m", "max_model_len": 4096}, adapter]}
    async with coordinator(launch(engines)) as (_, control):
        await until_up(control, 2)


async def test_each_rank_of_a_server_is_an_engine():
    engine = ProgramEngine(ranks=2)
    await engine.start()
    async with coordinator(launch([engine])) as (port, control):
        await until_up(control, 2)
        assert list(control.fleet.backends) == [f"{engine.url}#0", f"{engine.url}#1"]
        for n in range(4):
            await ask(port, turn(f"p{n}"))
        ranks = [call.values(b"x-data-parallel-rank") for call in engine.calls]
        assert sorted(map(tuple, ranks)) == [(b"0",)] * 2 + [(b"1",)] * 2
    await engine.kill()


@pytest.mark.parametrize("cut", ["#1", "", "/", "?#1"])
async def test_an_id_that_a_client_has_cut_off_takes_out_no_other_rank(cut):
    engine = ProgramEngine(ranks=2)
    await engine.start()
    async with coordinator(launch([engine])) as (port, control):
        await until_up(control, 2)
        ids = [f"{engine.url}#0", f"{engine.url}#1"]
        refused = await ask(port, delete(f"/engines/{engine.url}{cut}"))
        assert refused.status == 409
        assert all(each in refused.json()["error"]["message"] for each in ids)
        assert all(backend.usable for backend in control.fleet.backends.values())
        removed = await ask(port, delete(f"/engines/{engine.url}%231"))
        assert [each["id"] for each in removed.json()["engines"]] == ids[1:]
        await until(lambda: list(control.fleet.backends) == ids[:1])
        assert (await ask(port, delete(f"/engines/{engine.url}"))).status == 200
        await until(lambda: not control.fleet.backends)
    await engine.kill()


async def test_a_worker_is_a_server_with_all_its_ranks():
    engine = ProgramEngine(ranks=2)
    await engine.start()
    async with coordinator(launch([engine])) as (port, control):
        await until_up(control, 2)
        assert (await ask(port, post({"url": engine.url}, "/remove_worker"))).status == 200
        await until(lambda: not control.fleet.backends)
    await engine.kill()


async def test_an_engine_that_dies_is_used_again_when_it_is_back(engines):
    async with coordinator(launch(engines)) as (port, control):
        await until_up(control, 2)
        await ask(port, turn("p"))
        home, other = sorted(engines, key=lambda engine: not engine.calls)
        await home.kill()
        assert (await ask(port, turn("p"))).status == 200
        assert len(other.calls) == 1
        await until_up(control, 1)
        described = (await page(port, "/status"))["engines"]
        dead = next(engine for engine in described if engine["url"] == home.url)
        assert dead["health"] == "down"
        assert dead["problem"]
        assert (await ask(port, get("/health"))).json()["status"] == "degraded"
        await home.start()
        await until_up(control, 2)
        assert (await ask(port, get("/health"))).json()["status"] == "ok"


async def test_an_engine_that_was_unwell_for_a_moment_is_used_again(engines):
    """Its feed never broke: only an exchange did, and then a probe."""
    async with coordinator(launch(engines)) as (port, control):
        await until_up(control, 2)
        await ask(port, turn("p"))
        home, other = sorted(engines, key=lambda engine: not engine.calls)
        home.tell(ProgramReport("p", 160, 10, True))
        await until(lambda: control.fleet.get("p").claimed)
        answers, home.chat, home.healthy = home.chat, reset, False
        assert (await ask(port, turn("p"))).status == 200
        assert len(other.calls) == 1
        assert not control.fleet.backends[home.url].usable
        home.tell()
        home.chat, home.healthy = answers, True
        await until_up(control, 2)
        assert control.fleet.backends[home.url].problem is None


async def test_an_engine_that_hangs_is_down_after_its_time_and_its_turns_go_elsewhere(engines):
    async with coordinator(launch(engines)) as (port, control):
        await until_up(control, 2)
        for engine in engines:
            engine.chat = hang
        running = asyncio.create_task(ask(port, turn("p")))
        await until(lambda: any(engine.calls for engine in engines))
        home, other = sorted(engines, key=lambda engine: not engine.calls)
        other.chat = whole(b"{}")
        home.silent = True
        home.tell()
        assert (await running).status == 200
        assert len(other.calls) == 1


@pytest.mark.parametrize("first", ["it goes down", "it is taken out"])
async def test_an_engine_that_is_taken_out_and_goes_down_is_not_used_again(engines, first):
    """A turn of which the client has not read everything is counted there until it has."""
    (engine, other) = engines
    engine.chat = chunked(*[b"data: " + b"x" * 60_000 + b"\n\n"] * 400)
    async with coordinator(launch([engine])) as (port, control):
        await until_up(control, 1)
        (backend,) = control.fleet.backends.values()
        slow = await Client.to(port)
        slow.send(turn("p", stream=True))
        await until(lambda: backend.running)
        await asyncio.sleep(0.3)
        if first == "it goes down":
            await engine.kill()
            await until(lambda: backend.health is Health.DOWN)
        assert (await ask(port, delete(f"/engines/{engine.url}"))).status == 200
        if first == "it is taken out":
            engine.healthy = False
            assert not await control.engines.still_well(backend)
            engine.healthy = True
        else:
            await engine.start()
        assert (await ask(port, post({"url": other.url}, "/engines"))).status == 200
        await until_up(control, 1)
        asked = len(engine.requests)
        await until(lambda: len(engine.requests) > asked)  # whether it may be used again
        await asyncio.sleep(0.3)
        assert backend.running
        assert not backend.usable
        engine.chat = other.chat
        assert (await ask(port, turn("q"))).status == 200
        assert len(other.calls) == 1
        slow.leave()
        await until(lambda: list(control.fleet.backends) == [other.url])


async def test_a_server_that_is_slow_to_say_that_it_is_well_has_the_time_of_an_engine(engines):
    """It is busy, and one exchange failed: what else it answers is not cut."""
    (engine, *_) = engines
    events = [b"data: %d\n\n" % number for number in range(12)]
    routed = engine.answer

    async def answer(request, wire):
        if request.target == b"/health":
            await asyncio.sleep(2.3)
        await routed(request, wire)

    engine.answer = answer
    engine.chat = chunked(*events, delay=0.3)
    config = CoordinatorConfig(engine_timeout=5.0)
    async with coordinator(launch([engine], config)) as (port, control):
        await until_up(control, 1)
        running = asyncio.create_task(ask(port, turn("p", stream=True)))
        await until(lambda: engine.calls)
        engine.chat = whole(b"{}", b"500 Internal Server Error")
        assert (await ask(port, turn("q"))).status == 500
        assert (await running).body == b"".join(events)


async def test_an_engine_that_comes_back_as_another_is_not_used(engines):
    async with coordinator(launch(engines)) as (_, control):
        await until_up(control, 2)
        changed = engines[0]
        await changed.kill()
        await until_up(control, 1)
        changed.models = {"data": [{"id": "other", "max_model_len": 4096}]}
        await changed.start()
        backend = control.fleet.backends[changed.url]
        await until(lambda: "other" in (backend.problem or ""))
        assert not backend.usable


async def test_capacity_unknown_is_seen_and_comes_back_by_itself(engines):
    for engine in engines:
        engine.silent = True
    async with coordinator(launch(engines)) as (port, control):
        waiting = asyncio.create_task(ask(port, turn("p")))
        await until(lambda: control.fleet.queue.held_turns == 1)
        status = await page(port, "/status")
        assert (status["state"], status["capacity_known"]) == ("unavailable", False)
        assert "no engine" in status["waiting"][0]["reason"]
        metrics = (await ask(port, get("/metrics"))).body.decode()
        assert "vllm_thunder_coordinator:capacity_known 0.0" in metrics
        for engine in engines:
            engine.silent = False
        assert (await waiting).status == 200
        await until_up(control, 2)
        metrics = (await ask(port, get("/metrics"))).body.decode()
        assert "vllm_thunder_coordinator:capacity_known 1.0" in metrics


# -- more than one coordinator, and one that starts again ------------------------------


async def test_a_coordinator_that_starts_again_knows_where_programs_are(engines):
    async with coordinator(launch(engines)) as (port, control):
        await until_up(control, 2)
        await ask(port, turn("p"))
    home = next(engine for engine in engines if engine.calls)
    home.tell(ProgramReport("p", 160, 10, False))
    loop = asyncio.get_running_loop()
    began = loop.time()
    async with coordinator(launch(engines)) as (port, control):
        await until(lambda: control.fleet.get("p") is not None)
        await until_up(control, 2)
        assert (await ask(port, turn("p"))).status == 200
        assert loop.time() - began < 5.0
        assert len(home.calls) == 2


async def test_two_coordinators_share_engines(engines):
    async with (
        coordinator(launch(engines)) as (one, control),
        coordinator(launch(engines)) as (two, other_control),
    ):
        await until_up(control, 2)
        await until_up(other_control, 2)
        await ask(one, turn("p"))
        home = next(engine for engine in engines if engine.calls)
        home.tell(ProgramReport("p", 160, 10, True))
        await until(lambda: other_control.fleet.get("p") is not None)
        for n in range(4):
            await ask(two if n % 2 else one, turn("p"))
        assert len(home.calls) == 5
        released = await ask(two, post({"program_id": "p"}, "/programs/release"))
        assert released.json()["released"] is True
        await until(lambda: control.fleet.get("p") is None)
