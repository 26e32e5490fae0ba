"""The whole body of a request that may have to be sent more than once."""

from starlette.types import Receive, Scope

from vllm_thunder.coordinator.proxy.heads import value_of
from vllm_thunder.program.errors import ThunderError

__all__ = ["BodyTooLarge", "body_within", "has_other_coding"]


class BodyTooLarge(ThunderError):
    """A request body is larger than what is read of one (HTTP 413). ``limit``: of what it has more,
    with the unit."""

    def __init__(self, limit: str):
        super().__init__(f"the request body has more than {limit}, the limit")


async def body_within(limit: int, scope: Scope, receive: Receive) -> bytes | None:
    """The body, of at most ``limit`` bytes; None when the client left before its end. Raises
    BodyTooLarge, unread where its length is declared."""
    declared = value_of(scope["headers"], b"content-length")
    if declared.isdigit() and int(declared) > limit:
        raise BodyTooLarge(f"{limit} bytes")
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        chunk = message.get("body", b"")
        chunks.append(chunk)
        size += len(chunk)
        if size > limit:
            raise BodyTooLarge(f"{limit} bytes")
        if not message.get("more_body", False):
            return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def has_other_coding(scope: Scope) -> bool:
    """Whether the body has a transfer coding beside chunks: those are undone by the server, and no
    other is passed on (RFC 9112 §6.1: a 501)."""
    codings = [value for name, value in scope["headers"] if name == b"transfer-encoding"]
    return b",".join(codings).strip(b" \t").lower() not in (b"", b"chunked")
