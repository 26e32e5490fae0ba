"""The order in which free KV blocks are reused, with programs in mind.

vLLM keeps one linked list of free blocks. This queue keeps several and pops them in this order
(soft, never locked: every free block stays reachable):

1. ``spent``: blank blocks, and content that nobody will ask for again (terminated programs,
   superseded blocks);
2. runs of paused programs, the shortest program first, each from its tail;
3. by age: unlabelled blocks, and runs of active programs whose age is discounted by their decay
   score, so that a program that has just begun to act looks new;
4. ``shared``: content that several programs hold.

Without programs only ``spent`` and ``unlabelled`` are ever filled, and the order is vLLM's own.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from enum import IntEnum
from itertools import chain

from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, KVCacheBlock

from vllm_thunder.program.cost import discounted_age
from vllm_thunder.program.program import Program, Status

__all__ = ["EvictionClass", "ProgramFreeQueue"]


class EvictionClass(IntEnum):
    """Where a cached block was found when it was reused."""

    SPENT = 0
    PAUSED = 1
    ACTIVE = 2
    UNLABELLED = 3
    SHARED = 4


class _Run(FreeKVCacheBlockQueue):
    """A linked list of free blocks that knows when it last grew."""

    def __init__(self, blocks: list[KVCacheBlock], owner: Program | None, kind: EvictionClass):
        super().__init__(blocks)
        self.owner = owner
        self.kind = kind
        self.grown_at = 0.0
        #: Order among the runs of paused programs: context tokens, then arrival.
        self.rank = (0, 0)


class ProgramFreeQueue(FreeKVCacheBlockQueue):
    """Drop-in for vLLM's free queue.

    ``blocks`` are free and blank, in the order in which they are to be used; ``pool_size`` is the
    number of blocks of the pool, ids 0 to ``pool_size`` - 1.

    ``half_life``: seconds, of the decay score of acting programs. ``now`` is set by the scheduler
    once a step: the queue reads no clock.
    """

    def __init__(self, blocks: list[KVCacheBlock], pool_size: int):
        self.now = 0.0
        self.half_life = 1.0
        self.num_free_blocks = len(blocks)
        #: Cached blocks that were reused, by where they were found.
        self.evicted = [0] * len(EvictionClass)
        self._spent = _Run(blocks, None, EvictionClass.SPENT)
        self._unlabelled = _Run([], None, EvictionClass.UNLABELLED)
        self._shared = _Run([], None, EvictionClass.SHARED)
        self._runs: dict[Program, _Run] = {}
        #: Empty runs: at every turn end one is needed, and to build one takes a while.
        self._spare: list[_Run] = []
        # Active programs' runs in order of growth, oldest first; paused ones by rank.
        self._active: dict[_Run, None] = {}
        self._paused: list[_Run] = []
        self._paused_count = 0
        self._emptied: list[Program] = []
        #: By block id: where a block is, or was when it was free the last time.
        self._run_of: list[_Run | None] = [None] * pool_size
        for block in blocks:
            self._run_of[block.block_id] = self._spent
        self._freed_at = [0.0] * pool_size

    # -- what vLLM calls ---------------------------------------------------------------

    def popleft(self) -> KVCacheBlock:
        if not self.num_free_blocks:
            raise ValueError("No free blocks available")
        return self.popleft_n(1)[0]

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        assert self.num_free_blocks >= n
        if n <= self._spent.num_free_blocks:
            blocks = self._spent.popleft_n(n)
            self._leave(self._spent, blocks)
            return blocks
        popped: list[KVCacheBlock] = []
        while len(popped) < n:
            run = self._next_run()
            # While live runs compete by age, the next block may come from another run.
            take = 1 if self._active and self._unlabelled.num_free_blocks else n - len(popped)
            blocks = run.popleft_n(min(take, run.num_free_blocks))
            self._leave(run, blocks)
            popped += blocks
        return popped

    def remove(self, block: KVCacheBlock) -> None:
        run = self._run_of[block.block_id]
        if run is None:
            raise RuntimeError(f"remove() called on a block that is not free: {block}")
        run.remove(block)
        self.num_free_blocks -= 1
        if not run.num_free_blocks:
            self._forget(run)

    def reference_n(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Add a reference to each block; those that were free leave the queue.

        One loop over every block of every prefix-cache hit. Blocks of a context were freed one
        after the other, so they mostly leave as one stretch of a run, which is cut out at its ends.
        """
        run_of = self._run_of
        run: _Run | None = None
        before: KVCacheBlock | None = None  # the neighbours of the stretch
        after: KVCacheBlock | None = None
        taken = 0
        for block in blocks:
            if not block.ref_cnt and not block.is_null:
                if block is not before:
                    self._cut(run, before, after, taken)
                    run, taken = run_of[block.block_id], 0
                    after = block.next_free_block
                before = block.prev_free_block
                block.prev_free_block = block.next_free_block = None
                taken += 1
            block.ref_cnt += 1
        self._cut(run, before, after, taken)

    def append(self, block: KVCacheBlock) -> None:
        self.append_n([block])

    def append_n(self, blocks: list[KVCacheBlock]) -> None:
        """Free blocks without a program, reused by age."""
        self._enter(self._unlabelled, blocks)
        for block in blocks:
            self._freed_at[block.block_id] = self.now

    def prepend_n(self, blocks: list[KVCacheBlock]) -> None:
        """Free blocks that are reused first."""
        self._spent.prepend_n(blocks)
        self.num_free_blocks += len(blocks)
        for block in blocks:
            self._run_of[block.block_id] = self._spent

    def get_all_free_blocks(self) -> list[KVCacheBlock]:
        """All free blocks; exact reuse order as of ``now``."""
        return list(self.iter_blocks_after(None))

    def iter_blocks_after(self, cursor: KVCacheBlock | None) -> Iterator[KVCacheBlock]:
        """Free blocks in reuse order after ``cursor`` (a free block), or all of them."""
        ordered = self._in_order()
        if cursor is None:
            return ordered
        for block in ordered:
            if block is cursor:
                return ordered
        return iter(())

    # -- what the program pool calls ---------------------------------------------------

    def append_shared(self, blocks: list[KVCacheBlock]) -> None:
        """Free blocks that several programs hold."""
        self._enter(self._shared, blocks)

    def append_owned(self, program: Program, blocks: list[KVCacheBlock]) -> None:
        """Free blocks that only ``program`` holds, in the order in which they are reused."""
        if not blocks:
            return
        run = self._runs.get(program)
        if run is None:
            run = self._spare.pop() if self._spare else _Run([], None, EvictionClass.ACTIVE)
            run.owner, run.kind = program, EvictionClass.ACTIVE
            self._runs[program] = run
            if program.status is Status.PAUSED:
                self._add_paused(run, program)
        if run.kind is EvictionClass.ACTIVE:
            run.grown_at = self.now
            self._active.pop(run, None)
            self._active[run] = None
        self._enter(run, blocks)

    def move_to(self, program: Program, block: KVCacheBlock) -> None:
        """A free block has become ``program``'s alone; that makes nothing of it any newer."""
        self.remove(block)
        run = self._runs.get(program)
        if run is None:
            self.append_owned(program, [block])
        else:
            self._enter(run, [block])

    def program_paused(self, program: Program) -> None:
        """The program lost its claim: its run is reused before anybody's live blocks."""
        run = self._runs.get(program)
        if run is not None and run.kind is EvictionClass.ACTIVE:
            del self._active[run]
            self._add_paused(run, program)

    def program_restored(self, program: Program) -> None:
        """The program has its claim back: its run counts by age again, from now."""
        run = self._runs.get(program)
        if run is not None and run.kind is EvictionClass.PAUSED:
            self._remove_paused(run)
            run.kind = EvictionClass.ACTIVE
            run.grown_at = self.now
            self._active[run] = None

    def take_emptied(self) -> list[Program]:
        """Active programs whose last free block was reused since the last call."""
        emptied, self._emptied = self._emptied, []
        # One that has run since then has blocks again.
        return [program for program in emptied if program not in self._runs]

    def spend(self, block: KVCacheBlock) -> None:
        """Nobody will ask for this free block again."""
        self.remove(block)
        self.prepend_n([block])

    def reset(self) -> None:
        """The prefix cache was reset: all free blocks are blank, in today's reuse order."""
        for block in self.get_all_free_blocks():
            self.remove(block)
            self._enter(self._spent, [block])

    # -- inside ------------------------------------------------------------------------

    def _next_run(self) -> _Run:
        if self._spent.num_free_blocks:
            return self._spent
        if self._paused:
            return self._paused[0]
        oldest = next(iter(self._active), None)
        if oldest is None:
            return self._unlabelled if self._unlabelled.num_free_blocks else self._shared
        head = self._unlabelled.fake_free_list_head.next_free_block
        if head is None or head is self._unlabelled.fake_free_list_tail:
            return oldest
        discounted = discounted_age(self.now - oldest.grown_at, self.half_life)
        return oldest if discounted > self.now - self._freed_at[head.block_id] else self._unlabelled

    def _in_order(self) -> Iterator[KVCacheBlock]:
        yield from chain.from_iterable(
            run.iter_blocks_after(None) for run in (self._spent, *self._paused)
        )
        active = list(self._active)
        for block in self._unlabelled.iter_blocks_after(None):
            age = self.now - self._freed_at[block.block_id]
            while active and discounted_age(self.now - active[0].grown_at, self.half_life) > age:
                yield from active.pop(0).iter_blocks_after(None)
            yield block
        yield from chain.from_iterable(
            run.iter_blocks_after(None) for run in (*active, self._shared)
        )

    def _enter(self, run: _Run, blocks: list[KVCacheBlock]) -> None:
        """Append, with no reference left and its run remembered: a loop over all that is freed."""
        if not blocks:
            return
        run_of = self._run_of
        tail = run.fake_free_list_tail
        last = tail.prev_free_block
        for block in blocks:
            block.prev_free_block = last
            last.next_free_block = block
            last = block
            block.ref_cnt = 0
            run_of[block.block_id] = run
        last.next_free_block = tail
        tail.prev_free_block = last
        run.num_free_blocks += len(blocks)
        self.num_free_blocks += len(blocks)

    def _cut(
        self,
        run: _Run | None,
        before: KVCacheBlock | None,
        after: KVCacheBlock | None,
        blocks: int,
    ) -> None:
        """``blocks`` blocks left ``run`` between two that stay, or its ends."""
        if run is None or before is None or after is None:
            return
        before.next_free_block = after
        after.prev_free_block = before
        self.num_free_blocks -= blocks
        run.num_free_blocks -= blocks
        if not run.num_free_blocks:
            self._forget(run)

    def _leave(self, run: _Run, blocks: list[KVCacheBlock]) -> None:
        self.num_free_blocks -= len(blocks)
        cached = 0
        for block in blocks:
            cached += block._block_hash is not None
        self.evicted[run.kind] += cached
        if not run.num_free_blocks:
            if run.kind is EvictionClass.ACTIVE:
                assert run.owner is not None
                self._emptied.append(run.owner)
            self._forget(run)

    def _forget(self, run: _Run) -> None:
        if run.owner is None:
            return
        del self._runs[run.owner]
        if run.kind is EvictionClass.PAUSED:
            self._remove_paused(run)
        else:
            del self._active[run]
        run.owner = None
        self._spare.append(run)

    def _add_paused(self, run: _Run, program: Program) -> None:
        run.kind = EvictionClass.PAUSED
        self._paused_count += 1
        run.rank = (program.context_tokens, self._paused_count)
        insort(self._paused, run, key=_rank)

    def _remove_paused(self, run: _Run) -> None:
        index = bisect_left(self._paused, run.rank, key=_rank)
        assert self._paused[index] is run
        del self._paused[index]


def _rank(run: _Run) -> tuple[int, int]:
    return run.rank
