"""Where a program that waits goes: pure decisions over rooms.

ThunderAgent (arXiv 2602.13692, section "Global queue") places paused programs best-fit-decreasing,
away from where their KV was. We weigh that: to move costs the prefill of what is still resident at
home, so a program waits for its home as long as that would cost, and no longer. Knowing nothing of
when its home has room, it then pays at most twice what knowing would have cost (ski rental).
"""

from bisect import bisect_left, insort
from collections.abc import Iterable
from typing import NamedTuple

from vllm_thunder.coordinator.backend import Backend
from vllm_thunder.coordinator.tracked import Tracked

__all__ = ["Choice", "Rooms", "choose", "head_of"]


class Choice(NamedTuple):
    """``backend`` is None when the program goes on waiting; ``reason`` is for people."""

    backend: Backend | None
    reason: str


class Rooms:
    """Usable backends by unclaimed blocks, so that the best fit is a binary search."""

    def __init__(self) -> None:
        self._sorted: list[tuple[float, int, Backend]] = []
        self._entry_of: dict[Backend, tuple[float, int, Backend]] = {}
        self._added = 0
        self._positive = 0.0

    def __len__(self) -> int:
        return len(self._sorted)

    def __contains__(self, backend: Backend) -> bool:
        return backend in self._entry_of

    @property
    def total(self) -> float:
        """Sum of the rooms of those that have any."""
        return max(self._positive, 0.0)

    def update(self, backend: Backend) -> None:
        """The backend's room, seats or health changed."""
        self._remove(backend)
        report = backend.report
        if not backend.usable or report is None:
            return
        # Without a seat nothing runs, whatever memory there is.
        seats = report.free_seats - len(backend.placed)
        room = backend.room if seats > 0 else min(backend.room, 0.0)
        self._added += 1
        entry = (room, self._added, backend)
        insort(self._sorted, entry)
        self._entry_of[backend] = entry
        self._positive += max(room, 0.0)

    def of(self, backend: Backend) -> float | None:
        """None for a backend that is not usable."""
        entry = self._entry_of.get(backend)
        return None if entry is None else entry[0]

    def best_fit(self, blocks: float) -> Backend | None:
        """The backend with the least room that is enough."""
        at = bisect_left(self._sorted, (blocks, 0))
        return self._sorted[at][2] if at < len(self._sorted) else None

    def largest(self) -> Backend | None:
        return self._sorted[-1][2] if self._sorted else None

    def _remove(self, backend: Backend) -> None:
        entry = self._entry_of.pop(backend, None)
        if entry is not None:
            del self._sorted[bisect_left(self._sorted, entry)]
            self._positive = self._positive - max(entry[0], 0.0) if self._sorted else 0.0


def choose(program: Tracked, blocks: float, rooms: Rooms, now: float, *, due: bool) -> Choice:
    """Where a program that needs ``blocks`` blocks goes now.

    ``due``: it has waited for so long that an engine has to take it, room or not: engines serve
    what has waited longest first, and their programs yield to it.
    """
    home = program.home
    at_home = None if home is None else rooms.of(home)
    if home is not None and at_home is not None and program.resident_blocks:
        if at_home >= blocks:
            return Choice(home, "its home has room")
        if not due and now < program.settled_until:
            return Choice(None, "waits for its home, where its KV is")
    fit = rooms.best_fit(blocks)
    if fit is not None:
        moves = home is not None and fit is not home
        return Choice(fit, "moves to where it fits best" if moves else "fits best there")
    if not due:
        return Choice(None, "no engine has room for it")
    if home is not None and at_home is not None:
        return Choice(home, "is due: its home's programs yield")
    largest = rooms.largest()
    return Choice(largest, "no engine can be used" if largest is None else "is due")


def head_of(waiting: Iterable[tuple[Tracked, float]], rooms: Rooms) -> list[tuple[Tracked, float]]:
    """The programs, in the order in which they wait, that all rooms together could take; then by
    the blocks that they need, the most first.

    So nobody is passed by what came later, except where memory is left over in pieces that are too
    small for those before; and what is placed together is packed well.
    """
    head: list[tuple[Tracked, float]] = []
    left = rooms.total
    for program, blocks in waiting:
        if head and blocks > left:
            break
        head.append((program, blocks))
        left -= blocks
    head.sort(key=lambda item: -item[1])
    return head
