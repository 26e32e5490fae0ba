"""What the coordinator says of its programs and engines, for people and for other programs."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

from vllm_thunder.coordinator.engines.engines import Engines
from vllm_thunder.coordinator.fleet.backend import Backend
from vllm_thunder.coordinator.fleet.fleet import Fleet
from vllm_thunder.coordinator.fleet.tracked import Tracked

__all__ = [
    "capacity_known",
    "describe_engine",
    "describe_program",
    "fleet_imbalance",
    "phase_counts",
    "public_engine",
    "public_phases",
    "public_program",
    "state_of",
    "status",
]


def status(fleet: Fleet, engines: Engines, now: float) -> dict[str, Any]:
    """Everything in one page: each engine, and of each program that waits why."""
    counts = phase_counts(fleet)
    waiting = [describe_wait(fleet, program, now) for program in fleet.queue.in_order()]
    return {
        "state": state_of(fleet, engines),
        "capacity_known": capacity_known(fleet, engines),
        "weights_are_updated": fleet.frozen,
        "programs": len(fleet),
        **counts,
        "held_turns": fleet.queue.held_turns,
        "held_bytes": fleet.queue.held_bytes,
        "longest_wait_seconds": fleet.queue.longest_wait(now),
        "memory_imbalance": fleet_imbalance(fleet),
        "engines": [describe_engine(backend) for backend in fleet.backends.values()],
        "unreachable": engines.unreachable,
        "waiting": waiting,
    }


def state_of(fleet: Fleet, engines: Engines) -> str:
    """``ok``: every engine is used; ``degraded``: not all; ``unavailable``: none."""
    usable = sum(backend.usable for backend in fleet.backends.values())
    if not usable:
        return "unavailable"
    return "ok" if usable == len(fleet.backends) and not engines.unreachable else "degraded"


def capacity_known(fleet: Fleet, engines: Engines) -> bool:
    """Whether every engine has said how much memory it has."""
    return not engines.unreachable and all(b.report is not None for b in fleet.backends.values())


def phase_counts(programs: Iterable[Tracked]) -> dict[str, int]:
    """Programs with a turn at an engine, with none, and with one that waits here."""
    counts = Counter(phase_of(program) for program in programs)
    return {name: counts[name] for name in ("reasoning", "acting", "paused")}


def phase_of(program: Tracked) -> str:
    """By the public router's words: a program that waits here is ``paused``."""
    if program.waiting:
        return "paused"
    return "reasoning" if program.running else "acting"


def fleet_imbalance(fleet: Fleet) -> float:
    """Greatest difference between two engines' shares of claimed memory; 0 with fewer than two."""
    shares = [backend.claimed_share for backend in fleet.backends.values() if backend.usable]
    return max(shares) - min(shares) if len(shares) > 1 else 0.0


def describe_engine(backend: Backend) -> dict[str, Any]:
    """One engine."""
    report = backend.report
    return {
        "id": backend.backend_id,
        "url": backend.url,
        "rank": backend.rank,
        "health": str(backend.health),
        "knows_programs": not backend.stock,
        "problem": backend.problem,
        "capacity_blocks": None if report is None else report.capacity_blocks,
        "room_blocks": None if report is None else round(backend.room),
        "free_seats": None if report is None else report.free_seats,
        "turns_in_flight": len(backend.running),
        "requests_without_program": backend.unlabelled,
        "programs": len(backend.residents),
    }


def describe_wait(fleet: Fleet, program: Tracked, now: float) -> dict[str, Any]:
    """A program that waits here."""
    assert program.waiting_since is not None
    return {
        "program_id": program.program_id,
        "reason": fleet.why(program, now),
        "waited_seconds": now - program.waiting_since,
        "position": fleet.queue.position(program),
        "blocks_needed": fleet.blocks_needed(program),
        "held_turns": len(program.waiting),
        "priority": program.priority,
        "group": program.group,
    }


def describe_program(fleet: Fleet, program: Tracked, now: float) -> dict[str, Any]:
    """One program."""
    return {
        **public_program(program),
        "program_id": program.program_id,
        "claimed": program.claimed,
        "resident_blocks": program.resident_blocks,
        "turns_in_flight": len(program.running),
        "held_turns": len(program.waiting),
        "parent_id": program.parent_id,
        "group": program.group,
        "priority": program.priority,
        "moves": program.moves,
        "idle_seconds": 0.0 if program.in_flight else now - program.idle_since,
        "longest_wait_seconds": program.longest_wait,
        "wait": describe_wait(fleet, program, now) if program.waiting else None,
    }


def public_program(program: Tracked) -> dict[str, Any]:
    """One program by the field names of the public ThunderAgent router, whose ``status`` is the
    phase and whose ``state`` is the status."""
    phase = phase_of(program)
    return {
        "backend": None if program.home is None else program.home.backend_id,
        "context_len": program.context_tokens,
        "total_tokens": program.context_tokens,
        "step_count": program.profile.turns,
        "status": "reasoning" if program.in_flight else "acting",
        "state": "paused" if phase == "paused" or not program.claimed else "active",
        "profile": program.profile.averages(),
    }


def public_phases(backend: Backend) -> dict[str, int]:
    """An engine's programs by phase, as the public router counts them: ``total`` without those that
    wait. Nothing here is marked to be paused later: what runs is its engine's to pause."""
    counts = phase_counts(backend.residents)
    total = counts["reasoning"] + counts["acting"]
    return {"total": total, **counts, "marked_for_pause": 0, "future_paused_tokens": 0}


def public_engine(backend: Backend) -> dict[str, Any]:
    """One engine by the field names of the public router, which counts in tokens."""
    tokens = Counter[str]()
    for program in backend.residents:
        tokens[phase_of(program)] += program.context_tokens
    phases = public_phases(backend)
    active = tokens["reasoning"] + tokens["acting"]
    return {
        "healthy": backend.usable,
        "active_program_tokens": active,
        "reasoning_program_tokens": tokens["reasoning"],
        "acting_program_tokens": tokens["acting"],
        "total_program_tokens": active + tokens["paused"],
        "active_program_count": phases["total"],
        "reasoning_program_count": phases["reasoning"],
        "acting_program_count": phases["acting"],
        "paused_program_count": phases["paused"],
        "future_paused_tokens": phases["future_paused_tokens"],
        "cache_config": _cache_config(backend),
    }


def _cache_config(backend: Backend) -> dict[str, int] | None:
    report = backend.report
    if report is None:
        return None
    return {
        "block_size": report.context_groups[0][0],
        "num_gpu_blocks": report.capacity_blocks,
        "total_tokens_capacity": round(backend.tokens(report.capacity_blocks)),
    }
