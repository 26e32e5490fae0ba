"""What can come of a turn that arrives: a place, or a reason why there is none."""

from typing import NamedTuple

from vllm_thunder.coordinator.fleet.backend import Backend
from vllm_thunder.coordinator.fleet.tracked import Tracked
from vllm_thunder.program.errors import ThunderError

__all__ = ["Dispatch", "Overloaded", "Unavailable"]


class Overloaded(ThunderError):
    """A limit on tracked programs or held turns is reached (HTTP 429)."""


class Unavailable(ThunderError):
    """No engine could be used for as long as a turn may wait (HTTP 503)."""


class Dispatch(NamedTuple):
    """Send the turn to the backend now; ``waited`` seconds it has been held.

    ``credit``: seconds by which the engine is to count it as having waited longer. ``left``: the
    engine that it moved away from and that may forget it.
    """

    program: Tracked
    turn_id: str
    backend: Backend
    waited: float
    reason: str
    credit: float
    left: Backend | None
