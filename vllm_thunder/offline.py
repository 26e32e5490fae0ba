"""Programs without a server: vLLM's offline ``LLM`` that takes ``program_id``."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

import vllm
from vllm import PoolingParams, RequestOutput, SamplingParams

from vllm_thunder.program.config import CONFIG_KEY, ThunderConfig
from vllm_thunder.program.context import current_turn
from vllm_thunder.program.errors import ConfigError, IdentityError
from vllm_thunder.program.turn import Turn
from vllm_thunder.program.values import program_id_of

__all__ = ["LLM"]

_SCHEDULER = "vllm_thunder.engine.ProgramScheduler"

ProgramIds = str | int | Sequence[str | int | None] | None


class LLM(vllm.LLM):
    """``vllm.LLM`` scheduled by program.

    ``generate`` and ``chat`` take ``program_id``: one id (text, or an integer as its decimals) that
    all prompts are turns of, or a sequence with an id (or None: unlabelled) for each. ``thunder``
    holds settings of :class:`~vllm_thunder.program.config.ThunderConfig`. Everything else is
    vLLM's.
    """

    def __init__(self, *args: Any, thunder: dict[str, Any] | None = None, **kwargs: Any):
        scheduler = kwargs.pop("scheduler_cls", None) or _SCHEDULER
        if scheduler != _SCHEDULER:
            raise ConfigError(f"scheduler_cls: this LLM runs {_SCHEDULER}, not {scheduler}")
        additional = dict(kwargs.pop("additional_config", None) or {})
        settings = ThunderConfig.from_dict({**additional.get(CONFIG_KEY, {}), **(thunder or {})})
        additional[CONFIG_KEY] = settings.to_dict()
        self._turns: Iterator[Turn | None] | None = None
        self._fans: list[Turn] = []
        super().__init__(*args, scheduler_cls=_SCHEDULER, additional_config=additional, **kwargs)

    def generate(
        self, prompts: Any, *args: Any, program_id: ProgramIds = None, **kwargs: Any
    ) -> list[RequestOutput]:
        """``vllm.LLM.generate`` for turns of programs."""
        with self._serving(program_id, prompts):
            return super().generate(prompts, *args, **kwargs)

    def chat(
        self, messages: Any, *args: Any, program_id: ProgramIds = None, **kwargs: Any
    ) -> list[RequestOutput]:
        """``vllm.LLM.chat`` for turns of programs."""
        with self._serving(program_id, messages):
            return super().chat(messages, *args, **kwargs)

    def release(self, program_id: str | int) -> dict[str, Any]:
        """The program has ended: its memory is reused first. Idempotent. Raises IdentityError."""
        return self._programs("release", program_id_of(program_id))

    def programs(self) -> list[dict[str, Any]]:
        """All programs, as ``GET /programs`` of the server describes them."""
        return self._programs("list")

    @contextmanager
    def _serving(self, program_id: ProgramIds, prompts: Any) -> Iterator[None]:
        if isinstance(program_id, Sequence) and not isinstance(program_id, str):
            count = _count(prompts)
            if len(program_id) != count:
                raise IdentityError("program_id", f"{len(program_id)} ids for {count} prompts")
        self._turns = _turns(program_id)
        try:
            yield
        finally:
            self._turns = None
            fans, self._fans = self._fans, []
            for turn in fans:
                self._programs("turn_end", turn.program_id, turn.turn_id)

    def _add_request(
        self, prompt: Any, params: SamplingParams | PoolingParams, *args: Any, **kwargs: Any
    ) -> str:
        turn = None
        if self._turns is not None:
            turn = next(self._turns)
        if turn is not None and isinstance(params, SamplingParams) and params.n > 1:
            turn = Turn(turn.program_id, turn.turn_id, fans_out=True)
            self._fans.append(turn)
        token = current_turn.set(turn)
        try:
            return super()._add_request(prompt, params, *args, **kwargs)
        finally:
            current_turn.reset(token)

    def _programs(self, op: str, *args: Any) -> Any:
        client = self.llm_engine.engine_core
        if hasattr(client, "call_utility"):
            return client.call_utility("programs", op, *args)
        return client.engine_core.programs(op, *args)


def _turns(program_id: ProgramIds) -> Iterator[Turn | None] | None:
    """One turn per prompt, in order; None when nothing is labelled."""
    if program_id is None:
        return None
    if isinstance(program_id, Sequence) and not isinstance(program_id, str):
        return iter([None if one is None else _turn(program_id_of(one)) for one in program_id])
    same = program_id_of(program_id)
    return iter(lambda: _turn(same), None)


def _turn(program_id: str) -> Turn:
    return Turn(program_id, turn_id=uuid4().hex)


def _count(prompts: Any) -> int:
    """Prompts, or conversations: a list of messages is one conversation."""
    if not isinstance(prompts, list | tuple):
        return 1
    if prompts and isinstance(prompts[0], dict) and "role" in prompts[0]:
        return 1
    return len(prompts)
