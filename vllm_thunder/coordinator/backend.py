"""One engine as the coordinator knows it: what it said last, and what was placed on it since."""

from dataclasses import dataclass, field
from enum import StrEnum

from vllm_thunder.coordinator.tracked import Tracked

__all__ = ["Backend", "Health", "MemoryReport"]


class Health(StrEnum):
    UNKNOWN = "unknown"  #: reachable, but it has not said yet how much memory it has
    UP = "up"
    DOWN = "down"  #: its probe fails, or a connection to it broke: nothing is sent there
    LEAVING = "leaving"  #: it was taken out: its turns end, no further one is placed there


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """What an engine says of itself.

    ``capacity_blocks``: blocks of its KV cache. ``room_blocks``: how many of them no program
    claims below its low watermark; negative when claims have outgrown memory. ``free_seats``:
    turns that it may run beside those it runs. ``prefill_seconds_per_token`` and
    ``prefill_seconds_per_position``: its measured cost of n prompt tokens whose positions add up
    to q is a·n + b·q seconds; None before the first prompt.
    """

    capacity_blocks: int
    room_blocks: float
    free_seats: int
    prefill_seconds_per_token: float | None = None
    prefill_seconds_per_position: float = 0.0


@dataclass(slots=True, eq=False)
class Backend:
    """Mutable record; only :class:`~vllm_thunder.coordinator.fleet.Fleet` writes to it.

    ``block_size``: tokens of a block.
    """

    backend_id: str
    block_size: int
    health: Health = Health.UNKNOWN
    report: MemoryReport | None = None
    #: Blocks by program that were placed there and are not in what it reported last.
    placed: dict[Tracked, float] = field(default_factory=dict)
    placed_blocks: float = 0.0
    #: Turns that were sent there and have not ended.
    running: dict[tuple[Tracked, str], None] = field(default_factory=dict)
    #: Programs whose KV is there, or was when somebody looked last.
    residents: dict[Tracked, None] = field(default_factory=dict)

    @property
    def usable(self) -> bool:
        """Whether a turn may be placed there: it answers, and its capacity is known."""
        return self.health is Health.UP and self.report is not None

    @property
    def room(self) -> float:
        """Blocks that nobody claims, what was placed since the last report included."""
        return 0.0 if self.report is None else self.report.room_blocks - self.placed_blocks

    def blocks(self, tokens: float) -> int:
        """Blocks of a context with so many tokens."""
        return -int(-tokens // self.block_size)

    def prefill_seconds(self, tokens: float) -> float:
        """Time to compute the first ``tokens`` tokens of a context; 0 while that is unknown."""
        report = self.report
        if report is None or report.prefill_seconds_per_token is None:
            return 0.0
        per_position = report.prefill_seconds_per_position
        return tokens * (report.prefill_seconds_per_token + per_position * tokens / 2)

    def __repr__(self) -> str:
        return f"Backend({self.backend_id!r}, {self.health}, room={self.room:.0f})"
