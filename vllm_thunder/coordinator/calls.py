"""What is learned from model calls as they pass: prompts, and the books of stock engines."""

from collections.abc import Callable

from vllm_thunder.coordinator.engines.stock import StockEngines
from vllm_thunder.coordinator.fleet.backend import Backend
from vllm_thunder.coordinator.fleet.fleet import Fleet
from vllm_thunder.coordinator.prompts.prompts import Prompt, Prompts
from vllm_thunder.coordinator.prompts.usage import AnswerTokens
from vllm_thunder.program.turn import Turn

__all__ = ["Calls"]


class Calls:
    """Told of every model call by its id (a turn's is the turn's)."""

    def __init__(
        self, fleet: Fleet, prompts: Prompts, stock: StockEngines, clock: Callable[[], float]
    ):
        self._fleet = fleet
        self._prompts = prompts
        self._stock = stock
        self._clock = clock

    def look(self, turn: Turn | None, body: bytes | None) -> Prompt:
        """What there is to know of the prompt before it is sent; ``body``: None where it is no
        JSON."""
        program = None if turn is None else self._fleet.get(turn.program_id)
        is_new = turn is not None and (program is None or program.home is None)
        return self._prompts.look(body, self._clock(), is_new=is_new)

    def sent(self, backend: Backend, turn: Turn | None, call_id: str, prompt: Prompt) -> None:
        """An engine is about to get the call."""
        self._prompts.sent(prompt, backend.backend_id, self._clock())
        program = None if turn is None else self._fleet.get(turn.program_id)
        if turn is not None and program is not None:
            alone = len(program.running) == 1 and not turn.one_off and not turn.fans_out
            program.prompt_size = prompt.size if alone else None
        if backend.stock:
            self._stock.sent(backend, turn, call_id, prompt.tokens)

    def first_byte(self, backend: Backend, call_id: str) -> None:
        """The first byte of a streamed answer came."""
        if backend.stock:
            self._stock.first_byte(backend, call_id)

    def ended(
        self, backend: Backend, call_id: str, prompt: Prompt, answer: AnswerTokens | None
    ) -> None:
        """The call is over at the engine; ``answer``: None: it failed or was cut."""
        if backend.stock:
            tokens = (None, None) if answer is None else answer.counted(round(prompt.tokens))
            told = None if answer is None else answer.prompt_tokens()
            if told and prompt.size is not None:
                self._prompts.counted(prompt.size, told)
            self._stock.ended(backend, call_id, *tokens)
