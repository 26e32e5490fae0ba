"""How long programs act: learned per tool, per program and overall, and what follows from it.

Tool times are heavy-tailed (most calls end within a second, a few take minutes and are most of
all tool time), so nothing here trusts a mean: times are counted in a histogram of half-octave
buckets, and a decision weighs all of it.
"""

from itertools import pairwise
from math import floor, inf, log2

__all__ = ["ProgramTimes", "ToolTimes"]

#: Upper edge of the first bucket, seconds.
_FIRST_EDGE = 2.0**-6
_BUCKETS_PER_OCTAVE = 2
_BUCKETS = 48
_EDGES = tuple(_FIRST_EDGE * 2 ** (i / _BUCKETS_PER_OCTAVE) for i in range(_BUCKETS))
_MIDDLES = (_EDGES[0] / 2, *(edge * 2 ** (-0.5 / _BUCKETS_PER_OCTAVE) for edge in _EDGES[1:]))
#: What is known otherwise counts as this many samples: after 20 of its own, a tool's or a
#: program's times are its own to five sixths.
_PRIOR_SAMPLES = 4.0
#: A histogram that has this many samples halves them: the last hundred or so count.
_MEMORY_SAMPLES = 128.0
#: Programs that act for so many times as long as nine of ten tools take count as lost.
_PATIENCE = 2.0
#: Before anything is seen, one program in so many that begin to act has ended and nobody says so;
#: this counts as so many programs.
_LOST_PRIOR = 1 / 64
_PRIOR_ENDS = 8.0
#: Weight of a new sample in a program's mean logarithm.
_PROGRAM_WEIGHT = 0.2
#: Probabilities of a return are told apart in steps of this many parts of 1.
_RETURNING_STEPS = 128
#: Tools by name beyond this many are not told apart from others.
_MOST_TOOLS = 1000


