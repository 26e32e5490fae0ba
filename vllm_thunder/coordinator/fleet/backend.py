"""One engine as the coordinator knows it: what it said last, and what was placed on it since."""

from dataclasses import dataclass, field
from enum import StrEnum
from math import inf

from vllm_thunder.coordinator.config import CoordinatorConfig
from vllm_thunder.coordinator.fleet.tracked import Tracked
from vllm_thunder.program.cost import ContextBlocks
from vllm_thunder.program.report import MemoryReport

__all__ = ["Backend", "Health"]


class Health(StrEnum):
    UNKNOWN = "unknown"  #: reachable, but it has not said yet how much memory it has
    UP = "up"
    DOWN = "down"  #: its probe fails, or a connection to it broke: nothing is sent there
    LEAVING = "leaving"  #: it was taken out: its turns end, no further one is placed there


@dataclass(slots=True, eq=False)
class Backend:
    """Mutable record; only :class:`~vllm_thunder.coordinator.fleet.fleet.Fleet` writes to it.

    ``url``: where its HTTP server is, without a slash at the end. ``rank``: which data-parallel
    rank of that server it is; None: the server is one engine. ``longest_context``: tokens; it
    refuses longer ones.
    """

    backend_id: str
    url: str = ""
    rank: int | None = None
    longest_context: float = inf
    health: Health = Health.UNKNOWN
    #: Why it cannot be used, for people.
    problem: str | None = None
    #: It does not know programs: the coordinator keeps its books.
    stock: bool = False
    report: MemoryReport | None = None
    #: When that came.
    reported_at: float = -inf
    blocks_of: ContextBlocks | None = None
    #: Blocks by program that were placed there and are not in what it reported last.
    placed: dict[Tracked, float] = field(default_factory=dict)
    placed_blocks: float = 0.0
    #: Turns that were sent there and have not ended.
    running: dict[tuple[Tracked, str], None] = field(default_factory=dict)
    #: When the last of them ended, or it was seen first.
    idle_since: float = inf
    #: Requests without a program that were sent there and have not ended.
    unlabelled: int = 0
    #: Programs whose KV is there, or was when somebody looked last.
    residents: dict[Tracked, None] = field(default_factory=dict)
    #: Those of them that it has not told of again since it began to tell from the beginning, or
    #: since it said that they were gone while their turns ended.
    unconfirmed: dict[Tracked, None] = field(default_factory=dict)

    @property
    def usable(self) -> bool:
        """Whether a turn may be placed there: it answers, and its capacity is known."""
        return self.health is Health.UP and self.report is not None

    @property
    def room(self) -> float:
        """Blocks that nobody claims, what was placed since the last report included."""
        return 0.0 if self.report is None else self.report.room_blocks - self.placed_blocks

    @property
    def free_seats(self) -> int:
        """Turns that it may run beside those it runs, what was placed since its last report
        included."""
        return 0 if self.report is None else self.report.free_seats - len(self.placed)

    @property
    def claimed_share(self) -> float:
        """Share of its memory that is claimed, acting programs and what was placed since its last
        report counted; 0 while not known."""
        if self.report is None:
            return 0.0
        return (self.report.claimed_blocks + self.placed_blocks) / self.report.capacity_blocks

    def blocks(self, tokens: float) -> int:
        """Blocks that a context with so many tokens takes, at least 1, and at most those of the
        longest context; a usable backend knows."""
        assert self.blocks_of is not None
        return max(self.blocks_of(min(tokens, self.longest_context)), 1)

    def tokens(self, blocks: int) -> float:
        """Tokens of a context that has so many blocks here."""
        return 0.0 if self.blocks_of is None else self.blocks_of.tokens_in(blocks)

    def credit(self, held: bool, config: CoordinatorConfig) -> float:
        """Seconds by which a turn is to count as having waited longer; as Dynamo's Python router: a
        boost for what was held, else a demotion where memory is short."""
        if held:
            return config.resume_priority_boost
        if self.claimed_share >= config.soft_demote_threshold:
            return config.soft_demote_priority_jump
        return 0.0

    def reported(self, report: MemoryReport, now: float) -> None:
        """What it says of its memory now."""
        if self.report is None:
            self.idle_since = now
        if self.report is None or report.context_groups != self.report.context_groups:
            self.blocks_of = ContextBlocks(report.context_groups)
        self.report = report
        self.reported_at = now
        if self.health is Health.UNKNOWN:
            self.health = Health.UP

    def prefill_seconds(self, tokens: float) -> float:
        """Time to compute the first ``tokens`` tokens of a context; 0 while that is unknown."""
        report = self.report
        if report is None or report.prefill_seconds_per_token is None:
            return 0.0
        per_position = report.prefill_seconds_per_position
        return tokens * (report.prefill_seconds_per_token + per_position * tokens / 2)

    def __repr__(self) -> str:
        return f"Backend({self.backend_id!r}, {self.health}, room={self.room:.0f})"
