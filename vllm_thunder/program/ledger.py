"""Which programs hold which KV content, and how much of it is in memory: exact and incremental.

Content is named by an opaque key (in the engine: vLLM's block hash with its KV-cache group), so
a prefix that two programs share is one key with two holders. A key may be resident or not:
residency is a property of the pool and is told to the ledger as it changes. Cost follows what
changed, never the number of programs or blocks.
"""

from collections.abc import Callable, Hashable, Iterable
from itertools import islice
from typing import NamedTuple

from vllm_thunder.program.errors import IntegrityError
from vllm_thunder.program.program import Program

__all__ = ["BlockLedger", "TurnEnd"]

_Key = Hashable

#: Below this many blocks a context is too short to tell how it changes.
_FEW_BLOCKS = 4
#: A turn that leaves more than this share of its program's context unused does not continue it.
_REPLACED_SHARE = 0.9


class TurnEnd(NamedTuple):
    """What the end of a turn says about its program's context.

    ``superseded``: keys that the program holds no longer. ``replaced``: the turn continued next
    to nothing of the context, which a prefix cache cannot help. ``side_call``: so did this turn,
    but it is less than half as long and the one before was none: the context is kept, and what
    the side call computed is superseded instead.
    """

    superseded: list[_Key]
    replaced: bool = False
    side_call: bool = False


