"""What the ASGI applications of engine and coordinator have in common: reading a model call."""

import uuid
from collections import deque
from collections.abc import Iterable

from starlette.convertors import Convertor, register_url_convertor
from starlette.types import Message, Receive, Scope

from vllm_thunder.program.identity import HEADER_NAMES

__all__ = [
    "ANY_TEXT",
    "has_json_body",
    "identity_headers",
    "new_turn_id",
    "path_of",
    "read_body",
    "replay",
    "whole_body",
]


class _AnyText(Convertor[str]):
    """Like Starlette's ``path``, which stops at a newline: routes say ``{name:any_text}``."""

    regex = r"(?s:.*)"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


#: The name of that convertor in a route.
ANY_TEXT = "any_text"
register_url_convertor(ANY_TEXT, _AnyText())

_WANTED_HEADERS = frozenset(name.encode() for name in HEADER_NAMES)


def new_turn_id() -> str:
    """An id that no other turn has."""
    return uuid.uuid4().hex


def path_of(scope: Scope) -> str:
    """The path without the server's root path, as Starlette routes it."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "").rstrip("/")
    if root and (path == root or path.startswith(root + "/")):
        return path[len(root) :]
    return path


def identity_headers(scope: Scope) -> dict[str, str]:
    """The headers that can name a program; of a repeated one the first, as vLLM reads them."""
    headers: dict[str, str] = {}
    for name, value in scope["headers"]:
        if name in _WANTED_HEADERS:
            headers.setdefault(name.decode(), value.decode("latin-1"))
    return headers


def has_json_body(scope: Scope) -> bool:
    """Whether the request says that its body is JSON."""
    for name, value in scope["headers"]:
        if name == b"content-type":
            media_type = value.decode("latin-1").split(";")[0].strip().lower()
            return media_type == "application/json" or media_type.endswith("+json")
    return False


async def read_body(receive: Receive) -> tuple[list[Message], bytes | None]:
    """The request's messages up to the end of its body, and the body; None when the client
    disconnected before that."""
    messages, chunks = [], []
    while True:
        message = await receive()
        if message["type"] != "http.request":
            messages.append(message)
            return messages, None
        messages.append(message)
        chunks.append(message.get("body", b""))
        if not message.get("more_body", False):
            break
    body = chunks[0] if len(chunks) == 1 else b"".join(chunks)
    return [whole_body(body)], body


def whole_body(body: bytes) -> Message:
    """The message of a request whose body this is."""
    return {"type": "http.request", "body": body, "more_body": False}


def replay(messages: Iterable[Message], receive: Receive) -> Receive:
    """Receives ``messages`` first, then whatever comes, such as the client's disconnect."""
    pending = deque(messages)

    async def replayed() -> Message:
        return pending.popleft() if pending else await receive()

    return replayed
