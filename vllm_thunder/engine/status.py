"""What the engine says of its programs: operations, summaries and metrics, as plain values."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from vllm.logger import init_logger
from vllm.v1.request import Request

from vllm_thunder.engine.block_pool import ProgramBlockPool
from vllm_thunder.engine.free_queue import EvictionClass
from vllm_thunder.program.decisions import Action, ActionKind, Memory
from vllm_thunder.program.errors import IntegrityError, ThunderError
from vllm_thunder.program.fcfs import FcfsPolicy
from vllm_thunder.program.program import Phase, Program, Status
from vllm_thunder.program.table import ProgramTable

__all__ = ["EngineStatus"]

logger = init_logger(f"vllm.{__name__}")  # below vLLM's: its level and handlers

WAIT_BOUNDS = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0)


class EngineStatus:
    """Counts what the scheduler did and describes it. All results are msgpack-able."""

    def __init__(
        self,
        table: ProgramTable,
        pool: ProgramBlockPool,
        policy: FcfsPolicy,
        *,
        clock: Callable[[], float],
        memory: Callable[[], Memory],
    ):
        self._table = table
        self._pool = pool
        self._policy = policy
        self._clock = clock
        self._memory = memory
        self._restores = 0
        self._free_restores = 0
        self._wait_counts = [0] * (len(WAIT_BOUNDS) + 1)
        self._wait_sum = 0.0
        self.longest_wait = 0.0
        #: Turns that continued next to nothing of their program's context.
        self.hit_rate_collapses = 0

    # -- the scheduler tells -----------------------------------------------------------

    def waited(self, seconds: float) -> None:
        """A held request was admitted, or ended, after ``seconds``."""
        self._wait_counts[bisect_left(WAIT_BOUNDS, seconds)] += 1
        self._wait_sum += seconds
        self.longest_wait = max(self.longest_wait, seconds)

    def decided(self, action: Action) -> None:
        """The policy's action is about to be carried out."""
        program = action.program
        if action.kind is ActionKind.RESTORE:
            self._restores += 1
            held_keys = program.unique_blocks + program.shared_blocks
            self._free_restores += program.resident_blocks == held_keys > 0
        logger.debug("%s %r: %s", action.kind, program, action.reason)

    # -- descriptions ------------------------------------------------------------------

    def get(self, program_id: str) -> dict[str, Any] | None:
        """One program, or None."""
        program = self._table.get(program_id)
        return None if program is None else self._describe(program, self._memory())

    def list(self, after: str = "", limit: str = "") -> list[dict[str, Any]]:
        """Programs in the order of their ids: at most ``limit`` of them ("": all), those whose ids
        come after ``after``."""
        if limit and not limit.isdecimal():
            raise ThunderError(f"limit: {limit!r} is not a whole number")
        programs = self._table.page(after, int(limit) if limit else len(self._table))
        memory = self._memory()
        return [self._describe(program, memory) for program in programs]

    def summary(self) -> dict[str, Any]:
        """The engine in one glance."""
        table, pool = self._table, self._pool
        by_phase = Counter(str(p.phase) for p in table)
        by_status = Counter(str(p.status) for p in table)
        return {
            "policy": table.config.policy,
            "capacity_known": True,
            "programs": len(table),
            "by_phase": {str(phase): by_phase[phase] for phase in Phase},
            "by_status": {str(s): by_status[s] for s in Status},
            "held_turns": sum(len(p.held) for p in table.waiting),
            "total_blocks": pool.num_gpu_blocks - 1,
            "free_blocks": pool.get_num_free_blocks(),
            "unique_blocks": sum(p.unique_blocks for p in table),
            "shared_blocks": pool.ledger.shared_resident,
            "longest_wait_seconds": self._longest_wait_now(),
            **self._counters(),
        }

    def metrics(self) -> dict[str, Any]:
        """Everything for Prometheus, by name without prefix; see ``engine/metrics.py``."""
        table, pool = self._table, self._pool
        states = Counter((str(p.phase), str(p.status)) for p in table)
        rate = self._policy.prefill.tokens_per_second
        evicted = pool.free_block_queue.evicted
        return {
            "gauges": {
                "held_turns": float(sum(len(p.held) for p in table.waiting)),
                "unique_blocks": float(sum(p.unique_blocks for p in table)),
                "shared_blocks": float(pool.ledger.shared_resident),
                "total_blocks": float(pool.num_gpu_blocks - 1),
                "free_blocks": float(pool.get_num_free_blocks()),
                "longest_wait_seconds": self._longest_wait_now(),
                "prefill_tokens_per_second": rate or 0.0,
            },
            "labelled_gauges": {
                "programs": [
                    [{"phase": str(phase), "status": str(status)}, float(states[phase, status])]
                    for phase in Phase
                    for status in (Status.ACTIVE, Status.PAUSED)
                ]
            },
            "counters": {name: float(value) for name, value in self._counters().items()},
            "labelled_counters": {
                "evicted_blocks": [
                    [{"class": kind.name.lower()}, float(evicted[kind])] for kind in EvictionClass
                ]
            },
            "histograms": {
                "wait_seconds": {
                    "bounds": list(WAIT_BOUNDS),
                    "counts": list(self._wait_counts),
                    "sum": self._wait_sum,
                }
            },
        }

    def check_integrity(self, held: dict[str, Request]) -> None:
        """The queue of held turns and the programs' own lists agree."""
        listed = {request_id for p in self._table for request_id in p.held}
        if listed != held.keys():
            raise IntegrityError(f"held turns: {sorted(held)} queued, {sorted(listed)} listed")

    # -- inside ------------------------------------------------------------------------

    def _counters(self) -> dict[str, int]:
        table = self._table
        return {
            "turns": table.turns_done,
            "pauses": table.pauses,
            "restores": self._restores,
            "free_restores": self._free_restores,
            "programs_created": table.created,
            "programs_released": table.released,
            "programs_expired": table.expired,
            "programs_evicted": table.evicted,
            "program_hit_rate_collapses": self.hit_rate_collapses,
        }

    def _longest_wait_now(self) -> float:
        now = self._clock()
        waits = (now - p.waiting_since for p in self._table.waiting if p.waiting_since is not None)
        return max(self.longest_wait, *waits, 0.0)

    def _describe(self, program: Program, memory: Memory) -> dict[str, Any]:
        now = self._clock()
        waited, wait = 0.0, None
        if program.waiting_since is not None:
            waited = max(now - program.waiting_since, 0.0)
            wait = asdict(self._policy.why_held(program, now, memory))
        return {
            "program_id": program.program_id,
            "phase": str(program.phase),
            "status": str(program.status),
            "context_tokens": max(program.context_tokens, program.prompt_tokens),
            "unique_blocks": program.unique_blocks,
            "shared_blocks": program.shared_blocks,
            "resident_blocks": program.resident_blocks,
            "turns_in_flight": len(program.turns),
            "held_turns": len(program.held),
            "turns": program.turns_done,
            "parent_id": program.parent_id,
            "group": program.group,
            "children": self._table.children(program),
            "priority": program.priority,
            "deadline_seconds": program.deadline_seconds,
            "tool": program.tool,
            "hit_rate": program.hit_rate,
            "idle_seconds": 0.0 if program.in_flight else now - program.idle_since,
            "waited_seconds": waited,
            "longest_wait_seconds": max(program.longest_wait, waited),
            "wait": wait,
            "pauses": program.pauses,
            "restores": program.restores,
        }
