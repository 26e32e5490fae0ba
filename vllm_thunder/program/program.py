"""One agent run as the engine knows it."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from vllm_thunder.program.tool_times import ProgramTimes

__all__ = ["Phase", "Program", "Status"]


class Phase(StrEnum):
    """What the program is doing (the paper's τ)."""

    REASONING = "REASONING"  #: at least one turn is in flight, held turns included
    ACTING = "ACTING"  #: no turn is in flight: its tools run


class Status(StrEnum):
    """Whether the program has a claim on KV-cache memory (the paper's s)."""

    ACTIVE = "ACTIVE"  #: its turns are admitted as they arrive
    PAUSED = "PAUSED"  #: its turns are held until it is restored
    TERMINATED = "TERMINATED"  #: released; no longer in the table


@dataclass(slots=True, eq=False)
class Program:
    """Mutable record; only :class:`~vllm_thunder.program.table.ProgramTable`,
    :class:`~vllm_thunder.program.ledger.BlockLedger` and the policy write to it.

    Times are seconds on the caller's clock. Identity is the object: two records never
    share a ``program_id`` inside one table.
    """

    program_id: str
    created_at: float
    phase: Phase = Phase.ACTING
    status: Status = Status.PAUSED
    parent_id: str | None = None
    group: str | None = None
    priority: int = 0
    retention: float | None = None
    #: The tool that it runs now, or ran last, as far as its client told.
    tool: str | None = None
    tool_times: ProgramTimes = field(default_factory=ProgramTimes)
    #: Seconds after its arrival by which a turn in flight should have its first token.
    deadline_seconds: float | None = None

    #: Requests in flight by turn id. A turn that fans out stays, possibly with 0
    #: requests, until the front end says that it is over.
    turns: dict[str, int] = field(default_factory=dict)
    #: Turn ids of ``turns`` that only the front end can end.
    open_fans: set[str] = field(default_factory=set)
    #: Turn ids of ``turns`` of which no request has run yet.
    unserved: set[str] = field(default_factory=set)
    #: Ids of held engine requests, oldest first.
    held: dict[str, None] = field(default_factory=dict)
    waiting_since: float | None = None
    longest_wait: float = 0.0

    #: Context at the end of the last turn that ended normally, its output included.
    context_tokens: int = 0
    #: Of ``context_tokens``, the prompt of the last turn; 0: that left the context as it was.
    context_prompt_tokens: int = 0
    #: Longest prompt among the requests in flight.
    prompt_tokens: int = 0
    #: Exponentially weighted tokens by which one turn and its tool result grow the context.
    growth: float = 0.0
    #: Blocks that the program claims while it is active; see ``ThunderPolicy``.
    claim: float = 0.0
    #: Share of its prompts' tokens that were cached, lately; None before the second turn.
    hit_rate: float | None = None
    #: Blocks that the next turn would not have to allocate because other programs hold them.
    borrowed_blocks: int = 0

    idle_since: float = 0.0
    restored_at: float = 0.0
    #: Turns that ended, in whatever way.
    turns_done: int = 0
    #: Those of them of which at least one request ran.
    turns_run: int = 0
    #: The turn that ended last had been held all the time: its client did not wait any longer.
    gave_up_waiting: bool = False
    pauses: int = 0
    #: Times that it was given a claim while it waited, the first time included.
    restores: int = 0
    #: Tokens and output tokens of the last of the running turns' requests that ended normally.
    ended_context: tuple[int, int] | None = None
    #: A request of the running turns ended before its prompt was computed.
    interrupted: bool = False
    #: It lost its claim after its first turn, before it came back.
    given_up: bool = False
    #: It was due when it was restored: its turn is not held again.
    goes_first: bool = False
    #: Since when the turns that were admitted last had waited.
    waited_since: float | None = None
    #: It gives up its claim when its turn ends, for a program that waits; see ProgramTable.
    yields: bool = False
    release_when_turn_ends: bool = False

    # Kept by the BlockLedger.
    keys: dict[Any, None] = field(default_factory=dict)
    #: Of ``keys``, which are in the order in which they came, how many are from before the turns
    #: that run, how many of the first these use, and which others.
    keys_before: int = 0
    prefix_used: int = 0
    used: set[Any] = field(default_factory=set)
    #: Turns since the last one that continued the context.
    side_calls: int = 0
    unique_blocks: int = 0
    shared_blocks: int = 0
    resident_blocks: int = 0
    #: Blocks that are both shared and resident: others' claims or the pool pay for them.
    shared_resident_blocks: int = 0

    @property
    def in_flight(self) -> bool:
        """Whether a turn has arrived and has not ended."""
        return bool(self.turns)

    @property
    def requests_running(self) -> int:
        """Requests in flight that are not held."""
        return sum(self.turns.values()) - len(self.held)

    def __repr__(self) -> str:
        return (
            f"Program({self.program_id!r}, {self.phase}, {self.status}, "
            f"tokens={self.context_tokens}, "
            f"blocks={self.unique_blocks}+{self.shared_blocks} shared, "
            f"turns={len(self.turns)} in flight, held={len(self.held)})"
        )
