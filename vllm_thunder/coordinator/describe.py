"""What the coordinator says of its programs and engines, for people and for other programs."""

from collections import Counter
from typing import Any

from vllm_thunder.coordinator.engines.engines import Engines
from vllm_thunder.coordinator.fleet.backend import Backend
from vllm_thunder.coordinator.fleet.fleet import Fleet
from vllm_thunder.coordinator.fleet.tracked import Tracked

__all__ = ["describe_engine", "describe_program", "fleet_imbalance", "public_program", "status"]


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


def phase_counts(fleet: Fleet) -> dict[str, int]:
    """Programs with a turn at an engine, with none, and with one that waits here."""
    counts = Counter(phase_of(program) for program in fleet)
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
