"""One OpenTelemetry span for each model call, exported by OTLP.

Nothing else imports opentelemetry, and this is imported only where there is somewhere to export to.
What OpenTelemetry reads from the environment holds here as it does in vLLM: the sampler
(``OTEL_TRACES_SAMPLER``), the protocol (``OTEL_EXPORTER_OTLP_TRACES_PROTOCOL``, ``grpc`` unless it
says otherwise), batches, headers and timeouts of the export.
"""

import asyncio
import logging
import os
import threading
from contextlib import suppress
from time import time_ns
from urllib.parse import urlsplit

from opentelemetry.context import Context
from opentelemetry.sdk.environment_variables import OTEL_EXPORTER_OTLP_TRACES_PROTOCOL
from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span, SpanKind, StatusCode, format_trace_id, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from vllm_thunder.coordinator.proxy.exchange import Exchange, Outcome
from vllm_thunder.coordinator.proxy.heads import TRACEPARENT, TRACESTATE, Headers
from vllm_thunder.program.errors import ConfigError
from vllm_thunder.version import __version__

__all__ = ["CallSpan", "Tracing", "exporter_to"]

logger = logging.getLogger(__name__)

#: vLLM's name for the span of a request.
_SPAN_NAME = "llm_request"

#: Seconds for which spans that are not exported yet may hold up the end of the process.
_CLOSE_SECONDS = 3.0

_W3C = TraceContextTextMapPropagator()


class Tracing:
    """Makes the spans and gives them to ``exporter``, in a thread of its own.

    What cannot be exported is kept up to a bound, then dropped (``OTEL_BSP_MAX_QUEUE_SIZE``), and
    said in the log; no call waits for it.
    """

    def __init__(self, exporter: SpanExporter):
        named = Resource.create({SERVICE_NAME: "vllm_thunder coordinate"})
        self._exporter = exporter
        self._provider = TracerProvider(
            # Names that the environment gives come first.
            resource=named.merge(OTELResourceDetector().detect()),
            shutdown_on_exit=False,  # that may take 30 s
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("vllm_thunder.coordinator", __version__)

    def begin(self, headers: Headers) -> "CallSpan":
        """The span of a call that has just come, with its headers (lower-case names)."""
        return CallSpan(
            self._tracer.start_span(
                _SPAN_NAME, _parent_in(headers), SpanKind.SERVER, start_time=time_ns()
            )
        )

    async def close(self) -> None:
        """Export what there is, for a few seconds at most; the rest is lost."""
        loop = asyncio.get_running_loop()
        closed = asyncio.Event()

        def shut_down() -> None:
            self._provider.shutdown()
            with suppress(RuntimeError):  # nobody waits any more, the loop is closed
                loop.call_soon_threadsafe(closed.set)

        # Not one of the loop's executor: the loop would wait for it to the end.
        threading.Thread(target=shut_down, daemon=True).start()
        try:
            async with asyncio.timeout(_CLOSE_SECONDS):
                await closed.wait()
        except TimeoutError:
            logger.warning(
                "The spans of the last calls could not be exported within %g s", _CLOSE_SECONDS
            )
            # It tries no more, where it is between two tries.
            threading.Thread(target=self._exporter.shutdown, daemon=True).start()


class CallSpan:
    """The span of one model call; :meth:`end` has to be called once.

    ``headers``: what an engine gets in place of the client's trace headers, so that its own span is
    a child of this one; empty where OpenTelemetry is switched off (``OTEL_SDK_DISABLED``) and the
    client's are passed on. ``trace_id``: 32 hexadecimal digits; None: there is no trace.
    """

    __slots__ = ("_span", "headers", "trace_id")

    def __init__(self, span: Span):
        self._span = span
        carrier: dict[str, str] = {}
        _W3C.inject(carrier, set_span_in_context(span, Context()))
        self.headers: Headers = [(name.encode(), text.encode()) for name, text in carrier.items()]
        context = span.get_span_context()
        self.trace_id = format_trace_id(context.trace_id) if context.is_valid else None

    def end(self, exchange: Exchange) -> None:
        """The call is over."""
        span = self._span
        if span.is_recording():
            span.set_attributes(_attributes(exchange))
            error = _error_of(exchange)
            if error is not None:
                span.set_attribute("error.type", error)
                span.set_status(StatusCode.ERROR)
        span.end()


def exporter_to(endpoint: str) -> SpanExporter:
    """An exporter to an OTLP endpoint: ``http://host:4317`` for gRPC, the whole URL
    (``http://host:4318/v1/traces``) for HTTP. Raises ConfigError."""
    protocol = os.environ.get(OTEL_EXPORTER_OTLP_TRACES_PROTOCOL, "grpc")
    try:
        url = urlsplit(endpoint)
        usable = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise ConfigError(
            f"--otlp-traces-endpoint: {endpoint!r} is not a URL that begins with http:// or "
            "https:// and names a host, and a port from 1 to 65535 if any"
        )
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import (
            OTLPSpanExporter as GrpcExporter,
        )

        return GrpcExporter(endpoint=endpoint, insecure=url.scheme == "http")
    if protocol == "http/protobuf":
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import (
            OTLPSpanExporter as HttpExporter,
        )

        return HttpExporter(endpoint=endpoint)
    raise ConfigError(
        f"{OTEL_EXPORTER_OTLP_TRACES_PROTOCOL}: {protocol!r} is neither grpc nor http/protobuf"
    )


def _parent_in(headers: Headers) -> Context:
    """What the client's trace headers say; a new trace where they are missing, malformed or
    repeated, without the ``tracestate`` of the old one (W3C Trace Context, 4.3)."""
    parents = [value.decode("latin-1") for name, value in headers if name == TRACEPARENT]
    if len(parents) != 1:
        return Context()
    states = [value.decode("latin-1") for name, value in headers if name == TRACESTATE]
    return _W3C.extract({TRACEPARENT.decode(): parents, TRACESTATE.decode(): states}, Context())


def _attributes(exchange: Exchange) -> dict[str, str | int | float]:
    """By vLLM's names and those of OpenTelemetry's conventions where there are any."""
    told = {
        "gen_ai.request.id": exchange.request_id,
        "gen_ai.latency.time_in_queue": exchange.queue_seconds,
        "gen_ai.latency.e2e": exchange.total_seconds,
        "url.path": exchange.path,
        "http.response.status_code": exchange.status or None,
        "vllm_thunder.program_id": exchange.program_id,
        "vllm_thunder.engine": exchange.backend_id,
        "vllm_thunder.attempts": exchange.attempts,
        "vllm_thunder.first_byte_seconds": exchange.first_byte_seconds,
        "vllm_thunder.outcome": str(exchange.outcome),
    }
    return {name: value for name, value in told.items() if value is not None}


def _error_of(exchange: Exchange) -> str | None:
    """What failed, as OpenTelemetry counts failures of a server; a client's fault is none."""
    if exchange.status >= 500:
        return str(exchange.status)
    refused_in_stream = exchange.outcome is Outcome.REFUSED and exchange.status < 400
    if exchange.outcome is Outcome.ENGINE_LOST or refused_in_stream:
        return str(exchange.outcome)
    return None
