"""The global waiting queue: programs whose turns wait for an engine, in the order of placement."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from math import inf

from vllm_thunder.coordinator.config import CoordinatorConfig
from vllm_thunder.coordinator.fleet.dispatch import Overloaded
from vllm_thunder.coordinator.fleet.tracked import Tracked
from vllm_thunder.program.ranked import Ranked

__all__ = ["WaitingQueue"]

#: A turn that has waited this share of the maximum wait is due: as in an engine.
_DUE_SHARE = 0.5


class WaitingQueue:
    """By priority, then by arrival; beside that, by the time at which each is due.

    ``config.max_wait``: seconds; a turn is due when it has waited half of it, or half of its own
    deadline.
    """

    def __init__(self, config: CoordinatorConfig):
        self._config = config
        self._order: Ranked[Tracked] = Ranked()
        self._due: Ranked[Tracked] = Ranked()
        #: Those that wait for one engine rather than for any, by the time until when.
        self._settled: Ranked[Tracked] = Ranked()
        self._groups: dict[str, dict[Tracked, None]] = {}
        self.held_turns = 0
        self.held_bytes = 0
        #: Of these, calls without a program: they have no place in the order.
        self._other_calls = 0
        self._other_bytes = 0
        #: Turns that no decision has seen yet: they may be placed without having been held.
        self._undecided: set[str] = set()

    def __len__(self) -> int:
        """Programs that wait."""
        return len(self._order)

    def check_room(self, body_bytes: int) -> None:
        """Raise Overloaded if a turn with such a body may not wait beside those that do."""
        if self.held_turns >= self._config.max_held_turns:
            raise Overloaded(f"{self.held_turns} turns wait already, the limit; try again later")
        limit = self._config.max_held_bytes
        if self.held_turns and self.held_bytes + body_bytes > limit:
            raise Overloaded(
                f"turns with bodies of {self.held_bytes} bytes wait already, and with these "
                f"{body_bytes} it would be more than {limit}, the limit; try again later"
            )

    def hold(self, program: Tracked, turn_id: str, since: float, body_bytes: int) -> bool:
        """A turn waits; True when it is the program's first."""
        program.waiting[turn_id] = body_bytes
        self.held_turns += 1
        self.held_bytes += body_bytes
        self._undecided.add(turn_id)
        if program.waiting_since is not None:
            return False
        program.waiting_since = since
        self._order.put(program, (program.priority, since))
        limit = min(self._config.max_wait, program.deadline_seconds or inf)
        self._due.put(program, since + _DUE_SHARE * limit)
        if program.group is not None:
            self._groups.setdefault(program.group, {})[program] = None
        return True

    @contextmanager
    def hold_other(self, body_bytes: int) -> Iterator[None]:
        """Meanwhile a call without a program waits. Raises Overloaded if it may not."""
        self.check_room(body_bytes)
        self._count_other(1, body_bytes)
        try:
            yield
        finally:
            self._count_other(-1, -body_bytes)

    def decided(self) -> int:
        """A decision has left waiting whatever waits; of how many turns it was the first."""
        count = len(self._undecided)
        self._undecided.clear()
        return count

    def unhold(self, program: Tracked, turn_id: str, now: float) -> bool:
        """A turn waits no more; whether a decision had left it waiting."""
        self.held_bytes -= program.waiting.pop(turn_id)
        self.held_turns -= 1
        was_held = turn_id not in self._undecided
        self._undecided.discard(turn_id)
        if not program.waiting:
            self._no_longer_waits(program, now)
        return was_held

    def settle(self, program: Tracked, until: float, now: float) -> None:
        """A program that waits does so for one engine until then."""
        program.settled_until = until
        if until > now:
            self._settled.put(program, until)

    def due(self, now: float) -> list[Tracked]:
        """Programs that have waited for long enough to go anywhere, the longest due first."""
        return list(self._due.until(now))

    def is_due(self, program: Tracked, now: float) -> bool:
        """Whether a program that waits is among them."""
        return bool(self._due.rank_of(program) <= now)

    def in_order(self) -> Iterator[Tracked]:
        """Those that wait, the members of a prompt group one after the other."""
        seen: set[Tracked] = set()
        for first in self._order:
            for program in chain((first,), self._groups.get(first.group or "", ())):
                if program not in seen:
                    seen.add(program)
                    yield program

    def siblings(self, program: Tracked) -> list[Tracked]:
        """Those that wait of its prompt group, if it has one."""
        return [] if program.group is None else list(self._groups.get(program.group, ()))

    def position(self, program: Tracked) -> int:
        """How many programs wait in front of it."""
        return self._order.position(program)

    def longest_wait(self, now: float) -> float:
        """Seconds for which the program has waited that has waited the longest."""
        return max((now - (p.waiting_since or now) for p in self._order), default=0.0)

    def next_change(self, now: float) -> float:
        """When the next program becomes due or stops waiting for one engine; inf: none does."""
        return min(self._due.next_rank(now, inf), self._settled.next_rank(now, inf))

    def problems(self, programs: set[Tracked]) -> list[str]:
        """Where the indexes and the records of ``programs`` disagree."""
        found = []
        waiting = {p for p in programs if p.waiting}
        if set(self._order) != waiting or set(self._due) != waiting:
            found.append(f"{waiting} wait, {self._order} and {self._due} are in order")
        if not set(self._settled) <= waiting:
            found.append(f"{self._settled} wait for one engine, {waiting} wait")
        if {p for members in self._groups.values() for p in members} != {
            p for p in waiting if p.group is not None
        }:
            found.append("the groups are not those of the programs that wait in groups")
        if not self._undecided <= {turn for program in waiting for turn in program.waiting}:
            found.append(f"{self._undecided} await a decision and do not wait")
        if self.held_turns != self._other_calls + sum(len(p.waiting) for p in programs):
            found.append(f"{self.held_turns} held turns counted")
        if self.held_bytes != self._other_bytes + sum(sum(p.waiting.values()) for p in programs):
            found.append(f"{self.held_bytes} bytes of held turns counted")
        for program in programs:
            if (program.waiting_since is None) == bool(program.waiting):
                found.append(f"{program!r} has no start of its wait, or one too many")
        return found

    def _count_other(self, calls: int, body_bytes: int) -> None:
        self.held_turns += calls
        self.held_bytes += body_bytes
        self._other_calls += calls
        self._other_bytes += body_bytes

    def _no_longer_waits(self, program: Tracked, now: float) -> None:
        assert program.waiting_since is not None
        program.longest_wait = max(program.longest_wait, now - program.waiting_since)
        program.waiting_since = None
        self._order.discard(program)
        self._due.discard(program)
        self._settled.discard(program)
        if program.group is not None:
            members = self._groups[program.group]
            del members[program]
            if not members:
                del self._groups[program.group]
