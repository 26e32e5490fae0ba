"""Which programs hold which KV content, and how much of it is in memory: exact and incremental.

Content is named by an opaque key (in the engine: vLLM's block hash with its KV-cache group), so
a prefix that two programs share is one key with two holders. A key may be resident or not:
residency is a property of the pool and is told to the ledger as it changes. Cost follows what
changed, never the number of programs or blocks.
"""

from collections.abc import Callable, Hashable, Iterable

from vllm_thunder.program.errors import IntegrityError
from vllm_thunder.program.program import Program

__all__ = ["BlockLedger"]

_Key = Hashable


class BlockLedger:
    """Keeps ``Program.keys``, ``unique_blocks``, ``shared_blocks`` and ``resident_blocks``."""

    def __init__(self, is_resident: Callable[[_Key], bool]):
        self._is_resident = is_resident
        self._holders: dict[_Key, Program | set[Program]] = {}
        #: Resident keys that at least two programs hold: they count once against capacity.
        self.shared_resident = 0

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
        """A turn starts to use memory while no other turn of the program does.

        Keys that the turn does not use again are stale when it ends.
        """
        program.stale_keys.update(program.keys)
        program.keys = {}

    def hold(self, program: Program, key: _Key) -> None:
        """``program``'s running turn uses ``key``."""
        if key in program.keys:
            return
        program.keys[key] = None
        if key in program.stale_keys:
            del program.stale_keys[key]
            return
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
                self.shared_resident += resident
            else:
                holders.add(program)
            program.shared_blocks += 1
        program.resident_blocks += resident

    def end_turn(self, program: Program, completed: bool) -> list[_Key]:
        """The program's last running turn ended; returns the superseded keys, no longer held.

        ``completed`` is False when the turn's prompt was not fully computed: what it did not
        reach may still be its context, so nothing is superseded.
        """
        stale, program.stale_keys = program.stale_keys, {}
        if not completed:
            program.keys.update(stale)
            return []
        for key in stale:
            self._drop(program, key)
        return list(stale)

    def release(self, program: Program) -> list[_Key]:
        """Drop everything that ``program`` holds; returns the keys whose holders changed."""
        keys = [*program.keys, *program.stale_keys]
        program.keys, program.stale_keys = {}, {}
        for key in keys:
            self._drop(program, key)
        return keys

    def became_resident(self, key: _Key) -> None:
        """A block with ``key`` entered the prefix cache, where there was none."""
        self._count_resident(key, 1)

    def left_memory(self, key: _Key) -> None:
        """The last block with ``key`` left the prefix cache."""
        self._count_resident(key, -1)

    def all_left_memory(self, programs: Iterable[Program]) -> None:
        """The prefix cache was reset."""
        self.shared_resident = 0
        for program in programs:
            program.resident_blocks = 0

    def check_integrity(self, programs: Iterable[Program]) -> None:
        """Recount everything and raise IntegrityError where a count disagrees."""
        holders: dict[_Key, set[Program]] = {}
        problems = []
        programs = list(programs)
        for program in programs:
            both = program.keys.keys() & program.stale_keys.keys()
            if both:
                problems.append(f"{program.program_id!r} holds {len(both)} keys twice")
            for key in (*program.keys, *program.stale_keys):
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
            keys = [*program.keys, *program.stale_keys]
            counted = (
                sum(key not in shared for key in keys),
                sum(key in shared for key in keys),
                sum(self._is_resident(key) for key in keys),
            )
            kept_counts = (program.unique_blocks, program.shared_blocks, program.resident_blocks)
            if counted != kept_counts:
                problems.append(
                    f"{program.program_id!r}: unique, shared, resident {kept_counts} kept, "
                    f"{counted} counted"
                )
        if problems:
            raise IntegrityError("; ".join(problems))

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
        if len(holders) == 1:
            (last,) = holders
            self._holders[key] = last
            last.unique_blocks += 1
            last.shared_blocks -= 1
            self.shared_resident -= resident

    def _count_resident(self, key: _Key, change: int) -> None:
        holders = self._holders.get(key)
        if holders is None:
            return
        if isinstance(holders, Program):
            holders.resident_blocks += change
            return
        self.shared_resident += change
        for program in holders:
            program.resident_blocks += change
