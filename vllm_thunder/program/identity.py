"""Which program a model call belongs to, read from the request that a client sent.

A name is looked up in four places of the JSON body, in this order:

    <name>    vllm_xargs.<name>    agentic_context.<name>    vllm_xargs.agentic_context.<name>

The first of these that is present is the program's id:

    1. ``program_id`` in the body                  5. header ``X-Session-ID``
    2. header ``X-Program-ID``                     6. header ``X-Dynamo-Session-ID``
    3. ``session_id`` in the body                  7. header ``x-claude-code-session-id``
    4. ``job_id`` in the body                      8. header ``thread-id``
    9. ``root_program_id`` in the body (an ``agentic_context`` without ``program_id``)
    10. ``extra_body.program_id``: a client that sends the SDK's argument as a member
    11. ``nvext.agent_context.session_id``, which Dynamo's clients send

What else a request may tell about its turn (body, same four places, unless noted):

    ``is_last_step``, else header ``X-Dynamo-Session-Final``         :attr:`Turn.final`
    ``parent_program_id``, else header ``X-Dynamo-Parent-Session-ID``,
        else ``root_program_id``                                     :attr:`Turn.parent_id`
    header ``X-Vllm-Priority``, else ``priority`` (vLLM's own first) :attr:`Turn.priority`
    ``program_group``                                                :attr:`Turn.group`
    ``tool_name``                                                    :attr:`Turn.tool`
    ``kv_retention_ttl_seconds``                                     :attr:`Turn.retention_seconds`
    ``deadline_seconds``                                             :attr:`Turn.deadline_seconds`
    ``one_off``                                                      :attr:`Turn.one_off`
    header ``X-Program-Waited``, seconds                             :attr:`Turn.waited_seconds`

An id is a non-empty string of at most :data:`~vllm_thunder.program.values.MAX_ID_BYTES` UTF-8
bytes, or an integer, which stands for its decimal string. JSON null means absent, and so does an
empty header other than ``X-Program-ID``: clients and proxies send those for purposes of their own.
Every name that is present must be valid, also one that another name outranks; two names with
different values are no error. A request without an id is unlabelled, whatever else it tells.
Other members of ``agentic_context`` (``step_id``) are accepted and have no effect.
"""

import json
import re
from collections.abc import Callable, Mapping
from math import nan
from typing import Any

import msgspec

from vllm_thunder.program.endpoints import WAITED_HEADER
from vllm_thunder.program.errors import IdentityError
from vllm_thunder.program.turn import Turn
from vllm_thunder.program.values import (
    LONGEST_SECONDS,
    boolean_of,
    object_of,
    program_id_of,
    seconds_of,
)

__all__ = [
    "BODY_NAMES",
    "HEADER_NAMES",
    "RoutingFields",
    "decode_routing_fields",
    "resolve_turn",
]

#: Headers that give a program id, by rank after the body's ``program_id``.
_PROGRAM_HEADER = "x-program-id"
_SESSION_HEADERS = (
    "x-session-id",
    "x-dynamo-session-id",
    "x-claude-code-session-id",
    "thread-id",
)
_FINAL_HEADER = "x-dynamo-session-final"
_PARENT_HEADER = "x-dynamo-parent-session-id"
_PRIORITY_HEADER = "x-vllm-priority"

#: Every header that :func:`resolve_turn` reads, in lower case.
HEADER_NAMES = frozenset(
    {
        _PROGRAM_HEADER,
        *_SESSION_HEADERS,
        _FINAL_HEADER,
        _PARENT_HEADER,
        _PRIORITY_HEADER,
        WAITED_HEADER,
    }
)

#: Every name of ours that is looked up in the four places of a body.
BODY_NAMES = frozenset(
    {
        "program_id",
        "session_id",
        "job_id",
        "root_program_id",
        "parent_program_id",
        "program_group",
        "tool_name",
        "is_last_step",
        "kv_retention_ttl_seconds",
        "deadline_seconds",
        "one_off",
        "priority",
    }
)

#: Endpoints where one body is one engine request unless it asks for more.
_SINGLE_REQUEST_PATHS = frozenset(
    {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
        "/inference/v1/generate",
        "/cohere/v2/chat",
        "/generate",
    }
)

#: A JSON list whose first element is a number: one prompt given as token ids.
_TOKEN_IDS = re.compile(rb"\[\s*\d")

#: The range of vLLM's ``priority``.
_PRIORITY_RANGE = (-(2**63), 2**63 - 1)


