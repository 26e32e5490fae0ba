"""The followed prefix cache beside a plain one that keeps every block."""

from itertools import count

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from vllm_thunder.coordinator.logical.cache import PrefixCache
from vllm_thunder.program.errors import IntegrityError
from vllm_thunder.program.program import Program

BLOCK = 16


class PlainCache:
    """Blocks with their content in a list, reused as stock vLLM does: blank ones first, then the
    content that was freed the longest ago; of one request its last block is freed first."""

    def __init__(self, blocks):
        self.free = [None] * blocks
        self.new_content = count()

    def cached(self, content):
        """How many leading blocks of a content are there."""
        there = set(self.free)
        return next((n for n, key in enumerate(content) if key not in there), len(content))

    def take(self, blocks):
        assert blocks <= len(self.free)
        del self.free[:blocks]

    def use(self, content):
        for key in content:
            self.free.remove(key)

    def release(self, content, blank):
        self.free[:0] = [None] * blank
        self.free += reversed(content)


class ExactMachine(RuleBasedStateMachine):
    """Whatever runs at once, one request of a program at a time, as long as memory is enough for
    what runs: the same content is there."""

    CAPACITY = 24

    def __init__(self):
        super().__init__()
        self.cache = PrefixCache(self.CAPACITY, BLOCK)
        self.plain = PlainCache(self.CAPACITY)
        self.programs = [Program(str(n), created_at=0.0) for n in range(4)]
        self.context = [[] for _ in self.programs]
        # By program, None for a request without one: the use, the prompt's keys, blocks held.
        self.running = {}

    def _full(self, tokens):
        return max(tokens - 1, 0) // BLOCK

    @rule(p=st.integers(0, 3), tokens=st.integers(1, 12 * BLOCK), continues=st.booleans())
    def begin(self, p, tokens, continues):
        if p in self.running:
            return
        context = self.context[p] if continues else []
        found = context[: self._full(tokens)]
        hits = self.plain.cached(found)
        needed = -(-tokens // BLOCK)
        if needed - hits > len(self.plain.free) - hits:
            return
        self.plain.use(found[:hits])
        self.plain.take(needed - hits)
        if continues:
            self.context[p] = found[:hits]
        prompt = found[:hits] + [next(self.plain.new_content) for _ in range(needed - hits)]
        use = self.cache.begin(self.programs[p], tokens, continues=continues)
        assert (use.hits, use.own) == (hits, needed - hits)
        self.running[p] = use, prompt, tokens

    @rule(tokens=st.integers(1, 6 * BLOCK))
    def begin_unlabelled(self, tokens):
        needed = -(-tokens // BLOCK)
        if None not in self.running and needed <= len(self.plain.free):
            self.plain.take(needed)
            use = self.cache.begin(None, tokens, continues=False)
            keys = [next(self.plain.new_content) for _ in range(needed)]
            self.running[None] = use, keys, tokens

    @precondition(lambda self: self.running)
    @rule(data=st.data(), output=st.none() | st.integers(1, 60), replaces=st.booleans())
    def end(self, data, output, replaces):
        p = data.draw(st.sampled_from(sorted(self.running, key=str)))
        use, keys, tokens = self.running.pop(p)
        left = None if output is None else tokens + output
        hits = use.hits
        if left is None:
            kept, blank = keys[:hits], len(keys) - hits
        else:
            missing = max(-(-(left - 1) // BLOCK) - len(keys), 0)
            missing = min(missing, len(self.plain.free))
            self.plain.take(missing)
            keys = keys + [next(self.plain.new_content) for _ in range(missing)]
            kept = keys[: self._full(left)]
            blank = len(keys) - len(kept)
        self.plain.release(kept, blank)
        if p is not None and (use.continues or (replaces and left is not None)):
            self.context[p] = kept
        self.cache.end(use, left, replaces=replaces and left is not None)

    @rule(p=st.integers(0, 3))
    def forget(self, p):
        if p not in self.running:
            self.cache.forget(self.programs[p])
            self.programs[p].resident_blocks = 0
            self.context[p] = []

    @rule()
    def reset(self):
        self.cache.reset()
        self.plain.free = [None] * len(self.plain.free)

    @invariant()
    def the_same_is_there(self):
        self.cache.check_integrity()
        assert self.cache.free_blocks == len(self.plain.free)
        for p, program in enumerate(self.programs):
            if p not in self.running:
                assert program.resident_blocks == self.plain.cached(self.context[p])


class CrowdedMachine(RuleBasedStateMachine):
    """Requests of one program overlap and more run than memory is there for: no block is lost."""

    CAPACITY = 20

    def __init__(self):
        super().__init__()
        self.cache = PrefixCache(self.CAPACITY, BLOCK)
        self.programs = [Program(str(n), created_at=0.0) for n in range(3)]
        self.running = []

    @rule(
        p=st.none() | st.integers(0, 2),
        tokens=st.integers(1, 30 * BLOCK),
        continues=st.booleans(),
    )
    def begin(self, p, tokens, continues):
        program = None if p is None else self.programs[p]
        expected = None if p is None else self.cache.cached_tokens(program, tokens)
        use = self.cache.begin(program, tokens, continues=continues)
        if use.continues:
            assert use.hits * BLOCK == expected < tokens
        self.running.append((use, tokens))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def computed(self, data):
        self.cache.computed(data.draw(st.sampled_from(self.running))[0])

    @precondition(lambda self: self.running)
    @rule(data=st.data(), change=st.none() | st.integers(-200, 200), replaces=st.booleans())
    def end(self, data, change, replaces):
        use, tokens = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        left = None if change is None else max(tokens + change, 0)
        self.cache.end(use, left, replaces=replaces and left is not None)

    @rule(p=st.integers(0, 2))
    def forget(self, p):
        program = self.programs[p]
        if any(use.program is program and use.continues for use, _ in self.running):
            with pytest.raises(IntegrityError, match="running"):
                self.cache.forget(program)
        else:
            self.cache.forget(program)
            self.programs[p] = Program(str(p), created_at=0.0)
            self.running = [
                (use, tokens) for use, tokens in self.running if not self._end_if(use, program)
            ]

    def _end_if(self, use, program):
        if use.program is program:
            self.cache.end(use, None)
        return use.program is program

    @rule()
    def reset(self):
        self.cache.reset()

    @invariant()
    def nothing_is_lost(self):
        self.cache.check_integrity()
        resident = sum(program.resident_blocks for program in self.programs)
        assert resident + self.cache.unlabelled_blocks <= self.CAPACITY
        assert 0 <= self.cache.free_blocks <= self.CAPACITY
        assert self.cache.is_short == any(use.own < use.wanted for use, _ in self.running)
        if self.cache.is_short:
            assert self.cache.free_blocks == 0

    def teardown(self):
        while self.running:
            self.cache.end(self.running.pop(0)[0], None)
        self.nothing_is_lost()
        assert self.cache.free_blocks == self.CAPACITY


TestExact = ExactMachine.TestCase
TestExact.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
TestCrowded = CrowdedMachine.TestCase
TestCrowded.settings = TestExact.settings


def run(cache, program, tokens, output=1):
    use = cache.begin(program, tokens, continues=True)
    cache.end(use, tokens + output)
    return use


def test_the_oldest_context_loses_its_tail_first():
    cache = PrefixCache(10, BLOCK)
    old, young, new = (Program(name, created_at=0.0) for name in ("old", "young", "new"))
    run(cache, old, 4 * BLOCK)
    run(cache, young, 4 * BLOCK)
    run(cache, new, 5 * BLOCK)  # 2 blocks are blank, 3 are reused
    assert [p.resident_blocks for p in (old, young, new)] == [1, 4, 5]
    assert run(cache, old, 6 * BLOCK).hits == 1  # its own turn does not reuse what it found
    assert [p.resident_blocks for p in (old, young, new)] == [6, 0, 4]


def test_a_prompt_is_never_found_whole_and_a_context_never_to_its_last_token():
    cache = PrefixCache(10, BLOCK)
    program = Program("p", created_at=0.0)
    use = cache.begin(program, 3 * BLOCK, continues=True)
    cache.end(use, 4 * BLOCK)
    assert program.resident_blocks == 3
    assert cache.cached_tokens(program, 3 * BLOCK) == 2 * BLOCK
    assert cache.cached_tokens(program, 3 * BLOCK + 1) == 3 * BLOCK


def test_what_waits_for_blocks_gets_them_in_order():
    cache = PrefixCache(10, BLOCK)
    first = cache.begin(None, 8 * BLOCK, continues=False)
    second = cache.begin(None, 5 * BLOCK, continues=False)
    third = cache.begin(None, BLOCK, continues=False)
    assert (second.own, third.own, cache.is_short) == (2, 0, True)
    cache.end(first, 8 * BLOCK)
    assert (second.own, third.own, cache.is_short) == (5, 1, False)


def test_an_engine_without_a_prefix_cache_keeps_nothing():
    cache = PrefixCache(10, BLOCK, keeps=False)
    program = Program("p", created_at=0.0)
    run(cache, program, 4 * BLOCK)
    assert program.resident_blocks == 0
    assert cache.cached_tokens(program, 5 * BLOCK) == 0
    assert cache.free_blocks == 10
    cache.check_integrity()


def test_check_integrity_sees_a_lost_block():
    cache = PrefixCache(10, BLOCK)
    program = Program("p", created_at=0.0)
    run(cache, program, 4 * BLOCK)
    program.resident_blocks -= 1
    with pytest.raises(IntegrityError, match="resident"):
        cache.check_integrity()
    program.resident_blocks += 1
    cache.begin(None, BLOCK, continues=False).own -= 1
    with pytest.raises(IntegrityError, match="9 of 10"):
        cache.check_integrity()
