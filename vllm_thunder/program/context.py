"""The turn that the current task is serving, from the HTTP layer down to the engine request."""

from contextvars import ContextVar

from vllm_thunder.program.turn import Turn

__all__ = ["current_turn"]

#: Set by whoever resolved the identity (HTTP middleware, offline ``LLM``), read where vLLM
#: gives a request its internal id. Tasks inherit it; None means unlabelled.
current_turn: ContextVar[Turn | None] = ContextVar("vllm_thunder_turn", default=None)
