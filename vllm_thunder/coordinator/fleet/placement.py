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

__all__ = ["Choice", "Placement", "Rooms", "choose", "nearby", "plan", "to_idle"]


#: Shorter pauses are those between a program's turns: to displace it then costs more than it gains
#: (simulated, three engines: 288 steps a minute with 0.25 s, 297 with 1 s, 302 without the rule).
_IDLE_SECONDS = 1.0


class Choice(NamedTuple):
    """``backend`` is None when the program goes on waiting; ``reason`` is for people. ``blocks``:
    what it takes of the engine's room: what others have computed is on their account."""

    backend: Backend | None
    reason: str
    blocks: float = 0.0


class Rooms:
    """Usable backends by unclaimed blocks, so that the best fit is a binary search."""

    def __init__(self) -> None:
        self._sorted: list[tuple[float, int, Backend]] = []
        self._entry_of: dict[Backend, tuple[float, int, Backend]] = {}
        #: Blocks of each, reserved ones too.
        self._capacity: dict[Backend, int] = {}
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
        if not backend.usable or backend.report is None:
            self._capacity.pop(backend, None)
            return
        self._capacity[backend] = backend.report.capacity_blocks
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

    def need(self, tokens: float) -> float:
        """Blocks that so many tokens take, on any backend: they serve one model. At most all of
        the largest one's, since nobody can wait for more; inf while none can be used."""
        backend = self.largest()
        if backend is None:
            return inf
        blocks = backend.blocks(tokens)
        if blocks > self._capacity[backend]:
            blocks = min(blocks, max(self._capacity.values()))
        return blocks

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
            room = min(room, -1.0)  # without a seat nothing runs, whatever memory there is
        self._age -= 1
        entry = (room, self._age, backend)
        insort(self._sorted, entry)
        self._entry_of[backend] = entry

    def _remove(self, backend: Backend) -> None:
        entry = self._entry_of.pop(backend, None)
        if entry is not None:
            del self._sorted[bisect_left(self._sorted, entry)]


def choose(
    program: Tracked,
    blocks: float,
    rooms: Rooms,
    now: float,
    *,
    due: bool,
    spread: bool = False,
    near: Mapping[Backend, float] | None = None,
) -> Choice:
    """Where a program that needs ``blocks`` blocks goes now.

    ``spread``: where no engine has anything of it, to the one with the most room rather than to the
    one that it fits best.
    ``due``: it has waited for so long that an engine has to take it, room or not: engines serve
    what has waited longest first, and their programs yield to it.
    ``near``: what engines have of its prompt, if that is not what the program says.
    """
    home = program.home
    if home is not None:
        room = rooms.of(home) if program.resident_blocks else None
        kept = room is not None
        if room is not None and room >= blocks:
            return Choice(home, "its home has room", blocks)
    else:
        near = program.near if near is None else near
        found = _nearby(near, blocks, rooms, spread) if near else None
        if found is not None:
            return found
        kept = any(rooms.of(backend) is not None for backend in near)
    if kept and not due and now < program.settled_until:
        return Choice(None, "waits for the engine where its KV is")
    fit = rooms.largest(blocks) if spread else rooms.best_fit(blocks)
    if fit is not None:
        how = "the most room is" if spread else "it fits best"
        moves = home is not None and fit is not home
        return Choice(fit, f"moves to where {how}" if moves else f"goes to where {how}", blocks)
    if not due:
        return Choice(None, "no engine has room for it")
    if kept and home is not None:
        return Choice(home, "is due: its home's programs yield", blocks)
    largest = rooms.largest()
    return Choice(largest, "no engine can be used" if largest is None else "is due", blocks)


def _nearby(
    near: Mapping[Backend, float], blocks: float, rooms: Rooms, spread: bool
) -> Choice | None:
    """Where a newcomer goes of whose prompt engines have something; None if none of them has room.

    It takes only what is not there yet. Where memory is short, that counts: it goes where the
    least of it is missing. Where it is not, what is claimed at an engine is about what has to be
    computed there, so it goes where the most room is left after it: to an engine with its prompt
    unless more is claimed there than somewhere else by more than it would save.
    """
    best: Backend | None = None
    best_rank, best_blocks = (-inf, -inf), blocks
    for backend, tokens in near.items():
        room = rooms.of(backend)
        if room is None:
            continue
        missing = max(blocks - backend.blocks(tokens), 0.0)
        rank = (room - missing, -missing) if spread else (-missing, room)
        if room >= missing and rank > best_rank:
            best, best_rank, best_blocks = backend, rank, missing
    if best is None:
        return None
    if spread:
        elsewhere = rooms.largest(blocks)
        if elsewhere is not None and (rooms.of(elsewhere) or 0.0) - blocks > best_rank[0]:
            return Choice(elsewhere, "goes to where the most room is", blocks)
    return Choice(best, "others share its prompt there", best_blocks)


class Placement(NamedTuple):
    """``blocks``: what the program takes of the engine's room."""

    program: Tracked
    backend: Backend
    reason: str
    blocks: float


