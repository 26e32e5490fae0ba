"""The queue of free blocks by itself: whatever leaves or enters, the rest keeps its place."""

import random

import pytest
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from vllm_thunder.engine.free_queue import ProgramFreeQueue
from vllm_thunder.program.program import Program, Status

POOL = 48


class Model:
    """The queue beside a plain record of which blocks are free."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.blocks = [KVCacheBlock(block_id) for block_id in range(POOL)]
        self.blocks[0].is_null = True
        self.queue = ProgramFreeQueue(self.blocks[1:], POOL)
        self.programs = [
            Program(f"p{n}", created_at=0.0, status=Status.ACTIVE, context_tokens=n % 3)
            for n in range(4)
        ]
        self.free = {block.block_id for block in self.blocks[1:]}

    def used(self, count):
        """Some blocks in use that nobody else uses, in an order of no meaning; they are let go."""
        held = [b for b in self.blocks[1:] if b.ref_cnt == 1]
        chosen = self.random.sample(held, min(count, len(held)))
        self.free |= {block.block_id for block in chosen}
        for block in chosen:
            block.ref_cnt = 0
        return chosen

    def order(self):
        return [block.block_id for block in self.queue.get_all_free_blocks()]

    def stretch(self):
        """Blocks as a prefix-cache hit finds them: stretches of the queue in either direction,
        blocks in use, and the null block."""
        hit = [self.blocks[0]] * self.random.randrange(2)
        order = self.queue.get_all_free_blocks()
        for _ in range(self.random.randrange(1, 4)):
            start = self.random.randrange(len(order) + 1)
            part = order[start : start + self.random.randrange(6)]
            hit += part[:: self.random.choice((1, -1))]
        hit += [b for b in self.blocks[1:] if b.ref_cnt and self.random.random() < 0.1]
        if self.random.random() < 0.2:
            self.random.shuffle(hit)
        return list({block.block_id: block for block in hit}.values())

    def step(self):
        queue, kind = self.queue, self.random.randrange(9)
        queue.now += self.random.random()
        program = self.random.choice(self.programs)
        before, left = self.order(), set()
        if kind < 2 and before:
            blocks = queue.popleft_n(self.random.randrange(1, len(before) + 1))
            assert [b.block_id for b in blocks] == before[: len(blocks)]
            for block in blocks:
                block.ref_cnt = 1
            left = {b.block_id for b in blocks}
        elif kind < 4:
            hit = self.stretch()
            references = {b.block_id: b.ref_cnt for b in hit}
            queue.reference_n(hit)
            assert all(b.ref_cnt == references[b.block_id] + 1 for b in hit)
            left = {n for n, count in references.items() if not count and n}
            assert [n for n in before if n not in left] == self.order()
        elif kind == 4:
            queue.append_owned(program, self.used(9))
        elif kind == 5:
            queue.append_n(self.used(5))
        elif kind == 6:
            queue.append_shared(self.used(5))
        elif kind == 7:
            queue.prepend_n(self.used(3))
        elif program.status is Status.ACTIVE:
            program.status = Status.PAUSED
            queue.program_paused(program)
        else:
            program.status = Status.ACTIVE
            queue.program_restored(program)
        self.free -= left
        self.check()

    def check(self):
        order = self.order()
        assert sorted(order) == sorted(self.free)
        assert self.queue.num_free_blocks == len(order)
        for block in self.blocks[1:]:
            linked = block.prev_free_block is not None, block.next_free_block is not None
            assert linked == (block.block_id in self.free,) * 2
            if linked[0]:
                assert block.prev_free_block.next_free_block is block
                assert block.next_free_block.prev_free_block is block


@pytest.mark.parametrize("seed", range(20))
def test_what_stays_keeps_its_place(seed):
    model = Model(seed)
    for _ in range(200):
        model.step()


def test_a_block_that_is_not_free_cannot_be_taken_out():
    model = Model(0)
    (block,) = model.queue.popleft_n(1)
    with pytest.raises(RuntimeError, match="invalid block"):
        model.queue.remove(block)
