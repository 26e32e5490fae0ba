"""Programs without a turn in flight, and which of them are to be forgotten when."""

from collections.abc import Iterator

from vllm_thunder.coordinator.fleet.tracked import Tracked
from vllm_thunder.program.ranked import Ranked

__all__ = ["Resting"]


class Resting:
    """In the order in which their last turns ended.

    An engine tells when it forgets a program of its own. One that no engine has told of, or whose
    engine is gone, is forgotten here at the time that it is put with.
    """

    def __init__(self) -> None:
        self._since: dict[Tracked, None] = {}
        self._until: Ranked[Tracked] = Ranked()

    def __contains__(self, program: Tracked) -> bool:
        return program in self._since

    def __iter__(self) -> Iterator[Tracked]:
        return iter(self._since)

    @property
    def forgotten_here(self) -> set[Tracked]:
        """Those that no engine will tell of."""
        return set(self._until)

    def put(self, program: Tracked, until: float | None = None) -> None:
        """It rests; ``until``: no engine will tell when it is to be forgotten, so then."""
        self._since[program] = None
        if until is not None:
            self._until.put(program, until)

    def known(self, program: Tracked) -> None:
        """An engine has told of it, and will tell when it forgets it."""
        self._until.discard(program)

    def discard(self, program: Tracked) -> None:
        """It rests no more, or is forgotten."""
        self._since.pop(program, None)
        self._until.discard(program)

    def longest(self) -> Tracked | None:
        """Whose last turn ended the longest ago."""
        return next(iter(self._since), None)

    def to_forget(self, now: float) -> list[Tracked]:
        """Those whose time is over."""
        return list(self._until.until(now))

    def next_change(self, now: float, never: float) -> float:
        """When the next one is to be forgotten; ``never`` if none is."""
        return self._until.next_rank(now, never)
