"""The prefix cache of an engine that reports none, as far as it can be followed from outside.

Stock vLLM and SGLang reuse blank blocks first, then the content that was used the longest ago, of
one context its tail before its head. Who knows how large the contexts are that turns leave behind,
and in which order the turns ran, can count what is still there. What several programs have in
common cannot be seen from outside and is counted for each of them.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

from vllm_thunder.program.errors import IntegrityError
from vllm_thunder.program.program import Program

__all__ = ["PrefixCache", "Use"]


@dataclass(slots=True, eq=False)
class Use:
    """What one running request has of the cache, in blocks.

    ``hits``: leading blocks of its program's context that it found and shares with the program's
    other requests. ``own``: what was allocated for it, of the ``wanted`` that it needs.
    """

    program: Program | None
    continues: bool
    hits: int = 0
    own: int = 0
    wanted: int = 0
    computed: bool = False


@dataclass(slots=True, eq=False)
class _Span:
    """Blocks from the start of a program's context; without an owner they are content that nobody
    will ask for again."""

    owner: Program | None
    blocks: int


@dataclass(slots=True, eq=False)
class _Context:
    """What is in memory of one program's context, and what its running requests will make of it.

    ``latest``: what the request that ended last found and left, until no other one runs.
    """

    span: _Span
    uses: dict[Use, None] = field(default_factory=dict)
    latest: Use | None = None
    #: Blocks of requests that ended before ``latest`` did.
    stale: int = 0


class PrefixCache:
    """Counts blocks; writes ``Program.resident_blocks``.

    ``capacity_blocks`` blocks of ``block_size`` tokens. ``keeps`` is false for an engine that
    forgets a context when its request ends (prefix caching off). While several requests of one
    program run, their blocks stay in use until the last of them ends.
    """

    def __init__(self, capacity_blocks: int, block_size: int, *, keeps: bool = True):
        self.capacity_blocks = capacity_blocks
        self.block_size = block_size
        self.keeps = keeps
        self._blank = capacity_blocks
        #: What can be reused, the first to go first.
        self._queue: OrderedDict[_Span, None] = OrderedDict()
        self._queued = 0
        self._contexts: dict[Program, _Context] = {}
        self._uses: dict[Use, None] = {}
        #: Requests that lack blocks, in the order in which they get them.
        self._short: dict[Use, None] = {}
        #: Blocks of requests without a program.
        self.unlabelled_blocks = 0
        self._changed: dict[Program, None] = {}

    @property
    def free_blocks(self) -> int:
        """Blocks that no running request uses."""
        return self._blank + self._queued

    @property
    def is_short(self) -> bool:
        """Whether a request waits for blocks in the engine."""
        return bool(self._short)

    def take_changed(self) -> list[Program]:
        """Programs whose residency changed since the last call."""
        changed = list(self._changed)
        self._changed.clear()
        return changed

    def cached_tokens(self, program: Program, prompt_tokens: int) -> int:
        """Tokens of a prompt that continues the program's context that are there already."""
        context = self._contexts.get(program)
        if context is None:
            return 0
        return min(context.span.blocks, self._kept(prompt_tokens)) * self.block_size

    def begin(self, program: Program | None, prompt_tokens: int, *, continues: bool) -> Use:
        """A request runs; ``continues``: its prompt begins as its program's context does."""
        use = Use(program, continues and program is not None)
        if program is not None and continues:
            context = self._contexts.get(program)
            if context is None:
                context = self._contexts[program] = _Context(_Span(program, 0))
            use.hits = self._pin(context, use, self._kept(prompt_tokens))
        self._uses[use] = None
        use.wanted = self._needed(prompt_tokens) - use.hits
        if not self._short:  # else others come first
            self._allocate(use, use.wanted)
        if use.own < use.wanted:
            self._short[use] = None
        return use

    def computed(self, use: Use) -> None:
        """The prompt is computed."""
        use.computed = True
        if use.continues:
            assert use.program is not None
            self._count_resident(use.program)

    def end(self, use: Use, tokens: int | None, *, replaces: bool = False) -> None:
        """The request ended and leaves the KV of ``tokens`` tokens behind, those that it found
        included; None: nothing that it computed is of use.

        ``replaces``: of a request that did not continue its program's context, the context is now
        what it leaves.
        """
        self._short.pop(use, None)
        del self._uses[use]
        if tokens is not None:
            use.hits = min(use.hits, self._kept(tokens))
            missing = self._needed(tokens - 1) - use.hits - use.own
            if missing > 0 and not self._short:
                self._allocate(use, missing)
        kept = 0
        if tokens is not None and self.keeps:
            kept = min(self._kept(tokens) - use.hits, use.own)
        self._blank += use.own - kept
        if use.program is None:
            self.unlabelled_blocks -= use.own
        use.own = kept
        if use.program is not None and use.continues:
            self._unpin(use.program, use, completed=tokens is not None)
        elif use.program is not None and replaces and self._forget_context(use.program):
            self._contexts[use.program] = context = _Context(_Span(use.program, kept))
            self._release_span(context.span)
            self._count_resident(use.program)
        else:
            self._release_span(_Span(None, kept))
        self._serve()

    def forget(self, program: Program) -> None:
        """The program is gone; its blocks stay until others need them."""
        if not self._forget_context(program):
            raise IntegrityError(f"{program!r} has requests running and cannot be forgotten")
        self._changed.pop(program, None)

    def reset(self) -> None:
        """The engine dropped everything that no request uses."""
        self._blank += self._queued
        self._queue.clear()
        self._queued = 0
        for program, context in list(self._contexts.items()):
            if not context.uses:
                context.span.blocks = 0
                self._count_resident(program)
        self._serve()

    def check_integrity(self) -> None:
        """Raise IntegrityError where blocks are lost or counted twice."""
        problems = []
        contexts = self._contexts.values()
        if self._queued != sum(span.blocks for span in self._queue):
            problems.append(f"{self._queued} blocks are said to be in the queue")
        pinned = sum(c.span.blocks for c in contexts if c.uses)
        ended = sum(c.stale + (c.latest.own if c.latest else 0) for c in contexts)
        used = sum(use.own for use in self._uses)
        total = self._blank + self._queued + pinned + ended + used
        if total != self.capacity_blocks or self._blank < 0:
            problems.append(f"{total} of {self.capacity_blocks} blocks, {self._blank} blank")
        if self.unlabelled_blocks != sum(u.own for u in self._uses if u.program is None):
            problems.append(f"{self.unlabelled_blocks} blocks without a program")
        if any(span.blocks <= 0 for span in self._queue):
            problems.append("an empty span is in the queue")
        for program, context in self._contexts.items():
            if context.span.owner is not program:
                problems.append(f"{program!r} does not own its context")
            if (context.span in self._queue) == bool(context.uses or not context.span.blocks):
                problems.append(f"{program!r}: its context is in the queue, or should be")
            if program.resident_blocks != self._resident(context):
                problems.append(f"{program!r}: {self._resident(context)} blocks are resident")
        for use in self._short:
            if use not in self._uses or use.own >= use.wanted:
                problems.append(f"{use!r} is short of blocks, but is not")
        if problems:
            raise IntegrityError("; ".join(problems))

    # -- inside ------------------------------------------------------------------------

    def _needed(self, tokens: int) -> int:
        """Blocks that so many tokens take."""
        return max(-(-tokens // self.block_size), 0)

    def _kept(self, tokens: int) -> int:
        """Blocks of so many tokens that another request can find: full ones, and never the last
        token, which was sampled and not computed, or of a prompt has to be computed anyway."""
        return max(tokens - 1, 0) // self.block_size

    def _pin(self, context: _Context, use: Use, most: int) -> int:
        """The request uses up to ``most`` leading blocks of the context: they cannot be reused.
        What is behind them stays in the queue where it is, and is nobody's."""
        span = context.span
        hits = min(span.blocks, most)
        if span in self._queue:
            self._queued -= hits
            if hits == span.blocks:
                del self._queue[span]
            else:
                span.blocks -= hits
                context.span = _Span(span.owner, hits)
                span.owner = None
        context.uses[use] = None
        assert use.program is not None
        self._count_resident(use.program)
        return hits

    def _unpin(self, program: Program, use: Use, *, completed: bool) -> None:
        context = self._contexts[program]
        del context.uses[use]
        if completed:
            context.stale += context.latest.own if context.latest else 0
            context.latest = use
        if not context.uses:
            latest, left = context.latest, context.span.blocks
            hits, own = (latest.hits, latest.own) if latest else (left, 0)
            self._release_span(_Span(None, context.stale + left - hits))
            context.stale, context.latest = 0, None
            context.span = _Span(program, hits + own)
            self._release_span(context.span)
        self._count_resident(program)

    def _release_span(self, span: _Span) -> None:
        if span.blocks:
            self._queue[span] = None
            self._queued += span.blocks

    def _allocate(self, use: Use, blocks: int) -> None:
        taken = min(blocks, self._blank)
        self._blank -= taken
        while taken < blocks and self._queue:
            span = next(iter(self._queue))
            some = min(span.blocks, blocks - taken)
            span.blocks -= some
            self._queued -= some
            taken += some
            if not span.blocks:
                del self._queue[span]
            if span.owner is not None:
                self._count_resident(span.owner)
        use.own += taken
        if use.program is None:
            self.unlabelled_blocks += taken

    def _serve(self) -> None:
        """Blocks became free: who lacked some gets them, in order."""
        for use in list(self._short):
            self._allocate(use, use.wanted - use.own)
            if use.computed and use.continues:
                assert use.program is not None
                self._count_resident(use.program)
            if use.own < use.wanted:
                return
            del self._short[use]

    def _forget_context(self, program: Program) -> bool:
        """False, and nothing changes, while requests use it."""
        context = self._contexts.get(program)
        if context is None:
            return True
        if context.uses:
            return False
        context.span.owner = None
        del self._contexts[program]
        return True

    def _resident(self, context: _Context) -> int:
        """The most that one request would find: what is computed and not reused."""
        computed = [use.hits + use.own for use in context.uses if use.computed]
        if context.latest is not None:
            computed.append(context.latest.hits + context.latest.own)
        return max(context.span.blocks, *computed) if computed else context.span.blocks

    def _count_resident(self, program: Program) -> None:
        context = self._contexts[program]
        resident = self._resident(context)
        if resident != program.resident_blocks:
            program.resident_blocks = resident
            self._changed[program] = None
        if not resident and not context.uses and context.latest is None:
            del self._contexts[program]
