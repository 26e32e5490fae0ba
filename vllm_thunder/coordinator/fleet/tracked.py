"""One agent run as the coordinator knows it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm_thunder.coordinator.fleet.profile import Profile
from vllm_thunder.coordinator.prompts.sizes import BodySize

if TYPE_CHECKING:
    from vllm_thunder.coordinator.fleet.backend import Backend

__all__ = ["Tracked"]


@dataclass(slots=True, eq=False)
class Tracked:
    """Mutable record; only :class:`~vllm_thunder.coordinator.fleet.fleet.Fleet` writes to it.

    Times are seconds on the caller's clock. Identity is the object.
    """

    program_id: str
    priority: int = 0
    group: str | None = None
    parent_id: str | None = None
    deadline_seconds: float | None = None

    #: The engine that computed its context; None before its first turn, and when that engine died.
    home: Backend | None = None
    #: Without a home: an engine that may know it again. It told that the program was gone while a
    #: turn was on its way there, or it went down.
    perhaps_at: Backend | None = None
    #: Blocks of its context that are in its home's memory.
    resident_blocks: int = 0
    #: It has a claim on its home's memory: its turns go there as they arrive.
    claimed: bool = False
    #: Its home has told of it.
    told: bool = False
    #: Before it has a home: the engine that is likely to have most of its prompt in memory, of
    #: other programs, and how many tokens that is.
    near: Backend | None = None
    near_tokens: float = 0.0
    #: Tokens of its context after its last turn, and of the prompt that waits, as far as known.
    context_tokens: int = 0
    prompt_tokens: float = 0.0
    #: What its last prompt's body was made of, until an engine has said how many tokens that is;
    #: None also where what the engine says would not be of that body alone.
    prompt_size: BodySize | None = None

    #: Turns that wait here, oldest first, and the bytes of their bodies.
    waiting: dict[str, int] = field(default_factory=dict)
    waiting_since: float | None = None
    #: Turns in flight by the engine that they were sent to.
    running: dict[str, Backend] = field(default_factory=dict)
    #: It was released while turns were in flight: the last one takes it along.
    ends: bool = False
    #: The turn that it said is its last; an engine that has had it forgets the program after it.
    last_turn: str | None = None
    #: Its place may not change before this time although another engine would fit better.
    settled_until: float = 0.0
    #: When its last turn ended.
    idle_since: float = 0.0
    longest_wait: float = 0.0
    moves: int = 0
    profile: Profile = field(default_factory=Profile)

    @property
    def in_flight(self) -> bool:
        """Whether a turn has arrived and has not ended."""
        return bool(self.waiting or self.running)

    def goes_on_at(self) -> Backend | None:
        """The engine where its next turn need not wait for room; None: it has to."""
        home = self.home
        has_place = home is not None and home.usable and (self.claimed or self.running)
        return home if has_place else None

    def kept_at(self) -> tuple[Backend | None, float]:
        """The engine that need not compute all of its prompt, and the tokens that it has."""
        if self.home is not None:
            return self.home, self.home.tokens(self.resident_blocks)
        return self.near, self.near_tokens

    def __repr__(self) -> str:
        where = "nowhere" if self.home is None else self.home.backend_id
        return (
            f"Tracked({self.program_id!r}, {where}, resident={self.resident_blocks}, "
            f"waiting={len(self.waiting)}, running={len(self.running)})"
        )