def plan(waiting: Iterable[tuple[Tracked, float]], rooms: Rooms, now: float) -> list[Placement]:
    """Who goes where now, of those that wait, in their order.

    A program that fits nowhere keeps the engine for itself that it can have the soonest: the one
    where its KV is while it waits for that, else the one with the most room. Others are placed at
    the engines that are left. So nobody is passed at an engine that it could have, and a large
    program leaves only one of them unused while it waits.

    ThunderAgent (arXiv 2602.13692) places best-fit-decreasing: those that may go are placed the
    largest first, unless they fit in their order only. Where all have room as they come, but for
    those that wait for their home, each goes to the engine with the most room instead: to pack
    them would leave engines idle.
    """
    seen: list[tuple[Tracked, float]] = []
    rest = iter(waiting)
    spread = _spread(rest, seen, rooms, now)
    if spread is not None:
        return spread
    placed: list[Placement] = []
    needs: list[float] = []
    siblings = _Siblings()
    with rooms.tried():
        for program, blocks in chain(seen, rest):
            if not len(rooms):
                break
            at_home = _waits_for(program, now)
            if at_home is not None and rooms.of(at_home) is None:
                continue  # somebody before it waits for the same engine
            choice = choose(program, blocks, rooms, now, due=False, near=siblings.near(program))
            if choice.backend is not None:
                placed.append(siblings.place(program, choice, rooms))
                needs.append(blocks)
                continue
            soonest = at_home or rooms.largest()
            assert soonest is not None
            rooms.reserve(soonest)
        reserved = rooms.reserved()
    return _packed(placed, needs, rooms, reserved, now) or placed


def to_idle(
    waiting: Iterable[tuple[Tracked, float]], backends: Iterable[Backend], now: float
) -> tuple[list[Placement], float]:
    """Who of those that :func:`plan` leaves waiting goes to an engine that has had nothing to do
    for ``_IDLE_SECONDS``, and when the next engine will have been idle for as long.

    All its memory is acting programs' then, or what waits is larger than any room: it is served as
    it would be by an engine alone, where programs that act yield to it.
    """
    placed: list[Placement] = []
    following = inf
    rest = (each for each in waiting if _waits_for(each[0], now) is None)
    for backend in backends:
        if backend.running or backend.unlabelled or not backend.usable or backend.free_seats < 1:
            continue
        if now < backend.idle_since + _IDLE_SECONDS:
            following = min(following, backend.idle_since + _IDLE_SECONDS)
            continue
        program, blocks = next(rest, (None, 0.0))
        if program is None:
            break
        placed.append(Placement(program, backend, "nothing else runs there", blocks))
    return placed, following


def _waits_for(program: Tracked, now: float) -> Backend | None:
    """The engine that has its KV, while it waits for that one rather than for any."""
    if now >= program.settled_until:
        return None
    kept_at, tokens = program.kept_at()
    return kept_at if kept_at is not None and kept_at.usable and tokens > 0 else None


class _Siblings:
    """Newcomers of one prompt group: where the first of them goes is then the others' prompt."""

    def __init__(self) -> None:
        self._placed: dict[str, dict[Backend, float]] = {}

    def near(self, program: Tracked) -> Mapping[Backend, float]:
        if program.home is not None or program.group is None:
            return program.near
        return {**program.near, **self._placed.get(program.group, {})}

    def place(self, program: Tracked, choice: Choice, rooms: Rooms) -> Placement:
        backend = choice.backend
        assert backend is not None
        rooms.take(backend, choice.blocks)
        if program.home is None and program.group is not None:
            self._placed.setdefault(program.group, {})[backend] = program.prompt_tokens
        return Placement(program, backend, choice.reason, choice.blocks)


def nearby(cached: Mapping[str, float], backends: Mapping[str, Backend]) -> dict[Backend, float]:
    """Tokens of a prompt that usable backends have in memory, of other programs. ``cached``: them
    by backend id."""
    return {
        backend: tokens
        for backend_id, tokens in cached.items()
        if tokens > 0 and (backend := backends.get(backend_id)) and backend.usable
    }


def _spread(
    waiting: Iterator[tuple[Tracked, float]],
    seen: list[tuple[Tracked, float]],
    rooms: Rooms,
    now: float,
) -> list[Placement] | None:
    """All but those that wait for their home, each where the most room is; None if one does not
    fit, and then ``seen`` has those up to it. A home that is waited for is left alone."""
    placed: list[Placement] = []
    siblings = _Siblings()
    with rooms.tried():
        for program, blocks in waiting:
            seen.append((program, blocks))
            at_home = _waits_for(program, now)
            if at_home is not None and rooms.of(at_home) is None:
                continue
            near = siblings.near(program)
            choice = choose(program, blocks, rooms, now, due=False, spread=True, near=near)
            if choice.backend is not None:
                placed.append(siblings.place(program, choice, rooms))
            elif at_home is not None:
                rooms.reserve(at_home)
            else:
                return None
    return placed


def _packed(
    placed: list[Placement],
    needs: list[float],
    rooms: Rooms,
    reserved: Sequence[Backend],
    now: float,
) -> list[Placement] | None:
    """The same programs, the largest first; None if they do not all fit so."""
    if len(placed) < 2:
        return None
    order = sorted(range(len(placed)), key=lambda at: -needs[at])
    packed = []
    siblings = _Siblings()
    with rooms.tried():
        for backend in reserved:
            rooms.reserve(backend)
        for at in order:
            program = placed[at].program
            choice = choose(program, needs[at], rooms, now, due=False, near=siblings.near(program))
            if choice.backend is None:
                return None
            packed.append(siblings.place(program, choice, rooms))
    return packed