class BlockLedger:
    """Keeps ``Program.keys``, ``unique_blocks``, ``shared_blocks`` and ``resident_blocks``."""

    def __init__(self, is_resident: Callable[[_Key], bool]):
        self._is_resident = is_resident
        self._holders: dict[_Key, Program | set[Program]] = {}
        #: Resident keys that at least two programs hold: they count once against capacity.
        self.shared_resident = 0
        #: Programs whose content left memory, or came back to it, whoever's turns did that.
        self._moved: dict[Program, None] = {}
        self._moved_last: Program | None = None

    def __len__(self) -> int:
        """Keys with at least one holder."""
        return len(self._holders)

    def holder(self, key: _Key) -> Program | set[Program] | None:
        """None, the only holder, or the set of holders (two or more)."""
        return self._holders.get(key)

    def holders(self) -> Iterable[Program | set[Program]]:
        """The holders of every held key."""
        return self._holders.values()

    def begin_turn(self, program: Program) -> None:
        """A turn starts while no other turn of the program runs."""
        program.keys_before = len(program.keys)
        program.prefix_used = 0
        program.used.clear()

    def hold(self, program: Program, keys: list[_Key]) -> None:
        """``program``'s running turns use ``keys``, found in memory in this order."""
        held = program.keys
        count = len(keys)
        # A turn that continues its context finds it as it was: no key need be looked up.
        if count <= program.keys_before and keys == list(islice(held, count)):
            program.prefix_used = max(program.prefix_used, count)
            return
        for key in keys:
            if key in held:
                program.used.add(key)
            else:
                self._add(program, key)

    def computed(self, program: Program | None, key: _Key, resident_before: bool) -> None:
        """A block with ``key`` entered the prefix cache, computed for ``program`` (None: for
        nobody in particular)."""
        if not resident_before and key in self._holders:
            self._count_resident(key, 1)
        if program is None:
            return
        if key in program.keys:
            program.used.add(key)
        elif key in self._holders:
            self._add(program, key)
        else:
            self._holders[key] = program
            program.keys[key] = None
            program.unique_blocks += 1
            program.resident_blocks += 1

    def end_turn(self, program: Program, completed: bool) -> TurnEnd:
        """The program's last running turn ended; drops what it will not use again.

        ``completed`` is False when the turn's prompt was not fully computed: what it did not
        reach may still be its context, so nothing is dropped. Nor is it by turns that used no
        key at all: one-offs, and prompts shorter than a block.
        """
        before, prefix, used = program.keys_before, program.prefix_used, program.used
        fresh = len(program.keys) - before
        program.prefix_used, program.used = 0, set()
        if not completed or not (prefix or used or fresh):
            return TurnEnd([])
        stale = [key for key in islice(program.keys, prefix, before) if key not in used]
        if not stale:
            program.side_calls = 0
            return TurnEnd([])
        in_use = before - len(stale) + fresh
        replaced = before >= _FEW_BLOCKS and len(stale) > _REPLACED_SHARE * before
        side_call = replaced and in_use < before / 2 and not program.side_calls
        if side_call:
            stale = list(islice(program.keys, before, None))
            program.side_calls += 1
        else:
            program.side_calls = 0
        for key in stale:
            del program.keys[key]
            self._drop(program, key)
        return TurnEnd(stale, replaced and not side_call, side_call)

    def release(self, program: Program) -> list[_Key]:
        """Drop everything that ``program`` holds; returns the keys whose holders changed."""
        keys = list(program.keys)
        program.keys = {}
        self._moved.pop(program, None)
        self._moved_last = None
        self.begin_turn(program)
        for key in keys:
            self._drop(program, key)
        return keys

    def take_moved(self) -> list[Program]:
        """Programs of whose content some entered or left memory since the last call."""
        moved, self._moved, self._moved_last = list(self._moved), {}, None
        return moved

    def left_memory(self, key: _Key) -> None:
        """The last block with ``key`` left the prefix cache."""
        self._count_resident(key, -1)

    def all_left_memory(self, programs: Iterable[Program]) -> None:
        """The prefix cache was reset."""
        self.shared_resident = 0
        for program in programs:
            program.resident_blocks = program.shared_resident_blocks = 0
            self._moved[program] = None

    def check_integrity(self, programs: Iterable[Program]) -> None:
        """Recount everything and raise IntegrityError where a count disagrees."""
        holders: dict[_Key, set[Program]] = {}
        problems = []
        programs = list(programs)
        for program in programs:
            if not program.used <= program.keys.keys():
                problems.append(f"{program.program_id!r} uses keys that it does not hold")
            for key in program.keys:
                holders.setdefault(key, set()).add(program)
        for key in holders.keys() ^ self._holders.keys():
            problems.append(f"key {key!r} has holders on one side only")
        for key in holders.keys() & self._holders.keys():
            kept = self._holders[key]
            if holders[key] != ({kept} if isinstance(kept, Program) else kept):
                problems.append(f"key {key!r}: {kept} kept, {holders[key]} counted")
        shared = {key for key, held_by in holders.items() if len(held_by) > 1}
        if self.shared_resident != (n := sum(self._is_resident(key) for key in shared)):
            problems.append(f"shared resident blocks: {self.shared_resident} kept, {n} counted")
        for program in programs:
            keys = program.keys
            counted = (
                sum(key not in shared for key in keys),
                sum(key in shared for key in keys),
                sum(self._is_resident(key) for key in keys),
                sum(key in shared and self._is_resident(key) for key in keys),
            )
            kept_counts = (
                program.unique_blocks,
                program.shared_blocks,
                program.resident_blocks,
                program.shared_resident_blocks,
            )
            if counted != kept_counts:
                problems.append(
                    f"{program.program_id!r}: unique, shared, resident, both {kept_counts} kept, "
                    f"{counted} counted"
                )
        if problems:
            raise IntegrityError("; ".join(problems))

    def _add(self, program: Program, key: _Key) -> None:
        program.keys[key] = None
        holders = self._holders.get(key)
        resident = self._is_resident(key)
        if holders is None:
            self._holders[key] = program
            program.unique_blocks += 1
        else:
            if isinstance(holders, Program):
                self._holders[key] = {holders, program}
                holders.unique_blocks -= 1
                holders.shared_blocks += 1
                holders.shared_resident_blocks += resident
                self.shared_resident += resident
            else:
                holders.add(program)
            program.shared_blocks += 1
            program.shared_resident_blocks += resident
        program.resident_blocks += resident

    def _drop(self, program: Program, key: _Key) -> None:
        holders = self._holders[key]
        resident = self._is_resident(key)
        program.resident_blocks -= resident
        if holders is program:
            del self._holders[key]
            program.unique_blocks -= 1
            return
        assert isinstance(holders, set)
        holders.remove(program)
        program.shared_blocks -= 1
        program.shared_resident_blocks -= resident
        if len(holders) == 1:
            (last,) = holders
            self._holders[key] = last
            last.unique_blocks += 1
            last.shared_blocks -= 1
            last.shared_resident_blocks -= resident
            self.shared_resident -= resident

    def _count_resident(self, key: _Key, change: int) -> None:
        holders = self._holders.get(key)
        if holders is None:
            return
        if isinstance(holders, Program):
            holders.resident_blocks += change
            if holders is not self._moved_last:  # blocks are mostly reused run by run
                self._moved_last = holders
                self._moved[holders] = None
            return
        self.shared_resident += change
        for program in holders:
            program.resident_blocks += change
            program.shared_resident_blocks += change
            self._moved[program] = None