class _Histogram:
    """Counts per bucket over a prior, and the decisions computed from them."""

    __slots__ = ("_best", "_counts", "_half_life", "_parent", "_refresh_at", "samples", "total")

    def __init__(self, parent: "_Histogram | None", half_life: float = 1.0):
        self._parent = parent
        self._half_life = half_life
        self._counts = [0.0] * _BUCKETS
        self.total = 0.0
        self.samples = 0
        self._refresh_at = 0
        self._best: dict[tuple[int, int], float] = {}

    def add(self, bucket: int) -> None:
        if self.total >= _MEMORY_SAMPLES:
            self._counts = [count / 2 for count in self._counts]
            self.total /= 2
        self._counts[bucket] += 1
        self.total += 1
        self.samples += 1

    def shares(self) -> list[float]:
        """Probability of each bucket."""
        prior = self._memoryless() if self._parent is None else self._parent.shares()
        over = self.total + _PRIOR_SAMPLES
        return [
            (count + _PRIOR_SAMPLES * share) / over
            for count, share in zip(self._counts, prior, strict=True)
        ]

    def _memoryless(self) -> list[float]:
        """Shares by the decay score f(t); its half-life is the median seen, once there is one.

        However few samples there are, so times beyond the longest of them stay possible.
        """
        half_life = self._half_life
        if self.total >= _PRIOR_SAMPLES:
            at_most = 0.0
            for count, middle in zip(self._counts, _MIDDLES, strict=True):
                at_most += count
                if at_most >= self.total / 2:
                    half_life = middle
                    break
        survival = [1.0, *(2.0 ** -min(edge / half_life, 1000.0) for edge in _EDGES)]
        shares = [before - after for before, after in pairwise(survival)]
        shares[-1] += survival[-1]
        return shares

    def quantile(self, share: float) -> float:
        """Seconds within which this share of what was counted ended: a bucket's edge."""
        ended = 0.0
        for count, edge in zip(self._counts, _EDGES, strict=True):
            ended += count
            if ended >= share * self.total:
                return edge
        return _EDGES[-1]

    def hold_until(self, price_bucket: int, returning: float) -> float:
        """Seconds after which to give up, for a recompute that costs as much as holding for the
        time of that bucket, when a tool ends at all with probability ``returning``; kept until an
        eighth more samples are there, or that probability differs."""
        if self.samples >= self._refresh_at:
            self._refresh_at = self.samples + max(1, min(self.samples, 128) // 8)
            self._best.clear()
        key = (price_bucket, round(returning * _RETURNING_STEPS))
        best = self._best.get(key)
        if best is None:
            best = self._best[key] = _best_hold(
                [share * returning for share in self.shares()], _MIDDLES[price_bucket]
            )
        return best


class ToolTimes:
    """When to stop waiting for a tool.

    ``half_life``, seconds: before a few are seen, a tool has ended after t seconds with
    probability 1 - f(t), f(t) = 2^-(t/half_life) (ThunderAgent, section "Policy").
    """

    def __init__(self, half_life: float):
        self._overall = _Histogram(None, half_life)
        self._tools: dict[str, _Histogram] = {}
        self._mean_log = 0.0
        # Of the last hundred or so times that a program acted: how many, how many were lost.
        self._ended = self._lost = 0.0

    @property
    def samples(self) -> int:
        """Tool times seen."""
        return self._overall.samples

    @property
    def patience(self) -> float:
        """Seconds after which a program that acts counts as lost; inf with few tool times seen."""
        if self.samples < _PRIOR_SAMPLES:
            return inf
        return _PATIENCE * self._overall.quantile(0.9)

    @property
    def returning(self) -> float:
        """Probability that a program which begins to act comes back at all."""
        lost = self._lost + _LOST_PRIOR * _PRIOR_ENDS
        return 1 - lost / (self._ended + _PRIOR_ENDS)

    def lost(self) -> None:
        """A program has acted for longer than ``patience``: most such programs have ended, and
        nobody said so."""
        self.came_back()
        self._lost += 1

    def found(self) -> None:
        """A program that counted as lost came back."""
        self._lost = max(self._lost - 1, 0.0)

    def came_back(self) -> None:
        """A program came back before it counted as lost."""
        if self._ended >= _MEMORY_SAMPLES:
            self._ended /= 2
            self._lost /= 2
        self._ended += 1

    def add(self, seconds: float, tool: str | None, usual: "ProgramTimes") -> None:
        """A program acted for ``seconds`` while ``tool`` (None: not told) ran."""
        bucket = _bucket(seconds)
        self._overall.add(bucket)
        if tool is not None:
            known = self._tools.get(tool)
            if known is None and len(self._tools) < _MOST_TOOLS:
                known = self._tools[tool] = _Histogram(self._overall)
            if known is not None:
                known.add(bucket)
        weight = max(1 / self._overall.samples, 1 / _MEMORY_SAMPLES)
        self._mean_log += weight * (bucket - self._mean_log)
        usual.add(bucket)

    def hold_seconds(
        self, price: float, tool: str | None, usual: "ProgramTimes", returning: float = 1.0
    ) -> float:
        """For how long to hold an acting program's KV before giving it up.

        ``price``, seconds: for how long holding costs as much as recomputing. The answer is the
        T that minimises E[min(t, T)] + P(t > T) * price over the distribution of tool times t of
        ``tool``, if it has been seen, else of all tools shifted to what the program's take; with
        probability 1 - ``returning`` the program has ended and t is endless. With that T the
        expected cost is least among all rules that know no more; it is 0 when holding is not worth
        it at all.
        """
        known = None if tool is None else self._tools.get(tool)
        if known is not None:
            return known.hold_until(_bucket(price), returning)
        # k times longer tools and a price k times as high give a T that is k times longer.
        shift = usual.shift_from(self._mean_log)
        base = _bucket(price) - shift
        best = self._overall.hold_until(min(max(base, 0), _BUCKETS - 1), returning)
        return best * 2 ** (shift / _BUCKETS_PER_OCTAVE)


class ProgramTimes:
    """What one program's tools usually take, in buckets."""

    __slots__ = ("_mean_log", "_samples")

    def __init__(self) -> None:
        self._mean_log = 0.0
        self._samples = 0

    def add(self, bucket: int) -> None:
        self._samples += 1
        weight = max(1 / self._samples, _PROGRAM_WEIGHT)
        self._mean_log += weight * (bucket - self._mean_log)

    def shift_from(self, mean_log: float) -> int:
        """Buckets by which its times are longer than usual; few samples count little."""
        if not self._samples:
            return 0
        own = self._samples / (_PRIOR_SAMPLES + self._samples)
        return round(own * (self._mean_log - mean_log))


def _bucket(seconds: float) -> int:
    """The first bucket whose upper edge is not below ``seconds``."""
    if seconds <= _FIRST_EDGE:
        return 0
    return min(-floor(-log2(seconds / _FIRST_EDGE) * _BUCKETS_PER_OCTAVE), _BUCKETS - 1)


def _best_hold(shares: list[float], price: float) -> float:
    """The bucket edge T, or 0, with the least E[min(t, T)] + P(t > T) * price.

    ``shares`` add up to less than 1 where t may be endless.
    """
    best, least = 0.0, price
    ended, held = 0.0, 0.0
    for share, middle, edge in zip(shares, _MIDDLES, _EDGES, strict=True):
        ended += share
        held += share * middle
        cost = held + (1 - ended) * (edge + price)
        if cost < least - 1e-9:
            best, least = edge, cost
    return best
