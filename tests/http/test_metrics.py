import asyncio
from types import SimpleNamespace

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from vllm.entrypoints.serve.instrumentator.metrics import attach_router

from tests.http.driver import FakeCore, Server
from tests.http.test_client import metrics
from vllm_thunder.engine import http
from vllm_thunder.engine.free_queue import EvictionClass
from vllm_thunder.engine.metrics import HELP, PREFIX, ProgramCollector
from vllm_thunder.engine.status import EngineStatus


@pytest.fixture
def vllm_registry(monkeypatch):
    registry = CollectorRegistry()
    Gauge("vllm:num_requests_running", "Running.", ["engine"], registry=registry).labels("0").set(3)
    Counter("vllm:prompt_tokens", "Prompt tokens.", registry=registry).inc(5)
    monkeypatch.setattr(http, "get_prometheus_registry", lambda: registry)
    return registry


def samples(families):
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


EXPECTED = {
    ("vllm:num_requests_running", ("engine", "0")): 3.0,
    ("vllm:prompt_tokens_total",): 5.0,
    ("vllm_thunder:up",): 1.0,
    ("vllm_thunder:held_turns",): 1.0,
    ("vllm_thunder:pauses_total",): 2.0,
    ("vllm_thunder:programs", ("phase", "ACTING"), ("status", "ACTIVE")): 1.0,
    ("vllm_thunder:evicted_blocks_total", ("class", "blank")): 1.0,
    ("vllm_thunder:wait_seconds_bucket", ("le", "0.1")): 1.0,
    ("vllm_thunder:wait_seconds_bucket", ("le", "1.0")): 3.0,
    ("vllm_thunder:wait_seconds_bucket", ("le", "+Inf")): 6.0,
    ("vllm_thunder:wait_seconds_count",): 6.0,
    ("vllm_thunder:wait_seconds_sum",): 4.0,
}


TEXT, OPENMETRICS = "text/plain;version=1.0.0", "application/openmetrics-text;version=1.0.0"
UTF8 = ";escaping=allow-utf-8"


@pytest.mark.parametrize(
    ("target", "accept", "content_type"),
    [
        ("/metrics", "", "text/plain; version=1.0.0; charset=utf-8"),
        ("/metrics", OPENMETRICS, "text/plain; version=1.0.0; charset=utf-8"),
        ("/metrics?x=1", TEXT, "text/plain; version=1.0.0; charset=utf-8"),
        ("/metrics/", "", "text/plain; version=0.0.4; charset=utf-8"),
        (
            "/metrics/",
            TEXT + UTF8,
            "text/plain; version=1.0.0; charset=utf-8; escaping=allow-utf-8",
        ),
        (
            "/metrics/",
            OPENMETRICS + UTF8,
            "application/openmetrics-text; version=1.0.0; charset=utf-8; escaping=allow-utf-8",
        ),
    ],
)
async def test_vllms_families_and_ours_in_one_answer(vllm_registry, target, accept, content_type):
    server = Server(core=FakeCore({"metrics": [metrics()]}))
    answer = await server.get(target, {"accept": accept})
    assert answer.status == 200
    assert answer.headers["content-type"] == content_type
    text = answer.body.decode()
    openmetrics = content_type.startswith("application")
    found = samples(parse_openmetrics(text) if openmetrics else parse_text(text))
    assert {name: found.get(name) for name in EXPECTED} == EXPECTED
    assert text.count("# EOF") == openmetrics
    suffix = "" if openmetrics else "_total"
    assert text.count(f"# HELP vllm_thunder:pauses{suffix} {HELP['pauses']}\n") == 1


