"""What an engine tells the coordinator: the wire format between the two, JSON over HTTP.

    GET /programs/changes?after=CURSOR&wait=SECONDS[&rank=N]  ->  EngineReport

A cursor names a point in the history of one engine core. The answer comes at once when something
has changed since then, else as soon as something does, or after ``wait`` seconds. Without a cursor,
or with one that the engine does not know (it was started again, or what happened then is
forgotten), the answer begins at the beginning: every program is told, and ``reset`` is true.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

__all__ = ["EngineReport", "MemoryReport", "ProgramReport"]


class MemoryReport(msgspec.Struct, frozen=True):
    """An engine's memory as somebody sees it who brings another program.

    ``capacity_blocks``: blocks of its KV cache. ``room_blocks``: how many of them a program may
    claim that comes now; negative when claims have outgrown memory. ``free_seats``: turns that it
    may run beside those it runs. ``prefill_seconds_per_token`` and
    ``prefill_seconds_per_position``: its measured cost of n prompt tokens whose positions add up
    to q is a·n + b·q seconds; None before the first prompt. ``context_groups``: block size and kept
    tokens of each KV-cache group, as :class:`~vllm_thunder.program.cost.ContextBlocks` takes them.
    ``claimed_blocks``: blocks that programs claim, those that act included, and that requests
    without a program use.
    """

    capacity_blocks: Annotated[int, Meta(ge=1)]
    room_blocks: float
    free_seats: int
    context_groups: Annotated[
        list[tuple[Annotated[int, Meta(ge=1)], Annotated[int, Meta(ge=0)] | None]],
        Meta(min_length=1),
    ]
    prefill_seconds_per_token: float | None = None
    prefill_seconds_per_position: float = 0.0
    claimed_blocks: float = 0.0


class ProgramReport(msgspec.Struct, frozen=True):
    """One program that changed.

    ``context_tokens``: its context after its last turn, 0 before. ``resident_blocks``: of that,
    what is in memory. ``claimed``: it is ACTIVE, its turns are admitted as they arrive.
    ``turns_in_flight``: that the engine has, held ones included. ``prompt_tokens``: of its last
    turn, as the engine counted them; 0 where that neither began nor continued the context, as side
    calls and one-offs, and where nobody counted.
    """

    program_id: str
    context_tokens: Annotated[int, Meta(ge=0)]
    resident_blocks: Annotated[int, Meta(ge=0)]
    claimed: bool
    turns_in_flight: Annotated[int, Meta(ge=0)] = 0
    prompt_tokens: Annotated[int, Meta(ge=0)] = 0


class EngineReport(msgspec.Struct, frozen=True):
    """What has changed since a cursor.

    ``cursor``: where to go on. ``reset``: everything that the asker knew of this engine's programs
    is void. ``complete``: false when more changes are waiting already: ask again at once.
    ``gone``: ids of programs that the engine does not know any more.
    """

    cursor: str
    reset: bool
    complete: bool
    memory: MemoryReport
    programs: list[ProgramReport]
    gone: list[str]
