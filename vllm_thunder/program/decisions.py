"""What a policy is told and what it answers."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from vllm_thunder.program.program import Program

__all__ = ["Action", "ActionKind", "Memory", "Wait"]


class ActionKind(StrEnum):
    PAUSE = "pause"
    RESTORE = "restore"
    RELEASE = "release"


@dataclass(frozen=True, slots=True)
class Action:
    """What the scheduler has to carry out; ``reason`` is for people."""

    kind: ActionKind
    program: Program
    reason: str


@dataclass(frozen=True, slots=True)
class Memory:
    """What the engine's memory and queues look like at one instant.

    ``capacity_blocks``: blocks of the pool. ``unlabelled_blocks``: blocks in use by requests
    without a program. ``shared_blocks``: resident blocks that several programs hold.
    ``free_blocks``: blocks that no running request references. ``free_slots``: turns that the
    engine may run beside those it runs. ``busy``: the engine runs something now.

    Two questions about programs with held turns, asked only for those whose turn to be restored
    it is. ``borrowed_blocks(program)``: blocks of its prompt that are in memory and that others'
    claims pay for already. ``common_blocks(program, other)``: leading blocks that the prompts of
    both have in common.
    """

    capacity_blocks: int
    unlabelled_blocks: int
    shared_blocks: int
    free_blocks: int
    free_slots: int
    busy: bool
    borrowed_blocks: Callable[[Program], int]
    common_blocks: Callable[[Program, Program], int]


@dataclass(frozen=True, slots=True)
class Wait:
    """Why a program's turns are held, for people.

    ``blocks_needed``: its claim. ``blocks_short``: blocks that are missing for it below the
    watermark. ``position``: programs that are restored before it. ``expected_seconds``: from now
    until its restore, going by the restores of late; None before there were any.
    """

    blocks_needed: int
    blocks_short: int
    position: int
    expected_seconds: float | None
    reason: str
