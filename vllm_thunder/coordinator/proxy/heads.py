"""The heads of forwarded messages: what a proxy has to change in them (RFC 9110 §7.6.1), and no
more."""

import re
from collections.abc import Iterable

from starlette.types import Scope

from vllm_thunder.coordinator.proxy.location import location_for_client
from vllm_thunder.coordinator.proxy.pool import Origin
from vllm_thunder.program.endpoints import REPLICA_HEADER, WAITED_HEADER

__all__ = [
    "TRACEPARENT",
    "TRACESTATE",
    "Headers",
    "RequestHead",
    "answer_headers",
    "request_id_of",
    "trace_id_of",
    "value_of",
]

#: Names and values, repeated names and all.
Headers = list[tuple[bytes, bytes]]

#: They are about one connection, not about the message.
_HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authentication-info",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)

#: W3C Trace Context.
TRACEPARENT = b"traceparent"
TRACESTATE = b"tracestate"
_TRACE_ID = re.compile(rb"00-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")

_WAITED = WAITED_HEADER.encode()
_REPLICA = REPLICA_HEADER.encode()
_RANK = b"x-data-parallel-rank"
_LOCATION = b"location"

#: Of a request: what is written anew. Who asks for ``100-continue`` was answered here.
_WRITTEN_ANEW = _HOP_BY_HOP | {b"host", b"content-length", b"expect", _WAITED, _REPLICA}


class RequestHead:
    """The head of one request, for whichever engine it goes to.

    The raw path and the query keep their bytes; headers keep bytes, order and repetitions. What is
    about the connection is not in ``headers``. ``engine_key`` takes the place of the client's own
    ``Authorization``, which was checked. ``passed_on_by``: the URL of this replica, where the
    request goes to another one.
    """

    __slots__ = ("headers", "method", "target")

    def __init__(
        self, scope: Scope, engine_key: str | None = None, passed_on_by: str | None = None
    ):
        self.method: str = scope["method"]
        self.target = _target(scope)
        dropped = _WRITTEN_ANEW | _named_by_connection(scope["headers"])
        if engine_key is not None:
            dropped |= {b"authorization"}
        self.headers: Headers = [item for item in scope["headers"] if item[0] not in dropped]
        if engine_key is not None and self.method != "OPTIONS":  # that wants none, and has none
            self.headers.append((b"authorization", b"Bearer " + engine_key.encode()))
        if passed_on_by is not None:
            self.headers.append((_REPLICA, passed_on_by.encode()))

    def without_content_coding(self) -> None:
        """The body is sent as it was before its content coding."""
        self.headers = [item for item in self.headers if item[0] != b"content-encoding"]

    def in_trace(self, headers: Headers) -> None:
        """``headers`` take the place of the client's own trace headers."""
        ours = (TRACEPARENT, TRACESTATE)
        self.headers = [item for item in self.headers if item[0] not in ours] + headers

    def bytes_for(
        self, origin: Origin, *, rank: int | None, waited: float, length: int | None
    ) -> bytes:
        """The head as bytes. ``rank``: the data-parallel rank that has to take it. ``waited``:
        seconds for which the turn was held. ``length`` of the body in bytes, 0 where there is
        none; None: it comes in chunks."""
        parts = [
            self.method.encode(),
            b" ",
            origin.prefix,
            self.target,
            b" HTTP/1.1\r\nhost: ",
            origin.host_header,
            b"\r\n",
        ]
        for name, value in self.headers:
            if rank is None or name != _RANK:
                parts += (name, b": ", value, b"\r\n")
        if length is None:
            parts.append(b"transfer-encoding: chunked\r\n")
        elif length or self.method in ("POST", "PUT", "PATCH"):
            parts.append(b"content-length: %d\r\n" % length)
        if rank is not None:
            parts.append(b"%b: %d\r\n" % (_RANK, rank))
        if abs(waited) >= 0.001:  # to be placed takes a moment, which is no wait
            parts.append(b"%b: %.3f\r\n" % (_WAITED, waited))
        parts.append(b"\r\n")
        return b"".join(parts)


def answer_headers(headers: Headers, origin: Origin, root: str) -> Headers:
    """The headers of an answer from ``origin`` as the client gets them; lower-case names. ``root``
    as of :func:`~vllm_thunder.coordinator.proxy.location.location_for_client`."""
    lowered = [(name.lower(), value) for name, value in headers]
    dropped = _HOP_BY_HOP | _named_by_connection(lowered)
    return [
        (name, location_for_client(value, origin, root) if name == _LOCATION else value)
        for name, value in lowered
        if name not in dropped
    ]


def value_of(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> bytes:
    """The first value of a header by its lower-case name, b"" where there is none."""
    return next((value for key, value in headers if key == name), b"")


def request_id_of(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """The id that a client gave its request."""
    return value_of(headers, b"x-request-id").decode("latin-1") or None


def trace_id_of(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """The trace that a request says it is part of, in 32 hexadecimal digits."""
    match = _TRACE_ID.fullmatch(value_of(headers, TRACEPARENT))
    return None if match is None else match[1].decode()


def _named_by_connection(headers: Iterable[tuple[bytes, bytes]]) -> frozenset[bytes]:
    """Header names that ``Connection`` declares to be about the connection."""
    listed = [value for name, value in headers if name == b"connection"]
    if not listed or listed == [b"keep-alive"] or listed == [b"close"]:
        return frozenset()
    return frozenset(token.strip().lower() for value in listed for token in value.split(b","))


def _target(scope: Scope) -> bytes:
    raw: bytes = scope["raw_path"]
    root: bytes = scope.get("root_path", "").rstrip("/").encode()
    if root and raw.startswith(root):
        raw = raw[len(root) :]  # the server put it there
    query: bytes = scope["query_string"]
    return raw + b"?" + query if query else raw
