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
    #: Programs by the id of their engine requests.
    program_of: dict[str, Program]
    #: Whose content blocks are being cached; None: unlabelled.
    caching_for: Program | None
    #: Whose prompt was looked up last in the prefix cache: hits are touched right after that.
    hit_by: Program | None
    #: Whose request is being freed, and whether nobody will send it again.
    freed_by: Program | None
    freeing_one_off: bool
    #: Keys that more than one block has had at once.
    doubled: set[BlockHashWithGroupId]

    def cache_full_blocks(self, request: Request, *args: Any, **kwargs: Any) -> None:
        self.caching_for = self.owner_of(request)
        try:
            super().cache_full_blocks(request, *args, **kwargs)
        finally:
            self.caching_for = None

    def cache_partial_block(
        self, request: Request, *args: Any, **kwargs: Any
    ) -> BlockHashWithGroupId | None:
        self.caching_for = self.owner_of(request)
        try:
            return super().cache_partial_block(request, *args, **kwargs)
        finally:
            self.caching_for = None

    def _insert_block_hash(
        self,
        block_hash_with_group_id: BlockHashWithGroupId,
        block: KVCacheBlock,
        num_tokens: int | None,
    ) -> None:
        key = block_hash_with_group_id
        known = key in self.cached_block_hash_to_block._cache
        super()._insert_block_hash(key, block, num_tokens)
        if known:
            self.doubled.add(key)
        self.ledger.computed(self.caching_for, key, known)

    def _remove_cached_block_hashes(self, block: KVCacheBlock) -> list[BlockHashWithGroupId]:
        removed = super()._remove_cached_block_hashes(block)
        for key in removed:
            if not self.is_resident(key):
                self.ledger.left_memory(key)
                self.doubled.discard(key)
        return removed

    def touch(self, blocks: Sequence[KVCacheBlock]) -> None:
        # All of vLLM's own, which takes free blocks out of the queue one by one.
        self.free_block_queue.remove_n([b for b in blocks if b.ref_cnt == 0 and not b.is_null])
        for block in blocks:
            block.ref_cnt += 1
        if self.metrics_collector:
            for block in blocks:
                self.metrics_collector.on_block_accessed(block)
        if self.hit_by is not None:
            keys = [block.block_hash for block in blocks]
            if None in keys:  # null blocks in front of a sliding window
                keys = [key for key in keys if key is not None]
            self.ledger.hold(self.hit_by, keys)

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        if not self.enable_caching or not (len(self.ledger) or self.freeing_one_off):
            super().free_blocks(ordered_blocks)
            return
        stock: list[KVCacheBlock] = []
        hashed: list[KVCacheBlock] = []
        for block in ordered_blocks:
            if block.ref_cnt == 1 and block.block_hash is not None and block.pool is self:
                hashed.append(block)
            else:
                stock.append(block)
        owner = self.freed_by
        if owner is not None and not self.doubled:
            # What a program uses it holds. What it shares is mostly in front, last in this order:
            # beyond that every block is its own, and no holder need be looked up.
            sharing = self._sharing(hashed, owner)
            own = hashed[: len(hashed) - sharing]
            own += self._free_by_holder(hashed[len(hashed) - sharing :], owner, stock)
        else:
            own = self._free_by_holder(hashed, owner, stock)
        for block in own:
            block.ref_cnt = 0
        if own:
            assert owner is not None
            self.free_block_queue.append_owned(owner, own)
        super().free_blocks(stock)

    def _sharing(self, blocks: list[KVCacheBlock], owner: Program) -> int:
        """How many of the last blocks have all that ``owner`` shares with other programs."""
        left = owner.shared_blocks
        if not left:
            return 0
        holder_of = self.ledger.holder_of
        for count, block in enumerate(reversed(blocks), start=1):
            assert block.block_hash is not None
            left -= holder_of(block.block_hash) is not owner
            if not left:
                return count
        return len(blocks)

    def _free_by_holder(
        self, blocks: list[KVCacheBlock], owner: Program | None, stock: list[KVCacheBlock]
    ) -> list[KVCacheBlock]:
        """Free what is shared, another program's or spent; returns what is ``owner``'s alone, and
        adds to ``stock`` what is nobody's."""
        own: list[KVCacheBlock] = []
        shared: list[KVCacheBlock] = []
        spent: list[KVCacheBlock] = []
        others: dict[Program, list[KVCacheBlock]] = {}
        for block in blocks:
            key = block.block_hash
            assert key is not None
            holder = self.ledger.holder(key)
            if holder is None and not self.freeing_one_off:
                stock.append(block)
                continue
            if holder is None or (key in self.doubled and self._is_spare_copy(key, block)):
                spent.append(block)
            elif holder is owner:
                own.append(block)
            elif isinstance(holder, Program):
                others.setdefault(holder, []).append(block)
            else:
                shared.append(block)
            block.ref_cnt = 0
        for program, theirs in others.items():
            self.free_block_queue.append_owned(program, theirs)
        self.free_block_queue.append_shared(shared)
        self.free_block_queue.prepend_n(spent)
        return own

    def reset_prefix_cache(self) -> bool:
        if not super().reset_prefix_cache():
            return False
        self.ledger.all_left_memory(self._programs_with_keys())
        self.free_block_queue.reset()
        self.doubled.clear()
        return True

    # -- what the scheduler calls ------------------------------------------------------

    def owner_of(self, request: Request) -> Program | None:
        """The program whose context the request's blocks are; None for a one-off's, too."""
        turn = request.program
        if turn is None or turn.one_off:
            return None
        return self.program_of.get(request.request_id)

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
    """Tells the pool whose prompt is looked up and whose blocks are freed."""

    block_pool: ProgramBlockPool

    def get_computed_blocks(self, request: Request) -> tuple[KVCacheBlocks, int, int]:
        self.block_pool.hit_by = self.block_pool.owner_of(request)
        return super().get_computed_blocks(request)

    def free(self, request: Request) -> None:
        pool, turn = self.block_pool, request.program
        pool.freed_by = pool.owner_of(request)
        pool.freeing_one_off = turn is not None and turn.one_off
        try:
            super().free(request)
        finally:
            pool.freed_by = None
            pool.freeing_one_off = False


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
    pool.program_of = {}
    pool.caching_for = None
    pool.hit_by = None
    pool.freed_by = None
    pool.freeing_one_off = False
    pool.doubled = set()
    return pool
