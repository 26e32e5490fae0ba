"""An OTLP collector on loopback that keeps what it gets, by HTTP and by gRPC."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)


class Collector(TraceServiceServicer):
    """``endpoint``: for ``--otlp-traces-endpoint``. ``requests``: what came, decoded."""

    def __init__(self) -> None:
        self.endpoint = ""
        self.requests: list[ExportTraceServiceRequest] = []

    @property
    def spans(self) -> list[Any]:
        scopes = [s for r in self.requests for told in r.resource_spans for s in told.scope_spans]
        return [span for scope in scopes for span in scope.spans]

    @property
    def resource(self) -> dict[str, str]:
        """Attributes of the process that the first spans are of."""
        told = self.requests[0].resource_spans[0].resource.attributes
        return {item.key: item.value.string_value for item in told}

    def Export(self, request: Any, context: Any) -> ExportTraceServiceResponse:
        """gRPC calls it."""
        self.requests.append(request)
        return ExportTraceServiceResponse()


@contextmanager
def running_collector(protocol: str) -> Iterator[Collector]:
    """``protocol``: as in ``OTEL_EXPORTER_OTLP_TRACES_PROTOCOL``."""
    collector = Collector()
    if protocol == "grpc":
        with ThreadPoolExecutor() as threads:
            server = grpc.server(threads)
            add_TraceServiceServicer_to_server(collector, server)
            collector.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
            server.start()
            yield collector
            server.stop(None).wait()
        return

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            body = self.rfile.read(int(self.headers["content-length"]))
            collector.requests.append(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            """It says nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        collector.endpoint = f"http://127.0.0.1:{http.server_address[1]}/v1/traces"
        yield collector
        http.shutdown()
