"""What there is to tell of one request when it is over."""

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Exchange", "Outcome"]


class Outcome(StrEnum):
    OK = "ok"  #: an engine's answer reached the client whole, whatever its status
    CLIENT_GONE = "client_gone"  #: the client left, or was left, before it had all
    ENGINE_LOST = "engine_lost"  #: the answer was cut, or no engine gave one
    REFUSED = "refused"  #: the coordinator answered itself


@dataclass(slots=True)
class Exchange:
    """One request, for metrics and the log. Times are seconds, sizes are bytes.

    ``request_id`` is the client's ``X-Request-Id``, for a model call without one an id of our own.
    ``trace_id``: of the trace that the call is part of. ``status`` is 0 when the client got none.
    ``read_seconds``: until the whole request had come. ``queue_seconds``: from then until it was
    sent to the engine that answered, or until it was over where no engine got it.
    ``first_byte_seconds``: from then until the answer's first byte came; None: none did.
    ``attempts``: engines that it was sent to. ``replica``: the other coordinator that it was passed
    on to, which notes the rest. ``model_call``: false where it was about something else.
    """

    path: str
    program_id: str | None = None
    turn_id: str | None = None
    request_id: str | None = None
    trace_id: str | None = None
    backend_id: str | None = None
    replica: str | None = None
    status: int = 0
    outcome: Outcome = Outcome.CLIENT_GONE
    read_seconds: float = 0.0
    queue_seconds: float = 0.0
    first_byte_seconds: float | None = None
    total_seconds: float = 0.0
    attempts: int = 0
    prompt_bytes: int = 0
    answer_bytes: int = 0
    model_call: bool = False
