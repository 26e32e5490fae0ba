"""Settings of the coordinator: the only place for their defaults."""

from dataclasses import dataclass

__all__ = ["CoordinatorConfig"]


@dataclass(frozen=True, slots=True)
class CoordinatorConfig:
    #: Seconds; a turn that has waited half of it goes to an engine whether it has room or not.
    max_wait: float = 60.0
    #: Seconds for which a program waits for the engine that has its KV, at most.
    stickiness: float = 5.0
    max_programs: int = 100_000
    max_held_turns: int = 10_000
