"""What is known of a model call's prompt before any engine has seen it."""

from collections.abc import Mapping
from typing import NamedTuple

from vllm_thunder.coordinator.prompts.sizes import (
    BodySize,
    PrefixIndex,
    TokenEstimate,
    body_size,
    prefix_marks,
)

__all__ = ["Prompt", "Prompts"]

#: Seconds after which a prefix that an engine computed is no longer counted on.
_REMEMBERED_SECONDS = 120.0
#: The engine puts a stored conversation before what such a body says.
_GOES_ON = b'"previous_response_id"'


class Prompt(NamedTuple):
    """``tokens``: an estimate. ``cached``: by backend id, how many of them are likely to be in its
    prefix cache, of other programs. ``size`` and ``marks``: of its body, to learn from; ``size`` is
    None where the body is not the whole prompt."""

    tokens: float
    cached: Mapping[str, float]
    size: BodySize | None
    marks: list[int]


class Prompts:
    """Estimates tokens, and remembers which engine computed which beginnings of prompts."""

    def __init__(self) -> None:
        self._estimate = TokenEstimate()
        self._index = PrefixIndex()

    def look(self, body: bytes | None, now: float, *, is_new: bool) -> Prompt:
        """``body``: None where it is no JSON. ``is_new``: its program has no home yet, so it
        matters where its beginning is."""
        size = body_size(body)
        tokens = self._estimate.tokens(size)
        marks = prefix_marks(body) if is_new and body is not None else []
        cached = {}
        if marks:
            per_token = self._estimate.bytes_per_token()
            found = self._index.longest(marks, since=now - _REMEMBERED_SECONDS)
            cached = {name: min(length / per_token, tokens) for name, length in found.items()}
        learns = body is not None and _GOES_ON not in body
        return Prompt(tokens, cached, size if learns else None, marks)

    def sent(self, prompt: Prompt, backend_id: str, now: float) -> None:
        """The engine is about to compute the prompt."""
        if prompt.marks:
            self._index.remember(prompt.marks, backend_id, now)

    def counted(self, size: BodySize, tokens: int) -> None:
        """An engine said how many tokens a body of this size became."""
        self._estimate.learn(size, tokens)

    def forget(self, backend_id: str) -> None:
        """The engine's memory is gone."""
        self._index.forget(backend_id)
