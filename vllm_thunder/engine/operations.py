"""What front ends ask the engine core for: every operation by its name."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from vllm_thunder.engine.feed import ProgramFeed
from vllm_thunder.engine.status import EngineStatus
from vllm_thunder.program.errors import ThunderError
from vllm_thunder.program.fcfs import FcfsPolicy
from vllm_thunder.program.program import Program
from vllm_thunder.program.table import ProgramTable

__all__ = ["ProgramOperations"]


class ProgramOperations:
    """They reach the engine core as utility calls, between two steps.

    ``decide``, ``release`` and ``acts`` are the scheduler's: decide now what is due, forget a
    program, and its last turn has ended.
    """

    def __init__(
        self,
        table: ProgramTable,
        policy: FcfsPolicy,
        status: EngineStatus,
        feed: ProgramFeed,
        *,
        clock: Callable[[], float],
        decide: Callable[[float], None],
        release: Callable[[Program], None],
        acts: Callable[[Program, float], None],
        check_integrity: Callable[[], None],
    ):
        self._table = table
        self._policy = policy
        self._feed = feed
        self._clock = clock
        self._decide = decide
        self._release = release
        self._acts = acts
        self._by_name: dict[str, Callable[..., Any]] = {
            "release": self.release,
            "turn_end": self._end_fan,
            "tool": self._tool_began,
            "get": status.get,
            "list": status.list,
            "summary": status.summary,
            "metrics": status.metrics,
            "changes": self._follow,
            "check_integrity": check_integrity,
        }

    def call(self, op: str, *args: str) -> Any:
        """The operation called ``op``, with at most two strings. Its result is msgpack-able, or a
        future of such a one. Raises ThunderError for an unknown name."""
        if op not in self._by_name:
            raise ThunderError(f"unknown operation {op!r}; known: {', '.join(self._by_name)}")
        return self._by_name[op](*args)

    def release(self, program_id: str) -> dict[str, Any]:
        """Release now, or when the turns in flight end; idempotent."""
        program = self._table.get(program_id)
        pending = program is not None and program.in_flight
        if program is not None:
            if pending:
                program.release_when_turn_ends = True
            else:
                self._table.released += 1
                self._release(program)
        return {"program_id": program_id, "released": program is not None, "pending": pending}

    def _end_fan(self, program_id: str, turn_id: str) -> None:
        """The front end says that a turn that fans out sends no more requests."""
        program = self._table.get(program_id)
        now = self._clock()
        if program is not None and self._table.fan_ended(program, turn_id, now):
            self._acts(program, now)

    def _tool_began(self, program_id: str, tool_name: str) -> dict[str, Any]:
        """The client says which tool a program has begun to run."""
        program = self._table.get(program_id)
        if program is not None:
            program.tool = tool_name
            self._policy.tool_known(program)
            self._table.changes.touched()  # its claim may lapse at another time
        return {"program_id": program_id, "known": program is not None}

    def _follow(self, cursor: str, wait: str) -> bytes | Future[bytes]:
        """What changed since ``cursor``; see :class:`ProgramFeed`. ``wait``: seconds, as text."""
        now = self._clock()
        self._decide(now)  # what has room now may be promised to turns that are held here
        return self._feed.changes(cursor, float(wait), now)
