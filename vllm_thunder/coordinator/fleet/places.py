"""Where programs are: their homes, their turns in flight, and what of an engine's room was given to
them since it told how much that is."""

from vllm_thunder.coordinator.fleet.backend import Backend
from vllm_thunder.coordinator.fleet.placement import Rooms
from vllm_thunder.coordinator.fleet.tracked import Tracked

__all__ = ["Places"]


class Places:
    """Both sides of each fact, the program's and the engine's, are written here together."""

    def __init__(self, rooms: Rooms):
        self._rooms = rooms

    def begin(self, program: Tracked, turn_id: str, backend: Backend) -> None:
        """A turn is sent there."""
        program.running[turn_id] = backend
        backend.running[program, turn_id] = None

    def end(self, program: Tracked, turn_id: str, now: float) -> None:
        """It does not run any more."""
        backend = program.running.pop(turn_id)
        del backend.running[program, turn_id]
        if not backend.running:
            backend.idle_since = now
        if backend not in program.running.values():
            self.told(program, backend)

    def settle(self, program: Tracked, backend: Backend) -> None:
        """Its home is there now."""
        self.leave(program)
        program.home, program.perhaps_at = backend, None
        backend.residents[program] = None

    def leave(self, program: Tracked) -> None:
        """It has no home any more."""
        home = program.home
        if home is None:
            return
        self.told(program, home)
        home.residents.pop(program, None)
        program.home = None
        program.resident_blocks = 0
        program.claimed = False
        program.told = False

    def give(self, program: Tracked, backend: Backend, blocks: float) -> None:
        """So much of the engine's room is the program's, until the engine tells of it."""
        backend.placed[program] = blocks
        backend.placed_blocks += blocks
        self._rooms.update(backend)

    def told(self, program: Tracked, backend: Backend) -> None:
        """The engine tells of it, or it is there no more: it counts in what that says."""
        blocks = backend.placed.pop(program, None)
        if blocks is not None:
            backend.placed_blocks = backend.placed_blocks - blocks if backend.placed else 0.0
            self._rooms.update(backend)
