"""Where a program that waits goes: pure decisions over rooms.

ThunderAgent (arXiv 2602.13692, section "Global queue") places paused programs best-fit-decreasing,
away from where their KV was. We weigh both. While all that waits fits, memory is not short and the
engines' computing is: programs spread. And to move costs the prefill of what is still resident at
home, so a program waits for its home as long as that would cost, and no longer. Knowing nothing of
when its home has room, it then pays at most twice what knowing would have cost (ski rental).
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from math import inf
from typing import NamedTuple

from vllm_thunder.coordinator.fleet.backend import Backend
from vllm_thunder.coordinator.fleet.tracked import Tracked

__all__ = ["Choice", "Rooms", "choose", "nearest", "plan"]


class Choice(NamedTuple):
    """``backend`` is None when the program goes on waiting; ``reason`` is for people."""

    backend: Backend | None
    reason: str


class Rooms:
    """Usable backends by unclaimed blocks, so that the best fit is a binary search."""

    def __init__(self) -> None:
        self._sorted: list[tuple[float, int, Backend]] = []
        self._entry_of: dict[Backend, tuple[float, int, Backend]] = {}
        #: Falls with every change, so that of equal rooms the one that changed last comes first.
        self._age = 0
        #: What :meth:`tried` puts back: each backend's entry before its first change.
        self._before: dict[Backend, tuple[float, int, Backend]] | None = None
        self._seats_taken: Counter[Backend] = Counter()

    def __len__(self) -> int:
        return len(self._sorted)

    def __contains__(self, backend: Backend) -> bool:
        return backend in self._entry_of

    def update(self, backend: Backend) -> None:
        """The backend's room, seats or health changed."""
        self._remove(backend)
        if not backend.usable:
            return
        self._put(backend, backend.room)

    def of(self, backend: Backend) -> float | None:
        """None for a backend that is not usable, or is reserved."""
        entry = self._entry_of.get(backend)
        return None if entry is None else entry[0]

    def best_fit(self, blocks: float) -> Backend | None:
        """The backend with the least room that is enough; of equals the one that changed last."""
        at = bisect_left(self._sorted, (blocks, -inf))
        return self._sorted[at][2] if at < len(self._sorted) else None

    def largest(self, blocks: float = -inf) -> Backend | None:
        """The backend with the most room, if that is enough; of equals the one that changed the
        longest ago, so that they take turns."""
        if not self._sorted or self._sorted[-1][0] < blocks:
            return None
        return self._sorted[-1][2]

    # -- what if -----------------------------------------------------------------------

    @contextmanager
    def tried(self) -> Iterator[None]:
        """What :meth:`take` and :meth:`reserve` change until the block is left is undone then."""
        self._before = {}
        try:
            yield
        finally:
            before, self._before = self._before, None
            self._seats_taken.clear()
            for backend, entry in before.items():
                self._remove(backend)
                insort(self._sorted, entry)
                self._entry_of[backend] = entry

    def take(self, backend: Backend, blocks: float) -> None:
        """So many blocks of the backend are gone, and a seat."""
        room = self._remember(backend)
        self._remove(backend)
        self._seats_taken[backend] += 1
        self._put(backend, room - blocks)

    def reserve(self, backend: Backend) -> None:
        """All that the backend has is somebody's."""
        self._remember(backend)
        self._remove(backend)

    def reserved(self) -> list[Backend]:
        """Those of :meth:`reserve`, since :meth:`tried`."""
        return [backend for backend in self._before or () if backend not in self._entry_of]

    def _remember(self, backend: Backend) -> float:
        assert self._before is not None
        entry = self._entry_of[backend]
        self._before.setdefault(backend, entry)
        return entry[0]

    def _put(self, backend: Backend, room: float) -> None:
        if backend.free_seats <= self._seats_taken[backend]:
            room = min(room, 0.0)  # without a seat nothing runs, whatever memory there is
        self._age -= 1
        entry = (room, self._age, backend)
        insort(self._sorted, entry)
        self._entry_of[backend] = entry

    def _remove(self, backend: Backend) -> None:
        entry = self._entry_of.pop(backend, None)
        if entry is not None:
            del self._sorted[bisect_left(self._sorted, entry)]