@pytest.mark.parametrize("target", ["/metrics", "/metrics/"])
@pytest.mark.parametrize("accept", ["", TEXT, OPENMETRICS, OPENMETRICS + UTF8])
async def test_the_formats_are_those_of_vllms_own_server(vllm_registry, target, accept):
    app = FastAPI()
    attach_router(app)
    stock = TestClient(app).get(target, headers={"accept": accept, "accept-encoding": "gzip"})
    server = Server(core=FakeCore({"metrics": [metrics()]}))
    ours = await server.get(target, {"accept": accept, "accept-encoding": "gzip"})
    for name in ("content-type", "content-encoding"):
        assert ours.headers.get(name) == stock.headers.get(name)


async def test_a_scrape_can_ask_for_some_names(vllm_registry):
    server = Server(core=FakeCore({"metrics": [metrics()]}))
    wanted = "name[]=vllm_thunder:up&name[]=vllm:prompt_tokens_total"
    answer = await server.get("/metrics/?" + wanted)
    found = samples(parse_text(answer.body.decode()))
    assert found == {("vllm_thunder:up",): 1.0, ("vllm:prompt_tokens_total",): 5.0}


async def test_metrics_need_no_api_key_as_in_vllm(vllm_registry):
    server = Server(core=FakeCore({"metrics": [metrics()]}), api_key=["k"])
    assert (await server.get("/metrics")).status == 200


async def test_ranks_are_one_truth(vllm_registry):
    server = Server(core=FakeCore({"metrics": [metrics(), metrics(2.0)]}))
    found = samples(parse_text((await server.get("/metrics")).body.decode()))
    assert found["vllm_thunder:held_turns",] == 3.0
    assert found["vllm_thunder:wait_seconds_count",] == 12.0


async def test_an_engine_that_fails_is_down_and_vllms_metrics_still_come(vllm_registry):
    server = Server(core=FakeCore({"metrics": RuntimeError("dead")}))
    found = samples(parse_text((await server.get("/metrics")).body.decode()))
    assert found["vllm_thunder:up",] == 0.0
    assert found["vllm:prompt_tokens_total",] == 5.0
    assert [name for name, *_ in found if name.startswith(PREFIX)] == ["vllm_thunder:up"]


async def test_an_engine_that_is_late_is_down_until_it_answers(vllm_registry, monkeypatch):
    monkeypatch.setattr(http, "METRICS_SECONDS", 0.05)
    core = FakeCore({"metrics": [metrics()]}, delay=0.3)
    server = Server(core=core)
    found = samples(parse_text((await server.get("/metrics")).body.decode()))
    assert found["vllm_thunder:up",] == 0.0
    await asyncio.sleep(0.4)
    core.delay = 0.0
    found = samples(parse_text((await server.get("/metrics")).body.decode()))
    assert found["vllm_thunder:up",] == 1.0


async def test_other_methods_and_paths_are_vllms(vllm_registry):
    server = Server()
    await server.request("POST", "/metrics")
    await server.get("/metricsx")
    assert server.model.paths == ["/metrics", "/metricsx"]


def test_names_follow_prometheus_practice():
    for name, text in HELP.items():
        assert name == name.lower()
        assert not name.endswith(("_total", "_count", "_sum", "_bucket"))
        assert text.endswith(".")
        assert "\n" not in text


class Table(list):
    turns_done = pauses = created = released = expired = evicted = 0
    waiting = ()


def test_every_value_that_the_engine_reports_has_a_help_text():
    status = EngineStatus(
        Table(),
        pool=SimpleNamespace(
            free_block_queue=SimpleNamespace(evicted=dict.fromkeys(EvictionClass, 0)),
            ledger=SimpleNamespace(shared_resident=0),
            num_gpu_blocks=10,
            get_num_free_blocks=lambda: 9,
        ),
        policy=SimpleNamespace(prefill=SimpleNamespace(tokens_per_second=None)),
        clock=lambda: 0.0,
        memory=lambda: None,
    )
    reported = status.metrics()
    names = {name for kind in reported.values() for name in kind}
    assert names == HELP.keys() - {"up"}
    families = {family.name for family in ProgramCollector(reported).collect()}
    assert families == {PREFIX + name for name in HELP}
