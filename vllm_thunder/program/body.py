"""Makes a labelled request body one that vLLM's own models accept, changing nothing else."""

import json
from typing import Any

import msgspec

from vllm_thunder.program.identity import BODY_NAMES, RoutingFields

__all__ = ["acceptable_body"]

_Members = dict[str, msgspec.Raw]

#: Names of ours inside ``vllm_xargs``, whose values vLLM wants to be text, numbers or lists.
_EXTRA_NAMES = BODY_NAMES | {"agentic_context"}


def acceptable_body(body: bytes, fields: RoutingFields) -> bytes:
    """``body`` itself, or ``body`` with the values that vLLM would answer with 400 replaced.

    An integer ``session_id`` becomes its decimal string. Names of ours in ``vllm_xargs`` whose
    value is an object or null are removed. Every other member keeps its bytes: numbers, escapes,
    unicode, order. Space between members goes, and of a name given twice only the last value
    stays, which is the one that vLLM reads. ``fields`` are what was decoded from ``body``, with
    ids already found valid.
    """
    replace_session = isinstance(fields.session_id, int)
    extra = fields.vllm_xargs if isinstance(fields.vllm_xargs, dict) else {}
    refused = {
        name for name in _EXTRA_NAMES if name in extra and isinstance(extra[name], dict | None)
    }
    if not replace_session and not refused:
        return body
    try:
        return _replace(body, fields.session_id if replace_session else None, refused)
    except (msgspec.DecodeError, RecursionError):
        return _replace_leniently(body, fields.session_id if replace_session else None, refused)


def _replace(body: bytes, session_id: int | None, refused: set[str]) -> bytes:
    members = msgspec.json.decode(body, type=_Members)
    if session_id is not None:
        members["session_id"] = msgspec.Raw(msgspec.json.encode(str(session_id)))
    if refused:
        extra = msgspec.json.decode(members["vllm_xargs"], type=_Members)
        kept = {name: value for name, value in extra.items() if name not in refused}
        members["vllm_xargs"] = msgspec.Raw(msgspec.json.encode(kept))
    return msgspec.json.encode(members)


def _replace_leniently(body: bytes, session_id: int | None, refused: set[str]) -> bytes:
    """For what only Python's ``json`` reads (NaN, lone surrogates, UTF-16): it is also what vLLM
    reads the result with, and it reads back exactly what it wrote."""
    members: dict[str, Any] = json.loads(body)
    if session_id is not None:
        members["session_id"] = str(session_id)
    for name in refused:
        del members["vllm_xargs"][name]
    return json.dumps(members).encode()
