"""Where the time of a program's turns went."""

from dataclasses import dataclass
from typing import Any

__all__ = ["Profile"]


@dataclass(slots=True)
class Profile:
    """Sums of seconds over the turns of a program that were answered; see :meth:`averages`."""

    turns: int = 0
    queue_seconds: float = 0.0
    first_byte_seconds: float = 0.0
    rest_seconds: float = 0.0
    tools: int = 0
    tool_seconds: float = 0.0

    def turn_ended(self, queue: float, first_byte: float, rest: float) -> None:
        """Seconds for which the turn was held here, until the engine's first byte after that, and
        until its last one."""
        self.turns += 1
        self.queue_seconds += queue
        self.first_byte_seconds += first_byte
        self.rest_seconds += rest

    def tool_ended(self, seconds: float) -> None:
        """Time between two turns, none of which overlapped."""
        self.tools += 1
        self.tool_seconds += seconds

    def averages(self) -> dict[str, Any]:
        """By the names of the public ThunderAgent router, in seconds. What only an engine knows is
        null; so is what there was nothing of."""
        turns = max(self.turns, 1)
        return {
            "step_count": self.turns,
            "avg_prefill_s": round(self.first_byte_seconds / turns, 4),
            "avg_decode_s": round(self.rest_seconds / turns, 4),
            "avg_pause_s": round(self.queue_seconds / turns, 4),
            "avg_tool_call_s": round(self.tool_seconds / max(self.tools, 1), 4),
            "avg_prompt_tokens": None,
            "avg_completion_tokens": None,
            "avg_cached_tokens": None,
            "avg_kv_hit_rate": None,
        }
