"""How long steps with prompt tokens take: what the policy's prefill cost is learned from."""

from collections import deque
from collections.abc import Mapping

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from vllm_thunder.program.cost import PrefillCost

__all__ = ["StepTimes"]


class StepTimes:
    """Follows steps from their scheduling to their output; several may be outstanding.

    ``decoded_tokens``: the most tokens that a step computes of a request that only decodes.
    """

    def __init__(self, prefill: PrefillCost, decoded_tokens: int):
        self._prefill = prefill
        self._decoded_tokens = decoded_tokens
        # When it was scheduled, its prompt tokens, the sum of the positions of these.
        self._outstanding: deque[tuple[float, int, float]] = deque()
        self._last_output = 0.0

    def scheduled(
        self, output: SchedulerOutput, requests: Mapping[str, Request], now: float
    ) -> None:
        """A step with tokens was scheduled at ``now``; ``requests`` count them as computed."""
        tokens, positions = 0, 0.0
        for request_id, scheduled in output.num_scheduled_tokens.items():
            if scheduled > self._decoded_tokens:
                tokens += scheduled
                positions += scheduled * (requests[request_id].num_computed_tokens - scheduled / 2)
        self._outstanding.append((now, tokens, positions))

    def output_arrived(self, now: float) -> None:
        """The output of the oldest outstanding step is there."""
        if not self._outstanding:
            return
        began, tokens, positions = self._outstanding.popleft()
        # The engine works on one step after the other, whenever they were scheduled.
        self._prefill.add(tokens, positions, now - max(began, self._last_output))
        self._last_output = now
