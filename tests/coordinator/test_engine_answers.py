"""Whatever an engine answers once, it is used again when it is well."""

import asyncio
import re

import msgspec
import pytest

from tests.coordinator.fake_engine import chunked, whole
from tests.coordinator.front import ask, post
from tests.coordinator.program_engine import (
    ProgramEngine,
    coordinator,
    launch,
    turn,
    until,
    until_up,
)
from tests.coordinator.test_stock_engines import StockEngine
from tests.coordinator.test_stock_metrics import vllm_text
from vllm_thunder.coordinator.config import CoordinatorConfig
from vllm_thunder.coordinator.engines import engines as engines_module
from vllm_thunder.coordinator.engines import feed as feed_module
from vllm_thunder.program.report import EngineReport, MemoryReport, ProgramReport

#: The value of a gauge.
_NUMBER = re.compile(r"(?m)^(vllm:num_requests_running\{.*\} ).*$")
DEEP = b'{"data": [], "x": ' + b"[" * 5000 + b"]" * 5000 + b"}"
WRONG = [
    b"",
    b"[]",
    b"7",
    b"null",
    b"{}",
    b"\xff",
    b"<html>",
    b"[[[[",
    b'{"data": null, "ranks": null, "tokens": null, "released": null, "known": null}',
    b'{"data": [], "ranks": 0, "tokens": {}, "released": 1, "known": 1}',
    b'{"data": [{"x": 1}], "ranks": -1, "tokens": [null]}',
    b'{"data": [{"id": 7}], "ranks": "2", "tokens": "a"}',
    b'{"data": [{"id": "\xff"}], "ranks": 1.5, "tokens": [1.5]}',
    b'{"data": [[]], "ranks": true, "tokens": [[1]]}',
    DEEP,
]


def report(programs=(), **memory):
    known = {"capacity_blocks": 1000, "room_blocks": 1.0, "free_seats": 1, **memory}
    groups = known.pop("context_groups", [(16, None)])
    told = MemoryReport(**known, context_groups=groups)
    return msgspec.json.encode(EngineReport("9", False, True, told, list(programs), []))


WRONG_REPORTS = [
    *WRONG,
    report(capacity_blocks=0),
    report(capacity_blocks=-5),
    report(context_groups=[]),
    report(context_groups=[(0, None)]),
    report(context_groups=[(16, -1)]),
    report(room_blocks=float("inf")),
    report([ProgramReport("p", -1, 0, True)]),
    report([ProgramReport("p", 16, -1, True)]),
    report([ProgramReport(7, 16, 1, True)]),
]


class WeirdEngine(ProgramEngine):
    """``weird``: answers by path, in place of what is right. ``asked``: how often they were."""

    def __init__(self):
        super().__init__()
        self.weird: dict[str, bytes] = {}
        self.asked = 0
        #: Only the long poll is answered so, not the check before it.
        self.only_later = False

    async def _answer(self, path, query, request, wire):
        first = path == "/programs/changes" and not query.get("after")
        if path in self.weird and not (first and self.only_later):
            self.asked += 1
            await whole(self.weird[path])(request, wire)
        else:
            await super()._answer(path, query, request, wire)


@pytest.fixture(autouse=True)
def _quick_retries(monkeypatch):
    monkeypatch.setattr(feed_module, "_FIRST_RETRY", 0.01)
    monkeypatch.setattr(feed_module, "_LAST_RETRY", 0.02)
    monkeypatch.setattr(feed_module, "_PAUSE_IDLE", 0.01)
    monkeypatch.setattr(engines_module, "_TRY_SECONDS", 0.01)


@pytest.fixture
async def engine():
    made = WeirdEngine()
    await made.start()
    yield made
    await made.kill()


def only(control):
    (backend,) = control.fleet.backends.values()
    return backend


@pytest.mark.parametrize("path", ["/v1/models", "/programs/summary", "/tokenize"])
async def test_a_wrong_answer_to_the_check_does_not_end_it(engine, path):
    async with coordinator(launch([engine])) as (_, control):
        for wrong in WRONG:
            await until_up(control, 1)
            await engine.kill()
            await until(lambda: not only(control).usable)
            engine.weird, asked = {path: wrong}, engine.asked
            await engine.start()
            await until(lambda asked=asked: engine.asked >= asked + 2)
            assert not only(control).usable, wrong
            assert path in (only(control).problem or ""), (wrong, only(control).problem)
            engine.weird = {}
        await until_up(control, 1)


