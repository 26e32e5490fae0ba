"""vLLM's block pool, knowing which program holds which block.

The pool is made by vLLM and then *adopted*: its class is replaced on the one object that the
scheduler's KV-cache manager, coordinator and connectors already share. CPU offload and HiSparse
build pools of their own with the same constructor; those stay vLLM's.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock
from vllm.v1.request import Request

from vllm_thunder.engine.free_queue import ProgramFreeQueue
from vllm_thunder.program.errors import IntegrityError
from vllm_thunder.program.ledger import BlockLedger
from vllm_thunder.program.program import Program

__all__ = ["ProgramBlockPool", "ProgramKVCacheManager", "adopt"]


class ProgramBlockPool(BlockPool):
    """Tells the ledger what programs hold and what leaves memory; frees by program."""

    free_block_queue: ProgramFreeQueue
    ledger: BlockLedger
    #: The program that blocks are being allocated for or hit by; None: unlabelled.
    serving: Program | None
    #: Programs by the id of their engine requests.
    program_of: dict[str, Program]

    def cache_full_blocks(
        self, request: Request, blocks: list[KVCacheBlock], *args: Any, **kwargs: Any
    ) -> None:
        previous, self.serving = self.serving, self.program_of.get(request.request_id)
        try:
            super().cache_full_blocks(request, blocks, *args, **kwargs)
        finally:
            self.serving = previous

    def _insert_block_hash(
        self,
        block_hash_with_group_id: BlockHashWithGroupId,
        block: KVCacheBlock,
        num_tokens: int | None,
    ) -> None:
        key = block_hash_with_group_id
        known = self.is_resident(key)
        super()._insert_block_hash(key, block, num_tokens)
        if not known:
            self.ledger.became_resident(key)
        if self.serving is not None:
            self.ledger.hold(self.serving, key)

    def _remove_cached_block_hashes(self, block: KVCacheBlock) -> list[BlockHashWithGroupId]:
        removed = super()._remove_cached_block_hashes(block)
        for key in removed:
            if not self.is_resident(key):
                self.ledger.left_memory(key)
        return removed

    def touch(self, blocks: Sequence[KVCacheBlock]) -> None:
        super().touch(blocks)
        program = self.serving
        if program is not None:
            hold = self.ledger.hold
            for block in blocks:
                if block.block_hash is not None:
                    hold(program, block.block_hash)

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        if not self.enable_caching or not len(self.ledger):
            super().free_blocks(ordered_blocks)
            return
        stock: list[KVCacheBlock] = []
        owned: dict[Program, list[KVCacheBlock]] = {}
        shared: list[KVCacheBlock] = []
        for block in ordered_blocks:
            key = block.block_hash
            holder = None if key is None else self.ledger.holder(key)
            if holder is None or block.pool is not self or block.is_null or block.ref_cnt > 1:
                stock.append(block)
                continue
            block.ref_cnt -= 1
            if not isinstance(holder, Program):
                shared.append(block)
            elif self._is_spare_copy(key, block):
                self.free_block_queue.prepend_n([block])
            else:
                owned.setdefault(holder, []).append(block)
        for program, blocks in owned.items():
            self.free_block_queue.append_owned(program, blocks)
        self.free_block_queue.append_shared(shared)
        super().free_blocks(stock)

    def reset_prefix_cache(self) -> bool:
        if not super().reset_prefix_cache():
            return False
        self.ledger.all_left_memory(self._programs_with_keys())
        self.free_block_queue.reset()
        return True

    # -- what the scheduler calls ------------------------------------------------------

    def is_resident(self, key: BlockHashWithGroupId) -> bool:
        """Whether some block of the pool carries ``key``."""
        return key in self.cached_block_hash_to_block._cache

    def relocate(self, keys: Iterable[BlockHashWithGroupId]) -> None:
        """Move the free blocks of keys whose holders changed to where they belong now."""
        queue = self.free_block_queue
        for key in keys:
            found = self.cached_block_hash_to_block._cache.get(key)
            if found is None:
                continue
            holder = self.ledger.holder(key)
            for block in [found] if isinstance(found, KVCacheBlock) else list(found.values()):
                if block.ref_cnt or block.is_null:
                    continue
                if holder is None:
                    queue.spend(block)
                elif isinstance(holder, Program):
                    queue.remove(block)
                    queue.append_owned(holder, [block])

    def check_integrity(self) -> None:
        """Conservation of blocks and of holders, by a full recount; raises IntegrityError."""
        free = self.free_block_queue.get_all_free_blocks()
        in_use = sum(block.ref_cnt > 0 and not block.is_null for block in self.blocks)
        problems = []
        if len({block.block_id for block in free}) != len(free):
            problems.append("a block is free twice")
        if len(free) != self.free_block_queue.num_free_blocks:
            problems.append(f"{len(free)} free blocks listed, {self.get_num_free_blocks()} counted")
        if any(block.ref_cnt for block in free):
            problems.append("a free block is referenced")
        if len(free) + in_use + 1 != self.num_gpu_blocks:
            problems.append(
                f"{len(free)} free + {in_use} used + 1 null != {self.num_gpu_blocks} blocks"
            )
        if problems:
            raise IntegrityError("; ".join(problems))
        self.ledger.check_integrity(self._programs_with_keys())

    def _is_spare_copy(self, key: BlockHashWithGroupId | None, block: KVCacheBlock) -> bool:
        """vLLM does not deduplicate: of several blocks of one key, hits take the first."""
        found = self.cached_block_hash_to_block._cache.get(key)
        return isinstance(found, dict) and next(iter(found.values())) is not block

    def _programs_with_keys(self) -> set[Program]:
        programs: set[Program] = set()
        for holder in self.ledger.holders():
            programs.update((holder,) if isinstance(holder, Program) else holder)
        return programs


class ProgramKVCacheManager(KVCacheManager):
    """Tells the pool which program each allocation is for."""

    block_pool: ProgramBlockPool

    def allocate_slots(self, request: Request, *args: Any, **kwargs: Any) -> KVCacheBlocks | None:
        pool = self.block_pool
        pool.serving = pool.program_of.get(request.request_id)
        try:
            return super().allocate_slots(request, *args, **kwargs)
        finally:
            pool.serving = None


def adopt(manager: KVCacheManager, half_life: float) -> ProgramBlockPool:
    """Turn a fresh KV-cache manager and its pool, in place, into ours.

    ``half_life``: seconds, of the decay score of acting programs.
    """
    pool = manager.block_pool
    if type(manager) is not KVCacheManager or type(pool) is not BlockPool:
        raise IntegrityError(
            f"cannot adopt {type(manager).__name__} with {type(pool).__name__}: "
            "the scheduler's own KVCacheManager and BlockPool are expected"
        )
    free = pool.free_block_queue.get_all_free_blocks()
    if len(free) != pool.num_gpu_blocks - 1:
        raise IntegrityError("the block pool is in use already")
    manager.__class__ = ProgramKVCacheManager
    pool.__class__ = ProgramBlockPool
    assert isinstance(pool, ProgramBlockPool)
    pool.free_block_queue = ProgramFreeQueue(free, pool.num_gpu_blocks, half_life)
    pool.ledger = BlockLedger(pool.is_resident)
    pool.serving = None
    pool.program_of = {}
    return pool
