"""The cost model: what holding KV costs, what recomputing it costs, and what is learned of both."""

from collections.abc import Sequence
from math import ceil

__all__ = ["ContextBlocks", "Ewma", "PrefillCost", "decay", "discounted_age"]


class ContextBlocks:
    """How many KV blocks a context occupies, over all KV-cache groups of a model.

    ``groups``: for each group its block size and, where its layers look back only so far
    (sliding window, chunked, state space), the number of tokens that it keeps; both in tokens.
    """

    def __init__(self, groups: Sequence[tuple[int, int | None]]):
        self._groups = tuple(groups)
        #: Tokens of a block, where all layers keep all of a context: asked for at every decision.
        self._only_block_size = groups[0][0] if len(groups) == 1 and groups[0][1] is None else None

    def __call__(self, tokens: float) -> int:
        """Blocks in use by one running request with ``tokens`` tokens of context."""
        if self._only_block_size is not None:
            return -int(-tokens // self._only_block_size)
        total = 0
        for block_size, kept in self._groups:
            blocks = ceil(tokens / block_size)
            # A window rarely starts at a block's edge: one more block is partly in it.
            total += blocks if kept is None else min(blocks, ceil(kept / block_size) + 1)
        return total

    def tokens_in(self, blocks: int) -> float:
        """Tokens of many long contexts that ``blocks`` blocks hold."""
        per_token = sum(1 / block_size for block_size, kept in self._groups if kept is None)
        if not per_token:  # only windows: each context costs the same, however long
            per_token = sum(1 / block_size for block_size, _ in self._groups)
        return blocks / per_token


def decay(seconds: float, half_life: float) -> float:
    """The decay score f(t) = 2^(-t / half_life), in (0, 1], of an acting program.

    ThunderAgent (arXiv 2602.13692), section "Policy": f(t) = 2^-t with t in seconds, the only
    time-homogeneous choice when tool times are memoryless. ``half_life`` generalises its base.
    """
    exponent = seconds / half_life
    return 0.0 if exponent > 1000 else 2.0**-exponent


def discounted_age(seconds: float, half_life: float) -> float:
    """The age, in seconds, at which an acting program's free block competes for reuse.

    The true age weighted with 1 - f(t): a program that has just begun to act looks new,
    one that has acted for many half-lives looks as old as an unlabelled block.
    """
    return seconds * (1.0 - decay(seconds, half_life))


class Ewma:
    """Exponentially weighted mean that starts as a plain one.

    The prior counts as ``prior_samples`` samples: with 0 the first sample replaces it.
    """

    __slots__ = ("samples", "value", "weight")

    def __init__(self, prior: float, weight: float, prior_samples: int = 0):
        self.value = prior
        self.weight = weight
        self.samples = prior_samples

    def add(self, sample: float) -> None:
        """Count one sample; never with less weight than ``weight``."""
        self.samples += 1
        self.value += max(self.weight, 1.0 / self.samples) * (sample - self.value)


class PrefillCost:
    """Seconds that prefilling takes on this engine, measured from its own steps.

    The model is t = a * n + b * q for a step with n prompt tokens whose positions add up to q:
    a is the work of a token by itself, b * position its attention over the context before it.
    Both are least squares over the steps seen, with older ones forgotten, so they follow the
    model, the hardware and the context lengths in use. A step counts by its prompt tokens: steps
    that only decode say nothing, a full prefill chunk says most.
    """

    __slots__ = ("_fitted", "_nn", "_nq", "_nt", "_qq", "_qt", "_seconds", "_tokens")

    #: Prompt tokens after which a step counts half.
    MEMORY_TOKENS = 50_000

    def __init__(self) -> None:
        self._nn = self._nq = self._qq = self._nt = self._qt = 0.0
        self._tokens = self._seconds = 0.0
        self._fitted: tuple[float, float] | None = None

    def add(self, tokens: int, positions: float, seconds: float) -> None:
        """Count one step with ``tokens`` prompt tokens, whose positions add up to ``positions``,
        that took ``seconds``."""
        if tokens <= 0 or seconds <= 0:
            return
        self._fitted = None
        keep = 0.5 ** (tokens / self.MEMORY_TOKENS)
        self._nn = self._nn * keep + tokens * tokens
        self._nq = self._nq * keep + tokens * positions
        self._qq = self._qq * keep + positions * positions
        self._nt = self._nt * keep + tokens * seconds
        self._qt = self._qt * keep + positions * seconds
        self._tokens = self._tokens * keep + tokens
        self._seconds = self._seconds * keep + seconds

    @property
    def tokens_per_second(self) -> float | None:
        """Mean rate of the prompts seen lately; None until there was one."""
        return self._tokens / self._seconds if self._seconds else None

    @property
    def fitted(self) -> tuple[float, float] | None:
        """a and b, seconds per token and per position; None as above."""
        if not self._seconds:
            return None
        if self._fitted is None:
            self._fitted = self._fit()
        return self._fitted

    def seconds(self, start: float, end: float) -> float | None:
        """Time to prefill the tokens from position ``start`` to ``end``; None as above."""
        fitted = self.fitted
        if fitted is None:
            return None
        per_token, per_position = fitted
        return per_token * (end - start) + per_position * (end * end - start * start) / 2

    def _fit(self) -> tuple[float, float]:
        """a and b, neither negative."""
        determinant = self._nn * self._qq - self._nq * self._nq
        if determinant > 1e-6 * self._nn * self._qq:  # else all steps were alike
            a = (self._nt * self._qq - self._qt * self._nq) / determinant
            b = (self._qt * self._nn - self._nt * self._nq) / determinant
            if a >= 0 and b >= 0:
                return a, b
            if a < 0:
                return 0.0, self._qt / self._qq
        return self._nt / self._nn, 0.0
