"""Which programs changed since somebody looked: a log that keeps the last change of each."""

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from vllm_thunder.program.errors import IntegrityError

__all__ = ["ChangeLog", "Page"]

#: Programs that are gone are remembered as far back as this many of them.
_MOST_GONE = 10_000
#: Changes that newer ones have replaced are swept out once they are this many more than the
#: programs.
_SLACK = 1000
#: Characters of ids in one page: an id may have thousands.
_MOST_CHARACTERS = 1 << 20


class Page(NamedTuple):
    """What changed between two points of the log.

    ``changed`` and ``gone`` are ids in the order of their last change. ``reached``: up to where
    the page tells. ``complete``: nothing has changed after that.
    """

    changed: list[str]
    gone: list[str]
    reached: int
    complete: bool


class ChangeLog:
    """Numbers every change; ``sequence`` is the number of the last one.

    A change costs an entry at the end, a page costs what it tells: neither looks at what has not
    changed. Nothing is kept for those who read: they say how far they have read.
    """

    __slots__ = ("_entries", "_forgotten", "_gone", "_latest", "_most_gone", "sequence")

    def __init__(self, most_gone: int = _MOST_GONE):
        self.sequence = 0
        self._most_gone = most_gone
        # In order; an entry counts if it is its program's latest.
        self._entries: list[tuple[int, str]] = []
        self._latest: dict[str, int] = {}
        # Programs that are gone, the one that went the longest ago first.
        self._gone: OrderedDict[str, None] = OrderedDict()
        #: The last change that nobody can be told any more.
        self._forgotten = 0

    def changed(self, program_id: str) -> None:
        """The program is there, and something that is told of it is different."""
        if program_id in self._gone:
            del self._gone[program_id]
        self._add(program_id)

    def gone(self, program_id: str) -> None:
        """The program is not there any more."""
        self._add(program_id)
        self._gone[program_id] = None
        if len(self._gone) > self._most_gone:
            oldest, _ = self._gone.popitem(last=False)
            self._forgotten = self._latest.pop(oldest)

    def touched(self) -> None:
        """Something changed that is no single program's."""
        self.sequence += 1

    def reaches_back_to(self, after: int) -> bool:
        """Whether all that happened since change ``after`` can be told."""
        return self._forgotten <= after <= self.sequence

    def page(self, after: int, limit: int, gone_after: int = 0) -> Page:
        """At most ``limit`` programs that changed after change ``after``, the first ones; of those
        that are gone only the ones that went after change ``gone_after``."""
        entries, latest = self._entries, self._latest
        changed: list[str] = []
        gone: list[str] = []
        characters = 0
        for index in range(bisect_right(entries, after, key=_sequence_of), len(entries)):
            sequence, program_id = entries[index]
            if latest.get(program_id) != sequence:
                continue
            is_gone = program_id in self._gone
            if is_gone and sequence <= gone_after:
                continue
            characters += len(program_id)
            told = len(changed) + len(gone)
            if told and (told >= limit or characters > _MOST_CHARACTERS):
                return Page(changed, gone, entries[index - 1][0], complete=False)
            (gone if is_gone else changed).append(program_id)
        return Page(changed, gone, self.sequence, complete=True)

    def check_integrity(self, known: AbstractSet[str]) -> None:
        """``known`` are the ids of all programs; raises IntegrityError where the log differs."""
        problems = []
        there = self._latest.keys() - self._gone.keys()
        if there != known:
            problems.append(f"{there ^ known} are known on one side only")
        if not self._gone.keys() <= self._latest.keys():
            problems.append("a program went without a change")
        if {i: s for s, i in self._entries if self._latest.get(i) == s} != self._latest:
            problems.append("an entry is missing")
        if [s for s, _ in self._entries] != sorted({s for s, _ in self._entries}):
            problems.append("the entries are not in order")
        if problems:
            raise IntegrityError("the log of changes: " + "; ".join(problems))

    def _add(self, program_id: str) -> None:
        self.sequence += 1
        self._latest[program_id] = self.sequence
        self._entries.append((self.sequence, program_id))
        if len(self._entries) > 2 * len(self._latest) + _SLACK:
            self._entries = [e for e in self._entries if self._latest.get(e[1]) == e[0]]


def _sequence_of(entry: tuple[int, str]) -> int:
    return entry[0]
