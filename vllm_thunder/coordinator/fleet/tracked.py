"""One agent run as the coordinator knows it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm_thunder.coordinator.fleet.profile import Profile
from vllm_thunder.coordinator.prompts.sizes import BodySize
from vllm_thunder.program.turn import Turn

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
    #: Before it has a home: how many tokens of its prompt engines are likely to have in memory, of
    #: other programs.
    near: dict[Backend, float] = field(default_factory=dict)
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

    @property
    def engine_knows(self) -> bool:
        """Whether an engine has it. Of stock engines, books kept here tell of every turn that is
        sent; one of them has it when a context has come of that."""
        by_books = self.home is not None and self.home.stock
        return self.told and (not by_books or self.context_tokens > 0)

    def takes(self, turn: Turn, prompt_tokens: float) -> None:
        """What the next turn of it says, which is not among those in flight yet."""
        if turn.final:
            self.last_turn = turn.turn_id
        elif not self.in_flight:
            self.last_turn = None  # it has come back
        if not self.waiting:
            self.group = turn.group or self.group
            self.priority = turn.priority
            self.deadline_seconds = turn.deadline_seconds
        self.parent_id = turn.parent_id or self.parent_id
        self.prompt_tokens = max(prompt_tokens, self.context_tokens)

    def goes_on_at(self) -> Backend | None:
        """The engine where its next turn need not wait for room; None: it has to."""
        home = self.home
        has_place = home is not None and home.usable and (self.claimed or self.running)
        return home if has_place else None

    def kept_at(self) -> tuple[Backend | None, float]:
        """The engine that need not compute all of its prompt, and the tokens that it has."""
        if self.home is not None:
            return self.home, self.home.tokens(self.resident_blocks)
        nearest = max(self.near, key=self.near.__getitem__, default=None)
        return nearest, 0.0 if nearest is None else self.near[nearest]

    def stay_seconds(self, most: float) -> float:
        """For how long to wait for room where its KV is: as long as it takes to compute it
        elsewhere, at most ``most`` seconds."""
        at, tokens = self.kept_at()
        return 0.0 if at is None or not at.usable else min(at.prefill_seconds(tokens), most)

    def __repr__(self) -> str:
        where = "nowhere" if self.home is None else self.home.backend_id
        return (
            f"Tracked({self.program_id!r}, {where}, resident={self.resident_blocks}, "
            f"waiting={len(self.waiting)}, running={len(self.running)})"
        )
