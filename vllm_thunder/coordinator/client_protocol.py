"""uvicorn's HTTP/1.1 with what it lacks for clients that nobody knows yet."""

from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from vllm_thunder.coordinator.proxy.answers import refusal

__all__ = ["MAX_HEAD_BYTES", "ClientProtocol"]

#: Of a request's target, its headers and its trailers: a few ids of the longest kind.
MAX_HEAD_BYTES = 256 * 1024
#: What a header counts for beside its name and value (RFC 9113 §6.5.2): it is an object here.
_HEADER_BYTES = 32
#: Requests that may wait for the answer before theirs while the connection is still read. Only
#: then it is seen that a client has left.
_MOST_PIPELINED = 8


class _HeadTooLarge(Exception):
    """More than :data:`MAX_HEAD_BYTES`."""


class ClientProtocol(HttpToolsProtocol):
    """One connection of a client.

    A head is bounded before anybody asks for a key, and when the client leaves all its requests
    end, not only the last one that it sent.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._head_bytes = 0
        #: Fed to the parser since it last told anything: what it keeps for itself.
        self._kept_bytes = 0
        self._told = False
        #: Requests without a whole answer, and the one whose body is being read.
        self._cycles: list[RequestResponseCycle] = []
        self._own: RequestResponseCycle | None = None

    def connection_lost(self, exc: Exception | None) -> None:
        self.pipeline.clear()
        for cycle in self._cycles:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._told = False
        super().data_received(data)
        self._kept_bytes = 0 if self._told else self._kept_bytes + len(data)
        if self._kept_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse_head()

    def send_400_response(self, msg: str) -> None:
        if self._head_bytes > MAX_HEAD_BYTES:
            self._refuse_head()
        elif self._may_answer():
            super().send_400_response(msg)
        else:
            self.transport.close()

    def on_message_begin(self) -> None:
        self._told = True
        self._head_bytes = 0
        self._own = None
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._grow(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._grow(len(name) + len(value) + _HEADER_BYTES)
        if self._own is None:  # else it is a trailer, which is no header
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._told = True
        before = self.cycle
        super().on_headers_complete()
        if self.cycle is before:
            return  # it wants to be a websocket
        self._own = self.cycle
        self._cycles = [each for each in self._cycles if not each.response_complete]
        self._cycles.append(self.cycle)
        if 0 < len(self.pipeline) <= _MOST_PIPELINED:
            self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        self._told = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._told = True
        self._own = None
        super().on_message_complete()

    def _grow(self, size: int) -> None:
        self._told = True
        self._head_bytes += size
        if self._head_bytes > MAX_HEAD_BYTES:
            raise _HeadTooLarge

    def _may_answer(self) -> bool:
        """Whether an error would be taken for the answer of the request that is being read."""
        return all(
            each.response_complete or (each is self._own and not each.response_started)
            for each in self._cycles
        )

    def _refuse_head(self) -> None:
        if self._may_answer():
            text = f"the request's head has more than {MAX_HEAD_BYTES} bytes, the limit"
            headers, body = refusal("", 431, text)
            lines = [b"%b: %b\r\n" % header for header in headers]
            start = b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
            self.transport.write(b"".join([start, *lines, b"connection: close\r\n\r\n", body]))
        self.transport.close()
