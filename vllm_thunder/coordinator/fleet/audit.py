"""Where the books of a fleet disagree: everything counted anew."""

from collections.abc import Iterable

from vllm_thunder.coordinator.fleet.backend import Backend, Health
from vllm_thunder.coordinator.fleet.placement import Rooms
from vllm_thunder.coordinator.fleet.tracked import Tracked

__all__ = ["backends", "programs"]


def programs(known: set[Tracked], resting: set[Tracked], ours: set[Tracked]) -> list[str]:
    """What is wrong with the records of programs, with who rests, and with who of them no engine
    will tell of (``ours``)."""
    found = []
    rests = {program for program in known if not program.in_flight}
    if resting != rests:
        found.append("those that rest are not the programs without a turn in flight")
    if ours != {program for program in rests if program.home is None or not program.told}:
        found.append("those to be forgotten here are not those that no engine will tell of")
    for program in known:
        if program.waiting.keys() & program.running.keys():
            found.append(f"{program!r} has a turn that waits and runs")
        if program.home is not None and program not in program.home.residents:
            found.append(f"{program!r} is not among its home's residents")
        if program.home is not None and program.home.health is Health.DOWN:
            found.append(f"{program!r} has its home at an engine that is down")
        if program.home is not None and program.perhaps_at is not None:
            found.append(f"{program!r} has a home, and perhaps another")
    return found


def backends(known: set[Tracked], engines: Iterable[Backend], rooms: Rooms) -> list[str]:
    """What is wrong with the records of engines, and with who of them is among the rooms."""
    found, used = [], 0
    for backend in engines:
        runs = {(p, turn) for p in known for turn, at in p.running.items() if at is backend}
        if set(backend.running) != runs:
            found.append(f"{backend!r} runs {backend.running}, {runs} counted")
        if not set(backend.residents) <= known:
            found.append(f"{backend!r} has residents that nobody tracks")
        counted = sum(backend.placed.values())
        if abs(counted - backend.placed_blocks) > 1e-6 * max(counted, 1.0):
            found.append(f"{backend!r}: {backend.placed_blocks} placed, {counted} counted")
        if (backend in rooms) != backend.usable:
            found.append(f"{backend!r} is among the rooms, or should be")
        used += backend.usable
    if len(rooms) != used:
        found.append(f"there are {len(rooms)} rooms of {used} engines")
    return found
