"""The span of a model call: whose child it is, what the engine gets, and what it tells."""

import asyncio
import re
from contextlib import asynccontextmanager

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode, format_span_id, format_trace_id

from tests.coordinator.fake_engine import FakeEngine, chunked, hang, raw, reset, whole
from tests.coordinator.front import CHAT, Client, post, running_front
from vllm_thunder.coordinator.tracing import Tracing

LABELLED = {"model": "m", "program_id": "p"}
STREAM = {**LABELLED, "stream": True}
JSON = b"content-type: application/json\r\n"

TRACE, PARENT = b"4bf92f3577b34da6a3ce929d0e0e4736", b"00f067aa0ba902b7"
GIVEN = b"00-%b-%b-01" % (TRACE, PARENT)


@asynccontextmanager
async def traced(**settings):
    """A front with tracing, and the list in which all spans are when the block was left."""
    exporter, spans = InMemorySpanExporter(), []
    tracing = Tracing(exporter)
    try:
        async with running_front(tracing=tracing, **settings) as front:
            yield front, spans
    finally:
        await tracing.close()
    spans += exporter.get_finished_spans()


def asking(*lines: bytes, body=LABELLED) -> bytes:
    return post(body, headers=JSON + b"".join(line + b"\r\n" for line in lines))


def traceparent_of(span) -> bytes:
    context = span.get_span_context()
    ids = format_trace_id(context.trace_id), format_span_id(context.span_id)
    return "00-{}-{}-{:02x}".format(*ids, context.trace_flags).encode()


# -- parents -----------------------------------------------------------------------------


async def test_the_span_is_the_clients_child_and_the_engines_parent():
    async with traced() as (front, spans):
        engine = FakeEngine()
        await front.add(engine)
        request = asking(
            b"x-before: 1", b"traceparent: " + GIVEN, b"tracestate: a=1,b=2", b"x-after: \xff 2"
        )
        await front.ask(request)
        (got,) = engine.requests
        others = (b"host", b"content-length", b"traceparent", b"tracestate", b"x-program-waited")
        kept = [header for header in got.headers if header[0] not in others]
        assert kept == [
            (b"content-type", b"application/json"),
            (b"x-before", b"1"),
            (b"x-after", b"\xff 2"),
        ]
        assert got.body == request.split(b"\r\n\r\n", 1)[1]
        assert got.values(b"tracestate") == [b"a=1,b=2"]
        assert front.done[0].trace_id == TRACE.decode()
    (span,) = spans
    assert span.name == "llm_request"
    assert span.kind is SpanKind.SERVER
    assert format_trace_id(span.parent.trace_id).encode() == TRACE
    assert format_span_id(span.parent.span_id).encode() == PARENT
    assert got.values(b"traceparent") == [traceparent_of(span)]
    assert TRACE in traceparent_of(span)
    assert PARENT not in traceparent_of(span)


NOT_ONE = {
    "none": [],
    "a state alone": [b"tracestate: a=1"],
    "not hexadecimal": [b"traceparent: 00-aa-bb-01", b"tracestate: a=1"],
    "upper case": [b"traceparent: " + GIVEN.upper(), b"tracestate: a=1"],
    "no trace": [b"traceparent: 00-%b-%b-01" % (b"0" * 32, PARENT)],
    "no parent": [b"traceparent: 00-%b-%b-01" % (TRACE, b"0" * 16)],
    "version ff": [b"traceparent: ff" + GIVEN[2:]],
    "version 00 with more": [b"traceparent: " + GIVEN + b"-more"],
    "empty": [b"traceparent:", b"tracestate: a=1"],
    "twice": [b"traceparent: " + GIVEN, b"traceparent: " + GIVEN, b"tracestate: a=1"],
    "not text": [b"traceparent: \xff\xfe"],
}


@pytest.mark.parametrize("what", NOT_ONE)
async def test_without_a_usable_parent_a_new_trace_begins(what):
    async with traced() as (front, spans):
        engine = FakeEngine()
        await front.add(engine)
        assert (await front.ask(asking(*NOT_ONE[what]))).status == 200
        (got,) = engine.requests
        assert front.done[0].trace_id not in (None, TRACE.decode())
    (span,) = spans
    assert span.parent is None
    assert got.values(b"traceparent") == [traceparent_of(span)]
    assert got.values(b"tracestate") == []  # it belongs to a trace that is not gone on with


async def test_a_later_version_is_gone_on_with_as_this_one():
    async with traced() as (front, spans):
        engine = FakeEngine()
        await front.add(engine)
        await front.ask(asking(b"traceparent: cc" + GIVEN[2:] + b"-what-comes-then"))
    (span,) = spans
    assert format_span_id(span.parent.span_id).encode() == PARENT
    assert engine.requests[0].values(b"traceparent") == [traceparent_of(span)]


