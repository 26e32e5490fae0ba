"""What prefill costs an engine that does not tell: learned from when its first bytes come."""

from vllm_thunder.program.cost import PrefillCost

__all__ = ["PrefillTimes"]

#: A sample is taken when so many prompt tokens are in it, although more prompts are computed.
_SAMPLE_TOKENS = 4096


class PrefillTimes:
    """Turns the times between a request's sending and its first byte into samples of ``cost``.

    Prompts that are computed at the same time share the engine, so the time of one by itself says
    too much. What is sampled is a busy period: from when a prompt is sent to an engine that
    computes none until none is left, all its tokens over all its time. A period that does not end
    is cut at a first byte: engines compute prompts in the order in which they come, so little of
    those still outstanding is done by then, and their samples make up for it.

    A period in which the work is not known counts for nothing: a request failed before its first
    byte, it waited for a seat or for blocks, or how much of its prompt was cached cannot be told.
    """

    def __init__(self, cost: PrefillCost):
        self._cost = cost
        #: Outstanding prompts by request: their tokens to compute, None where that is not known.
        self._outstanding: dict[str, tuple[int, float] | None] = {}
        self._unknown = 0
        self._began = 0.0
        self._tokens = 0
        self._positions = 0.0
        self._void = False

    def __len__(self) -> int:
        """Prompts that are being computed."""
        return len(self._outstanding)

    def sent(self, request_id: str, cached: int | None, prompt: int, now: float) -> None:
        """A prompt of ``prompt`` tokens goes to the engine; the first ``cached`` are there."""
        if not self._outstanding:
            self._begin(now)
        if cached is None:
            self._unknown += 1
            self._void = True
            self._outstanding[request_id] = None
        else:
            self._outstanding[request_id] = (
                prompt - cached,
                (prompt * prompt - cached * cached) / 2,
            )

    def first_byte(self, request_id: str, now: float) -> None:
        """The prompt is computed; nothing happens if that is known."""
        if request_id not in self._outstanding:
            return
        work = self._outstanding.pop(request_id)
        if work is None:
            self._unknown -= 1
        else:
            self._tokens += work[0]
            self._positions += work[1]
        if not self._outstanding or work is None or self._tokens >= _SAMPLE_TOKENS:
            if not self._void:
                self._cost.add(self._tokens, self._positions, now - self._began)
            self._begin(now)

    def failed(self, request_id: str, now: float) -> None:
        """The request ended without a first byte, if it is one that is outstanding."""
        if request_id in self._outstanding:
            # What it took of the engine, and what was left for the others, cannot be told.
            self._outstanding = dict.fromkeys(self._outstanding)
            self._unknown = len(self._outstanding)
            self._void = True
            self.first_byte(request_id, now)

    def _begin(self, now: float) -> None:
        self._began = now
        self._tokens, self._positions = 0, 0.0
        self._void = self._unknown > 0
