"""The cost model: what holding KV costs, what recomputing it costs, and what is learned of both."""

from math import ceil

__all__ = ["Ewma", "PrefillRate", "blocks_for", "decay", "stretched_age"]


def blocks_for(tokens: float, block_size: int) -> int:
    """KV blocks that ``tokens`` tokens occupy."""
    return ceil(tokens / block_size)


def decay(seconds: float, half_life: float) -> float:
    """The decay score f(t) = 2^(-t / half_life), in (0, 1], of an acting program.

    ThunderAgent (arXiv 2602.13692), section "Policy": f(t) = 2^-t with t in seconds, the only
    time-homogeneous choice when tool times are memoryless. ``half_life`` generalises its base.
    """
    exponent = seconds / half_life
    return 0.0 if exponent > 1000 else 2.0**-exponent


def stretched_age(seconds: float, half_life: float) -> float:
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


class PrefillRate:
    """Tokens per second at which this engine prefills, measured from its own steps.

    A step counts by the prefill tokens in it, so that decode-only steps say nothing and a full
    prefill chunk says most.
    """

    __slots__ = ("_seconds", "_tokens")

    #: Prefill tokens over which the estimate forgets half of what it knew.
    MEMORY_TOKENS = 50_000

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        """Count one step with ``tokens`` prefill tokens that took ``seconds``."""
        if tokens <= 0 or seconds <= 0:
            return
        keep = 0.5 ** (tokens / self.MEMORY_TOKENS)
        self._tokens = self._tokens * keep + tokens
        self._seconds = self._seconds * keep + seconds

    @property
    def tokens_per_second(self) -> float | None:
        """None until a step with prefill tokens was seen."""
        return self._tokens / self._seconds if self._seconds else None
