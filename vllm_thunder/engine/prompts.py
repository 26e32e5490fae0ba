"""What the prompts of held turns have in common with what is in memory, and with each other."""

from collections.abc import Callable, Mapping

from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    make_block_hash_with_group_id,
    resolve_block_hashes,
)
from vllm.v1.request import Request

from vllm_thunder.engine.block_pool import ProgramBlockPool
from vllm_thunder.program.program import Program, Status

__all__ = ["HeldPrompts"]


class HeldPrompts:
    """Answers :class:`~vllm_thunder.program.decisions.Memory`'s questions about programs.

    ``held``: the held requests by id, as they come and go. Looked at is the first of a program's,
    and the first KV-cache group of the model. ``block_size``: tokens, of that group.
    """

    def __init__(self, held: Mapping[str, Request], pool: ProgramBlockPool, block_size: int):
        self._held = held
        self._pool = pool
        self._block_size = block_size

    def borrowed_blocks(self, program: Program) -> int:
        """Blocks of a waiting program's prompt that are in memory and on another's account."""
        if program.keys:
            return program.shared_resident_blocks
        request = self._first(program)
        if not self._pool.enable_caching or request.skip_reading_prefix_cache:
            return 0
        hashes = self._hashes(request)
        return _prefix_length(len(hashes), lambda index: self._is_claimed(hashes[index]))

    def common_blocks(self, program: Program, other: Program) -> int:
        """Leading blocks that the prompts of both have in common."""
        mine, theirs = self._hashes(self._first(program)), self._hashes(self._first(other))
        shorter = min(len(mine), len(theirs))
        return _prefix_length(shorter, lambda index: mine[index] == theirs[index])

    def _first(self, program: Program) -> Request:
        return self._held[next(iter(program.held))]

    def _hashes(self, request: Request) -> list[BlockHash]:
        pool_size = self._pool.hash_block_size
        return resolve_block_hashes(request.block_hashes, pool_size, self._block_size)

    def _is_claimed(self, block_hash: BlockHash) -> bool:
        """Whether a block is cached and counted already: shared, or claimed by its holder."""
        key = make_block_hash_with_group_id(block_hash, 0)
        holder = self._pool.ledger.holder(key)
        if isinstance(holder, Program) and holder.status is not Status.ACTIVE:
            return False
        return holder is not None and self._pool.is_resident(key)


def _prefix_length(length: int, holds: Callable[[int], bool]) -> int:
    """How many indexes from 0 on ``holds`` is true for, if it is for no later one: eviction is
    tail first, and contexts part only once."""
    low, high = 0, length
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            low = middle + 1
        else:
            high = middle
    return low