async def test_a_call_that_its_client_does_not_sample_is_sampled_by_nobody():
    async with traced() as (front, spans):
        engine = FakeEngine()
        await front.add(engine)
        await front.ask(asking(b"traceparent: " + GIVEN[:-2] + b"00", b"tracestate: a=1"))
        (got,) = engine.requests
        assert re.fullmatch(b"00-%b-[0-9a-f]{16}-00" % TRACE, *got.values(b"traceparent"))
        assert got.values(b"tracestate") == [b"a=1"]
        assert front.done[0].trace_id == TRACE.decode()
    assert spans == []


async def test_the_environments_sampler_decides_where_the_client_did_not(monkeypatch):
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    async with traced() as (front, spans):
        engine = FakeEngine()
        await front.add(engine)
        await front.ask(asking())
        await front.ask(asking(b"traceparent: " + GIVEN))
        flags = [int(r.values(b"traceparent")[0][-2:], 16) for r in engine.requests]
        assert [flag & 1 for flag in flags] == [0, 1]
    assert [format_trace_id(span.context.trace_id).encode() for span in spans] == [TRACE]


async def test_switched_off_by_the_environment_headers_are_the_clients(monkeypatch):
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    async with traced() as (front, spans):
        engine = FakeEngine()
        await front.add(engine)
        for given in (GIVEN, b"malformed"):
            await front.ask(asking(b"traceparent: " + given, b"tracestate: a=1"))
        await front.ask(asking())
        told = [(r.values(b"traceparent"), r.values(b"tracestate")) for r in engine.requests]
        assert told == [([GIVEN], [b"a=1"]), ([b"malformed"], [b"a=1"]), ([], [])]
    assert spans == []


@pytest.mark.parametrize("given", [GIVEN, b"00-aa-bb-01"], ids=["a trace", "malformed"])
async def test_without_tracing_headers_are_the_clients(given):
    async with running_front() as front:
        engine = FakeEngine()
        await front.add(engine)
        await front.ask(asking(b"traceparent: " + given, b"tracestate: a=1 , b=2"))
        (got,) = engine.requests
        assert got.values(b"traceparent") == [given]
        assert got.values(b"tracestate") == [b"a=1 , b=2"]
        assert front.done[0].trace_id == (TRACE.decode() if given is GIVEN else None)


async def test_what_is_no_model_call_has_no_span():
    async with traced() as (front, spans):
        engine = FakeEngine()
        await front.add(engine)
        await front.ask(b"GET /v1/models HTTP/1.1\r\nhost: x\r\ntraceparent: %b\r\n\r\n" % GIVEN)
        assert engine.requests[0].values(b"traceparent") == [GIVEN]
    assert spans == []


# -- what it tells -----------------------------------------------------------------------


async def test_a_call_tells_what_the_log_tells():
    async with traced() as (front, spans):
        await front.add(FakeEngine())
        await front.ask(asking(b"x-request-id: r-1", body={**LABELLED, "program_id": "☃"}))
        (done,) = front.done
    (span,) = spans
    assert span.attributes == {
        "gen_ai.request.id": "r-1",
        "gen_ai.latency.time_in_queue": done.queue_seconds,
        "gen_ai.latency.e2e": done.total_seconds,
        "url.path": CHAT,
        "http.response.status_code": 200,
        "vllm_thunder.program_id": "☃",
        "vllm_thunder.engine": "e0",
        "vllm_thunder.attempts": 1,
        "vllm_thunder.first_byte_seconds": done.first_byte_seconds,
        "vllm_thunder.outcome": "ok",
    }
    assert span.status.status_code is StatusCode.UNSET
    seconds = (span.end_time - span.start_time) / 1e9
    assert done.total_seconds <= seconds < done.total_seconds + 0.5


async def test_a_call_without_program_and_id_has_an_id_all_the_same():
    async with traced() as (front, spans):
        await front.add(FakeEngine())
        await front.ask(asking(body={}))
        await front.ask(asking())
        unlabelled, labelled = front.done
        assert unlabelled.turn_id is None
        assert labelled.request_id == labelled.turn_id
    assert "vllm_thunder.program_id" not in spans[0].attributes
    ids = [span.attributes["gen_ai.request.id"] for span in spans]
    assert ids == [unlabelled.request_id, labelled.request_id]
    assert len(set(ids)) == 2


async def test_a_streams_span_ends_with_the_stream():
    async with traced() as (front, spans):
        await front.add(FakeEngine(chunked(b"data: 1\n\n", b"data: 2\n\n", delay=0.15)))
        assert (await front.ask(asking(body=STREAM))).body == b"data: 1\n\ndata: 2\n\n"
    (span,) = spans
    seconds = (span.end_time - span.start_time) / 1e9
    first = span.attributes["vllm_thunder.first_byte_seconds"]
    assert 0.14 < first < seconds - 0.14
    assert span.attributes["vllm_thunder.outcome"] == "ok"


async def test_a_held_turns_wait_is_told():
    async with traced() as (front, spans):
        backend = await front.add(FakeEngine())
        front.report(backend, 1)
        asked = asyncio.create_task(front.ask(asking()))
        await front.until(lambda: front.fleet.queue.held_turns)
        await asyncio.sleep(0.1)
        front.report(backend, 1000)
        assert (await asked).status == 200
    assert 0.09 < spans[0].attributes["gen_ai.latency.time_in_queue"] < 5