@pytest.mark.parametrize("only_later", [True, False], ids=["long poll", "first report"])
async def test_a_wrong_report_does_not_end_it(engine, only_later):
    engine.only_later = only_later
    async with coordinator(launch([engine])) as (port, control):
        for wrong in WRONG_REPORTS:
            await until_up(control, 1)
            if not only_later:
                await engine.kill()
                await until(lambda: not only(control).usable)
            engine.weird, asked = {"/programs/changes": wrong}, engine.asked
            if not only_later:
                await engine.start()
            engine.tell()
            await until(lambda asked=asked: engine.asked > asked)
            await until(lambda: not only(control).usable)
            engine.weird = {}
        await until_up(control, 1)
        assert (await ask(port, turn("p"))).status == 200
        control.fleet.check_integrity()


@pytest.mark.parametrize("path", ["/v1/models", "/programs/summary", "/programs/changes"])
async def test_a_server_that_answers_wrongly_at_first_joins_when_it_is_well(engine, path):
    engine.weird = {path: b""}
    async with coordinator(launch([engine])) as (port, control):
        for wrong in WRONG_REPORTS if path == "/programs/changes" else WRONG:
            engine.weird, asked = {path: wrong}, engine.asked
            added = await ask(port, post({"url": engine.url}, "/engines"))
            assert added.status == 409, (wrong, added.body)
            await until(lambda asked=asked: engine.asked >= asked + 3)
            assert path in control.engines.unreachable[engine.url], wrong
        engine.weird = {}
        await until_up(control, 1)


@pytest.mark.parametrize("path", ["/programs/release", "/programs/tool"])
async def test_a_wrong_answer_to_what_it_is_told_is_a_502(engine, path):
    async with coordinator(launch([engine])) as (port, control):
        await until_up(control, 1)
        for wrong in WRONG:
            await ask(port, turn("p"))
            engine.weird = {path: wrong}
            answer = await ask(port, post({"program_id": "p", "tool_name": "t"}, path))
            assert (answer.status, engine.url in answer.body.decode()) == (502, True), wrong
            engine.weird = {}


@pytest.mark.parametrize("path", ["/metrics", "/get_server_info", "/v1/models", "/tokenize"])
async def test_an_engine_that_knows_no_programs_may_answer_wrongly_too(path):
    engine = StockEngine()
    await engine.start()
    right, wrong = engine.answer, b""
    asked = 0

    async def weird(request, wire):
        nonlocal asked
        if request.target.startswith(path.encode()):
            asked += 1
            await whole(wrong)(request, wire)
        else:
            await right(request, wire)

    texts = [
        _NUMBER.sub(r"\g<1>NaN", vllm_text()).encode(),
        _NUMBER.sub(r"\g<1>+Inf", vllm_text()).encode(),
        b"vllm:cache_config_info{",
        b'{"page_size": 16, "internal_states": [7]}',
        b'{"page_size": 0, "internal_states": []}',
    ]
    engine.answer = weird
    async with coordinator(launch([engine])) as (_, control):
        for wrong in [*WRONG, *texts]:
            before = asked
            await until(lambda before=before: asked >= before + 2)
            assert engine.url in control.engines.unreachable, wrong
        engine.answer = right
        await until_up(control, 1)
    await engine.kill()


async def test_programs_beyond_the_limit_are_not_tracked_and_the_engine_is_still_followed(engine):
    config = CoordinatorConfig(engine_timeout=1.0, max_programs=1)
    engine.chat = chunked(*[b"data: 1\n\n"] * 4, delay=0.3)
    async with coordinator(launch([engine], config)) as (port, control):
        await until_up(control, 1)
        running = asyncio.create_task(ask(port, turn("p", stream=True)))
        await until(lambda: engine.calls)
        engine.room = 7.0
        engine.tell(ProgramReport("other", 160, 10, True))
        await until(lambda: only(control).report.room_blocks == 7.0)
        assert [program.program_id for program in control.fleet] == ["p"]
        counts = control.fleet.counts
        assert (counts.programs_created, counts.programs_evicted) == (2, 1)
        assert (await running).status == 200
        engine.tell(ProgramReport("other", 170, 11, True))  # now another one can go for it
        await until(lambda: control.fleet.get("other") is not None)


async def test_a_fault_of_our_own_does_not_end_it(engine, caplog):
    async with coordinator(launch([engine])) as (_, control):
        await until_up(control, 1)
        reported, faults = control.dispatcher.reported, 0

        def broken(backend, told):
            nonlocal faults
            faults += 1
            raise KeyError("ours")

        control.dispatcher.reported = broken
        engine.tell()
        await until(lambda: faults > 1)
        assert not only(control).usable
        control.dispatcher.reported = reported
        await until_up(control, 1)
    assert any(record.exc_info for record in caplog.records)
