"""Content codings undone, in steps that are bounded whatever comes."""

import zlib

from vllm_thunder.coordinator.proxy.request_body import BodyTooLarge

__all__ = ["gunzipped"]

#: zlib's window bits for gzip data, one member of it.
_GZIP = 31
#: Bytes that are unpacked at once: what is left of them behind a member is copied.
_SLICE = 64 * 1024
#: Each member takes time and memory to begin, and 20 bytes are one that unpacks to nothing.
_MOST_MEMBERS = 1000


def gunzipped(body: bytes, limit: int) -> bytes:
    """What ``body`` unpacks to; itself if it does not: no engine can read it either. Raises
    BodyTooLarge for more than ``limit`` bytes, or too many members."""
    packed = memoryview(body)
    parts: list[bytes] = []
    size = at = members = 0
    member = None
    try:
        while at < len(packed):
            if member is None:
                members += 1
                if members > _MOST_MEMBERS:
                    raise BodyTooLarge(f"{_MOST_MEMBERS} gzip members")
                member = zlib.decompressobj(_GZIP)
            piece = packed[at : at + _SLICE]
            parts.append(member.decompress(piece, limit + 1 - size))
            size += len(parts[-1])
            if size > limit:
                raise BodyTooLarge(f"{limit} bytes")
            at += len(piece) - len(member.unused_data)
            if member.eof:
                member = None
    except zlib.error:
        return body
    return b"".join(parts)
