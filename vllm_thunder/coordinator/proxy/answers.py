"""Answers of the coordinator's own, in the shape that vLLM uses on each endpoint."""

from http import HTTPStatus
from typing import Any

import msgspec

from vllm_thunder.coordinator.proxy.heads import Headers

__all__ = [
    "STREAM_HEADERS",
    "STREAM_PATHS",
    "error_event",
    "event_of_answer",
    "event_of_error",
    "refusal",
]

#: Endpoints that answer ``stream: true`` in a JSON body with server-sent events; ``/generate`` is
#: SGLang's.
STREAM_PATHS = frozenset(
    {
        "/cohere/v2/chat",
        "/generate",
        "/inference/v1/generate",
        "/invocations",
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/messages",
        "/v1/responses",
    }
)

#: The headers of such an answer.
STREAM_HEADERS: Headers = [(b"content-type", b"text/event-stream; charset=utf-8")]

_DONE = b"data: [DONE]\n\n"
#: Their streams end without it.
_WITHOUT_DONE = ("/v1/messages", "/v1/responses")


def refusal(
    path: str, status: int, message: str, field: str | None = None
) -> tuple[Headers, bytes]:
    """Headers and body of an error: OpenAI's shape, Anthropic's under ``/v1/messages``, Cohere's
    under ``/cohere``. ``field`` is the request field that is wrong."""
    error: dict[str, Any] = {"message": message, "type": _type_of(status)}
    if path.startswith("/v1/messages"):
        shape: dict[str, Any] = {"type": "error", "error": error}
    elif path.startswith("/cohere/"):
        shape = {"message": message}
    else:
        shape = {"error": {**error, "param": field, "code": status}}
    body = msgspec.json.encode(shape)
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
    ]
    if status in (429, 503):
        headers.append((b"retry-after", b"1"))
    return headers, body


def error_event(path: str, status: int, message: str) -> bytes:
    """The end of a stream that an error ends: the event that says so, and what follows it."""
    error = {"message": message, "type": _type_of(status), "param": None, "code": status}
    return _event(path, error)


def event_of_answer(path: str, body: bytes) -> bytes:
    """The end of a stream that had begun when an engine answered all at once: the answer as it is,
    and what follows it."""
    lines = b"".join(b"data: %b\n" % line for line in body.splitlines() or [b""])
    return lines + b"\n" + (b"" if path.startswith(_WITHOUT_DONE) else _DONE)


def event_of_error(path: str, status: int, body: bytes) -> bytes:
    """The same as :func:`error_event` for an error that an engine answered with."""
    try:
        told = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        told = None
    inner = told.get("error") if isinstance(told, dict) else None
    if isinstance(inner, dict):
        error = inner
    elif isinstance(told, dict) and isinstance(told.get("message"), str):
        error = {"message": told["message"]}
    elif isinstance(inner, str):
        error = {"message": inner}
    else:
        text = body.decode("utf-8", "replace").strip()
        error = {"message": text or f"the engine answered with status {status}"}
    return _event(path, {"type": "InternalServerError", "param": None, "code": status, **error})


def _event(path: str, error: dict[str, Any]) -> bytes:
    message = error.get("message")
    if path.startswith("/v1/messages"):
        named = {"type": error["type"], "message": message}
        return b"event: error\ndata: %b\n\n" % _json({"type": "error", "error": named})
    if path.startswith("/v1/responses"):
        # How many events there were is not known here.
        code = str(error["code"])
        shape = {"type": "error", "code": code, "message": message, "param": error["param"]}
        return b"event: error\ndata: %b\n\n" % _json({**shape, "sequence_number": 0})
    if path.startswith("/cohere/"):
        end = {"type": "message-end", "delta": {"error": message, "finish_reason": "ERROR"}}
        return b"data: %b\n\n%b" % (_json(end), _DONE)
    return b"data: %b\n\n%b" % (_json({"error": error}), _DONE)


def _type_of(status: int) -> str:
    if status == 413:  # Python's name of it depends on its version
        return "ContentTooLargeError"
    name = "".join(HTTPStatus(status).phrase.split())
    return name if name.endswith("Error") else name + "Error"


def _json(value: Any) -> bytes:
    return msgspec.json.encode(value)
