"""How many tokens an answer says that a model call took, read beside its passing."""

import re

__all__ = ["AnswerTokens"]

#: Bytes at both ends of an answer in which its usage is looked for: it is the last member of a
#: whole answer and the last event of a stream, and Anthropic's streams begin with the prompt's.
_END_BYTES = 4096
_PROMPT = re.compile(rb'"(?:prompt|input)_tokens"\s*:\s*(\d+)')
_OUTPUT = re.compile(rb'"(?:completion|output)_tokens"\s*:\s*(\d+)')
_EVENT = b"data:"


class AnswerTokens:
    """Fed with an answer chunk by chunk."""

    __slots__ = ("_events", "_first", "_last")

    def __init__(self) -> None:
        self._events = 0
        self._first = self._last = b""

    def feed(self, chunk: bytes) -> None:
        """More of the answer."""
        self._events += chunk.count(_EVENT)
        if len(self._first) < _END_BYTES:
            self._first += chunk[: _END_BYTES - len(self._first)]
        self._last = (self._last + chunk)[-_END_BYTES:]

    def prompt_tokens(self) -> int | None:
        """Tokens of the prompt; None: the answer does not tell."""
        prompts = _PROMPT.findall(self._first) or _PROMPT.findall(self._last)
        return int(prompts[-1]) if prompts else None

    def counted(self, prompt_tokens: int) -> tuple[int, int]:
        """Tokens of the context, and of the output in it.

        Where the answer does not tell, the prompt counts as ``prompt_tokens`` and each event of a
        stream as a token, which is what engines send unless they are asked for less.
        """
        told = self.prompt_tokens()
        outputs = _OUTPUT.findall(self._last)
        prompt = prompt_tokens if told is None else told
        output = int(outputs[-1]) if outputs else self._events
        return prompt + output, output