class RoutingFields(msgspec.Struct):
    """The members of a request body that matter here; all others are skipped unread."""

    program_id: Any = None
    session_id: Any = None
    job_id: Any = None
    root_program_id: Any = None
    parent_program_id: Any = None
    program_group: Any = None
    tool_name: Any = None
    is_last_step: Any = None
    kv_retention_ttl_seconds: Any = None
    deadline_seconds: Any = None
    one_off: Any = None
    priority: Any = None
    agentic_context: Any = None
    vllm_xargs: Any = None
    extra_body: Any = None
    nvext: Any = None
    stream: Any = None
    n: Any = None
    best_of: Any = None
    use_beam_search: Any = None
    sampling_params: Any = None
    previous_response_id: Any = None
    #: Kept as JSON text: a prompt can hold a hundred thousand token ids.
    prompt: msgspec.Raw = msgspec.Raw()
    prompt_embeds: msgspec.Raw = msgspec.Raw()


_decoder = msgspec.json.Decoder(RoutingFields)


def decode_routing_fields(body: bytes) -> RoutingFields | None:
    """The routing fields of a JSON body; None when vLLM would not read it as a JSON object.

    Skipping the unknown members takes a small part of the time of vLLM's own parser (Python's
    ``json``), which is asked only where msgspec is stricter: UTF-16 and UTF-32, byte order
    marks, NaN, lone surrogates.
    """
    try:
        return _decoder.decode(body)
    except (msgspec.DecodeError, RecursionError):
        pass
    try:
        members = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(members, dict):
        return None
    known = {name: members[name] for name in RoutingFields.__struct_fields__ if name in members}
    for name in ("prompt", "prompt_embeds"):
        if name in known:
            known[name] = msgspec.Raw(json.dumps(known[name]).encode())
    return RoutingFields(**known)


def resolve_turn(
    headers: Mapping[str, str],
    body: RoutingFields | None,
    *,
    path: str,
    new_turn_id: Callable[[], str],
) -> Turn | None:
    """The turn that a request is, or None when it names no program.

    ``headers`` maps lower-case names to values as HTTP libraries give them (latin-1 text),
    ``path`` is the endpoint without the server's root path. ``new_turn_id`` is called once for
    a labelled request and must never return the same text twice.

    Raises IdentityError when a name is present with a value that is not allowed.
    """
    places = _places(body) if body is not None else []
    header_id = _header_id(headers, _PROGRAM_HEADER)
    session_ids = [_header_id(headers, name) for name in _SESSION_HEADERS]
    root_id = _body_id(places, "root_program_id")
    foreign_ids = _foreign_ids(body) if body is not None else []
    program_id = _first(
        _body_id(places, "program_id"),
        header_id,
        _body_id(places, "session_id"),
        _body_id(places, "job_id"),
        *session_ids,
        root_id,
        *foreign_ids,
    )
    if program_id is None:
        return None
    parent_id = _first(
        _body_id(places, "parent_program_id"), _header_id(headers, _PARENT_HEADER), root_id
    )
    return Turn(
        program_id=program_id,
        turn_id=new_turn_id(),
        parent_id=parent_id if parent_id != program_id else None,
        final=_final(places, headers),
        priority=_priority(places, headers),
        group=_body_id(places, "program_group"),
        tool=_body_id(places, "tool_name"),
        retention_seconds=_seconds(places, "kv_retention_ttl_seconds", zero=True),
        fans_out=_fans_out(path, body),
        deadline_seconds=_seconds(places, "deadline_seconds", zero=False),
        one_off=_boolean(places, "one_off") or False,
        waited_seconds=_waited(headers),
    )


def _places(body: RoutingFields) -> list[tuple[str, Mapping[str, Any]]]:
    """The four places, as (prefix for error messages, members)."""
    extra = _members(body.vllm_xargs)
    top = {name: getattr(body, name) for name in BODY_NAMES}
    return [
        ("", top),
        ("vllm_xargs.", extra),
        ("agentic_context.", _context(body.agentic_context, "agentic_context")),
        (
            "vllm_xargs.agentic_context.",
            _context(extra.get("agentic_context"), "vllm_xargs.agentic_context"),
        ),
    ]


def _context(value: Any, field: str) -> Mapping[str, Any]:
    return {} if value is None else object_of(value, field)