def choose(
    program: Tracked, blocks: float, rooms: Rooms, now: float, *, due: bool, spread: bool = False
) -> Choice:
    """Where a program that needs ``blocks`` blocks goes now.

    ``spread``: where no engine has anything of it, to the one with the most room rather than to the
    one that it fits best.
    ``due``: it has waited for so long that an engine has to take it, room or not: engines serve
    what has waited longest first, and their programs yield to it.
    """
    kept_at, tokens = program.kept_at()
    room = None if kept_at is None else rooms.of(kept_at)
    home = program.home
    kept = kept_at is not None and room is not None and tokens > 0
    if kept_at is not None and room is not None and kept:
        # What others have computed is on their account; its own context is on its own.
        saved = 0 if home is not None else kept_at.blocks(tokens)
        if room >= blocks - saved:
            return Choice(kept_at, "its home has room" if home else "others share its prompt there")
        if not due and now < program.settled_until:
            return Choice(None, "waits for the engine where its KV is")
    fit = rooms.largest(blocks) if spread else rooms.best_fit(blocks)
    if fit is not None:
        how = "the most room is" if spread else "it fits best"
        moves = home is not None and fit is not home
        return Choice(fit, f"moves to where {how}" if moves else f"goes to where {how}")
    if not due:
        return Choice(None, "no engine has room for it")
    if kept and home is not None:
        return Choice(home, "is due: its home's programs yield")
    largest = rooms.largest()
    return Choice(largest, "no engine can be used" if largest is None else "is due")


def plan(
    waiting: Iterable[tuple[Tracked, float]], rooms: Rooms, now: float
) -> list[tuple[Tracked, Backend, str]]:
    """Who goes where now, of those that wait, in their order.

    A program that fits nowhere keeps the engine for itself that it can have the soonest: the one
    where its KV is while it waits for that, else the one with the most room. Others are placed at
    the engines that are left. So nobody is passed at an engine that it could have, and a large
    program leaves only one of them unused while it waits.

    ThunderAgent (arXiv 2602.13692) places best-fit-decreasing: those that may go are placed the
    largest first, unless they fit in their order only. Where all fit as they come, each to the
    engine with the most room, they go there: to pack them would leave engines idle.
    """
    seen: list[tuple[Tracked, float]] = []
    rest = iter(waiting)
    spread = _spread(rest, seen, rooms, now)
    if spread is not None:
        return spread
    waiting = chain(seen, rest)
    placed: list[tuple[Tracked, Backend, str]] = []
    needs: list[float] = []
    with rooms.tried():
        for program, blocks in waiting:
            if not len(rooms):
                break
            kept_at, tokens = program.kept_at()
            stays = kept_at is not None and kept_at.usable and tokens > 0
            stays = stays and now < program.settled_until
            if stays and kept_at is not None and rooms.of(kept_at) is None:
                continue  # somebody before it waits for the same engine
            backend, reason = choose(program, blocks, rooms, now, due=False)
            if backend is not None:
                rooms.take(backend, blocks)
                placed.append((program, backend, reason))
                needs.append(blocks)
                continue
            soonest = kept_at if stays else rooms.largest()
            assert soonest is not None
            rooms.reserve(soonest)
        reserved = rooms.reserved()
    return _packed(placed, needs, rooms, reserved, now) or placed


def nearest(
    cached: Mapping[str, float], backends: Mapping[str, Backend]
) -> tuple[Backend | None, float]:
    """The usable backend that has most of a prompt in memory, of other programs, and how many
    tokens that is. ``cached``: them by backend id."""
    best, most = None, 0.0
    for backend_id, tokens in cached.items():
        backend = backends.get(backend_id)
        if backend is not None and backend.usable and tokens > most:
            best, most = backend, tokens
    return best, most


def _spread(
    waiting: Iterator[tuple[Tracked, float]],
    seen: list[tuple[Tracked, float]],
    rooms: Rooms,
    now: float,
) -> list[tuple[Tracked, Backend, str]] | None:
    """All of them, each where the most room is; None if one does not fit or waits for its home,
    and then ``seen`` has those up to it."""
    placed: list[tuple[Tracked, Backend, str]] = []
    with rooms.tried():
        for program, blocks in waiting:
            seen.append((program, blocks))
            backend, reason = choose(program, blocks, rooms, now, due=False, spread=True)
            if backend is None:
                return None
            rooms.take(backend, blocks)
            placed.append((program, backend, reason))
    return placed


def _packed(
    placed: list[tuple[Tracked, Backend, str]],
    needs: list[float],
    rooms: Rooms,
    reserved: Sequence[Backend],
    now: float,
) -> list[tuple[Tracked, Backend, str]] | None:
    """The same programs, the largest first; None if they do not all fit so."""
    if len(placed) < 2:
        return None
    order = sorted(range(len(placed)), key=lambda at: -needs[at])
    packed = []
    with rooms.tried():
        for backend in reserved:
            rooms.reserve(backend)
        for at in order:
            program = placed[at][0]
            chosen, reason = choose(program, needs[at], rooms, now, due=False)
            if chosen is None:
                return None
            rooms.take(chosen, needs[at])
            packed.append((program, chosen, reason))
    return packed
