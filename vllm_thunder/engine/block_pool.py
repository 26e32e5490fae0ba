"""vLLM's block pool, knowing which program holds which block.

Both classes stand in for vLLM's while vLLM builds its scheduler: the names that its code looks up
are replaced for that moment. CPU offload and HiSparse build pools of their own through the same
code at other times; those stay vLLM's. (To replace the classes of the finished objects would be
simpler, and costs a tenth of a scheduling step: CPython keeps the attributes of such an object in a
dictionary that its bytecode has no short cut to.)
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from vllm.v1.core import kv_cache_coordinator
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock
from vllm.v1.core.sched import scheduler
from vllm.v1.request import Request

from vllm_thunder.engine.free_queue import ProgramFreeQueue
from vllm_thunder.program.errors import IntegrityError
from vllm_thunder.program.ledger import BlockLedger
from vllm_thunder.program.program import Program

__all__ = ["ProgramBlockPool", "ProgramKVCacheManager", "program_kv_cache"]


class ProgramBlockPool(BlockPool):
    """Tells the ledger what programs hold and what leaves memory; frees by program."""

    free_block_queue: ProgramFreeQueue

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        free = self.free_block_queue.get_all_free_blocks()
        self.free_block_queue = ProgramFreeQueue(free, self.num_gpu_blocks)
        self.ledger = BlockLedger(self.is_resident)
        #: Programs by the id of their engine requests.
        self.program_of: dict[str, Program] = {}
        #: Whose content blocks are being cached; None: unlabelled.
        self.caching_for: Program | None = None
        #: Whose prompt was looked up last in the prefix cache: hits are touched right after that.
        self.hit_by: Program | None = None
        #: Whose request is being freed, and whether nobody will send it again.
        self.freed_by: Program | None = None
        self.freeing_one_off = False
        #: Keys that more than one block has had at once.
        self.doubled: set[BlockHashWithGroupId] = set()

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
        self.free_block_queue.reference_n(blocks)
        if self.metrics_collector:
            for block in blocks:
                self.metrics_collector.on_block_accessed(block)
        if self.hit_by is not None:
            keys = [block._block_hash for block in blocks]  # not by its property: for every block
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
            if block.ref_cnt == 1 and block._block_hash is not None and block.pool is self:
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
        if own:
            assert owner is not None
            self.free_block_queue.append_owned(owner, own)
        super().free_blocks(stock)

    def _sharing(self, blocks: list[KVCacheBlock], owner: Program) -> int:
        """How many of the last blocks have all that ``owner`` shares with other programs."""
        left = owner.shared_blocks
        if not left:
            return 0
        for count, block in enumerate(reversed(blocks), start=1):
            assert block.block_hash is not None
            left -= self.ledger.holder(block.block_hash) is not owner
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
        """Move the free blocks of keys whose holders changed to where they belong now.

        ``keys`` are in the order of a context; what stays somebody's is reused from its end.
        """
        queue = self.free_block_queue
        moved: list[tuple[Program, KVCacheBlock]] = []
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
                    moved.append((holder, block))
        for program, block in reversed(moved):
            queue.move_to(program, block)

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

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        vllm_pool = kv_cache_coordinator.BlockPool
        kv_cache_coordinator.BlockPool = ProgramBlockPool
        try:
            super().__init__(*args, **kwargs)
        finally:
            kv_cache_coordinator.BlockPool = vllm_pool

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


@contextmanager
def program_kv_cache() -> Iterator[None]:
    """Inside, a scheduler that vLLM builds gets our KV-cache manager, and that our pool."""
    vllm_manager = scheduler.KVCacheManager
    scheduler.KVCacheManager = ProgramKVCacheManager
    try:
        yield
    finally:
        scheduler.KVCacheManager = vllm_manager