async def test_a_turn_that_is_sent_again_has_one_span():
    async with traced() as (front, spans):
        first, second = FakeEngine(reset), FakeEngine(whole(b'"fine"'))
        front.report(await front.add(first), 5000)
        await front.add(second)
        first.alive = False
        assert (await front.ask(asking(b"traceparent: " + GIVEN))).body == b'"fine"'
        parents = [engine.requests[0].values(b"traceparent") for engine in (first, second)]
    (span,) = spans
    assert parents == [[traceparent_of(span)]] * 2
    assert span.attributes["vllm_thunder.attempts"] == 2
    assert span.attributes["vllm_thunder.engine"] == "e1"
    assert span.status.status_code is StatusCode.UNSET


ANSWERS_THAT_FAIL = {
    "cut": (
        raw(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf", lambda w: w.reset()),
        LABELLED,
    ),
    "stream cut": (chunked(b"data: 1\n\n", end=lambda wire: wire.reset()), STREAM),
    "error": (whole(b"{}", b"500 Internal Server Error"), LABELLED),
}
FAILURES = {"cut": "engine_lost", "stream cut": "engine_lost", "error": "500"}


@pytest.mark.parametrize("how", ANSWERS_THAT_FAIL)
async def test_what_an_engine_fails_is_an_error(how):
    answer, body = ANSWERS_THAT_FAIL[how]
    async with traced() as (front, spans):
        await front.add(FakeEngine(answer))
        client = await Client.to(front.port)
        client.send(asking(body=body))
        await client.answer()
        client.leave()
        await front.until(lambda: front.done)
    (span,) = spans
    assert span.status.status_code is StatusCode.ERROR
    assert span.attributes["error.type"] == FAILURES[how]


@pytest.mark.parametrize("streams", [False, True], ids=["before a byte", "in a stream"])
async def test_a_client_that_leaves_is_no_error(streams):
    async def answer(request, wire):
        if streams:
            await wire.send(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf")
        await hang(request, wire)

    async with traced() as (front, spans):
        engine = FakeEngine(answer)
        await front.add(engine)
        client = await Client.to(front.port)
        client.send(asking())
        await (client.head() if streams else front.until(lambda: engine.requests))
        client.leave()
        await front.until(lambda: front.done)
    (span,) = spans
    assert span.attributes["vllm_thunder.outcome"] == "client_gone"
    assert span.attributes["vllm_thunder.attempts"] == 1
    assert span.status.status_code is StatusCode.UNSET


async def test_a_client_that_leaves_while_it_is_held_was_sent_nowhere():
    async with traced() as (front, spans):
        front.report(await front.add(FakeEngine()), 0)
        client = await Client.to(front.port)
        client.send(asking())
        await front.until(lambda: front.fleet.queue.held_turns)
        client.leave()
        await front.until(lambda: front.done)
    (span,) = spans
    assert span.attributes["vllm_thunder.outcome"] == "client_gone"
    assert span.attributes["vllm_thunder.attempts"] == 0
    assert "vllm_thunder.engine" not in span.attributes
    assert "http.response.status_code" not in span.attributes


@pytest.mark.parametrize("status", [400, 413, 429, 503])
async def test_a_refused_call_has_a_span_too(status):
    async with traced(max_body_bytes=1000, max_held_turns=1) as (front, spans):
        body = LABELLED
        if status != 503:
            backend = await front.add(FakeEngine())
            front.report(backend, 0)
        if status == 429:
            held = asyncio.create_task(front.ask(asking()))
            await front.until(lambda: front.fleet.queue.held_turns == 1)
            body = {**LABELLED, "program_id": "q"}
        elif status == 400:
            body = {"program_id": [1]}
        elif status == 413:
            body = {"padding": "x" * 1000}
        elif status == 503:
            body = {}
        assert (await front.ask(asking(b"traceparent: " + GIVEN, body=body))).status == status
        if status == 429:
            front.report(backend, 1000)
            await held
    span = spans[0]
    assert format_span_id(span.parent.span_id).encode() == PARENT
    assert span.attributes["vllm_thunder.outcome"] == "refused"
    assert span.attributes["http.response.status_code"] == status
    # A client's fault is no error of a server, by OpenTelemetry's conventions.
    assert (span.status.status_code is StatusCode.ERROR) is (status == 503)


async def test_a_stream_that_is_refused_after_it_began_is_an_error():
    async def loses(request, wire):
        await asyncio.sleep(0.05)
        wire.reset()

    async with traced(keepalive_seconds=0.02) as (front, spans):
        await front.add(FakeEngine(loses))
        answer = await front.ask(asking(body=STREAM))
        assert answer.status == 200
        assert b"lost this request 3 times" in answer.body
    (span,) = spans
    assert span.attributes["vllm_thunder.attempts"] == 3
    assert span.attributes["error.type"] == "refused"
    assert span.status.status_code is StatusCode.ERROR
