"""Inside the engine core: the scheduler, its block pool, and the HTTP edge of one engine."""

from typing import Any

__all__ = ["ProgramScheduler"]


def __getattr__(name: str) -> Any:
    if name == "ProgramScheduler":  # the front end imports this package without a scheduler
        from vllm_thunder.engine.scheduler import ProgramScheduler

        return ProgramScheduler
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