def _foreign_ids(body: RoutingFields) -> list[str | None]:
    """Ids in members that belong to others: what else these hold, and of what kind they are, is
    not for us to judge."""
    extra, nvext = _members(body.extra_body), _members(body.nvext)
    return [
        _body_id([("extra_body.", extra)], "program_id"),
        _body_id([("nvext.agent_context.", _members(nvext.get("agent_context")))], "session_id"),
    ]


def _members(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _first(*ids: str | None) -> str | None:
    return next((found for found in ids if found is not None), None)


def _present(places: list[tuple[str, Mapping[str, Any]]], name: str) -> list[tuple[str, Any]]:
    return [
        (prefix + name, members[name])
        for prefix, members in places
        if members.get(name) is not None
    ]


def _body_id(places: list[tuple[str, Mapping[str, Any]]], name: str) -> str | None:
    return _first(*[program_id_of(value, field) for field, value in _present(places, name)])


def _header_id(headers: Mapping[str, str], name: str) -> str | None:
    value = headers.get(name)
    if value is None or (not value and name != _PROGRAM_HEADER):
        return None
    return program_id_of(_utf8(value), f"header {name}")


def _utf8(value: str) -> str:
    """Header text read as latin-1, which clients nearly always mean as UTF-8."""
    try:
        return value.encode("latin-1").decode("utf-8")
    except UnicodeError:
        return value


def _final(places: list[tuple[str, Mapping[str, Any]]], headers: Mapping[str, str]) -> bool:
    told = _boolean(places, "is_last_step")
    header = headers.get(_FINAL_HEADER)
    final = boolean_of(header, f"header {_FINAL_HEADER}") if header else False
    return final if told is None else told


def _boolean(places: list[tuple[str, Mapping[str, Any]]], name: str) -> bool | None:
    told = [boolean_of(value, field) for field, value in _present(places, name)]
    return told[0] if told else None


def _priority(places: list[tuple[str, Mapping[str, Any]]], headers: Mapping[str, str]) -> int:
    low, high = _PRIORITY_RANGE
    told = []
    for field, value in _present(places, "priority"):
        usable = isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
        if usable:
            told.append(value)
        elif field != "priority":  # the body's own is vLLM's field: vLLM answers for it
            raise IdentityError(field, "must be an integer of 64 bits")
    try:
        header = int(headers[_PRIORITY_HEADER])
        if low <= header <= high:
            told.insert(0, header)
    except (KeyError, ValueError):
        pass  # vLLM ignores a priority header that is no integer
    return told[0] if told else 0


def _seconds(places: list[tuple[str, Mapping[str, Any]]], name: str, *, zero: bool) -> float | None:
    told = [seconds_of(value, field, zero=zero) for field, value in _present(places, name)]
    return told[0] if told else None


def _waited(headers: Mapping[str, str]) -> float:
    """Negative where the turn is to count as one that came later."""
    value = headers.get(WAITED_HEADER)
    if not value:
        return 0.0
    try:
        seconds = float(value)
    except ValueError:
        seconds = nan
    if not abs(seconds) <= LONGEST_SECONDS:  # not: NaN is in no range
        raise IdentityError(
            f"header {WAITED_HEADER}",
            f"must be a number of seconds from -{LONGEST_SECONDS} to {LONGEST_SECONDS}",
        )
    return seconds


def _fans_out(path: str, body: RoutingFields | None) -> bool:
    """Whether one HTTP request can become several engine requests.

    vLLM splits n > 1, beams, lists of prompts, and the inputs of its pooling, scoring, audio
    and batch endpoints.
    """
    if path not in _SINGLE_REQUEST_PATHS:
        return True
    if body is None:
        return False
    sampling = body.sampling_params if isinstance(body.sampling_params, dict) else {}
    return (
        any(_above_one(value) for value in (body.n, body.best_of, sampling.get("n")))
        or str(body.use_beam_search).lower() in ("true", "1", "1.0", "t", "yes", "y", "on")
        or (path == "/v1/completions" and _prompts(body.prompt) + _prompts(body.prompt_embeds) > 1)
    )


def _above_one(value: Any) -> bool:
    # Text and floats too: vLLM's request models coerce them.
    try:
        return float(value) > 1
    except (TypeError, ValueError, OverflowError):
        return False


def _prompts(raw: msgspec.Raw) -> int:
    """How many prompts a ``prompt`` or ``prompt_embeds`` member holds."""
    text = bytes(raw)
    if text in (b"", b"null"):
        return 0
    if not text.startswith(b"["):
        return 1
    if _TOKEN_IDS.match(text):
        return 1
    return len(msgspec.json.decode(text, type=list[msgspec.Raw]))
