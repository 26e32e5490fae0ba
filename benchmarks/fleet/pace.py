"""How long a step of the tiny model takes, and which words it would say: what
:mod:`benchmarks.fleet.paced_executor` needs to know, without vLLM.
"""

import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer

__all__ = ["Pace", "Scheduled", "Step", "Words", "read_step"]


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds. The defaults were measured with the tiny model of this project, one engine alone on
    two cores of a Xeon."""

    overhead_seconds: float = 8e-3
    token_seconds: float = 1.43e-4
    position_seconds: float = 8.9e-8
    decode_seconds: float = 1.5e-3

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int | float) or not 0 <= value < 60:
                raise ValueError(f"paced.{field.name}: {value!r} is not in [0, 60) seconds")

    def seconds(self, step: "Step") -> float:
        return (
            self.overhead_seconds
            + self.token_seconds * step.prompt_tokens
            + self.position_seconds * step.positions
            + self.decode_seconds * step.decodes
        )


class Scheduled(NamedTuple):
    """One request in a step. ``known``: tokens of its prompt and its answer so far; ``computed``:
    of them were in the KV cache before the step; ``tokens`` are computed by it."""

    known: int
    computed: int
    tokens: int
    answered: int

    @property
    def samples(self) -> bool:
        """Whether the step reaches its end, so that the next token comes."""
        return self.computed + self.tokens >= self.known


class Step(NamedTuple):
    """``positions``: sum of the positions of the prompt tokens. A token of an answer that is
    computed again after a preemption is a prompt token."""

    prompt_tokens: int
    positions: int
    decodes: int


def read_step(requests: list[Scheduled]) -> Step:
    """What the step has to compute."""
    prompt_tokens = positions = decodes = 0
    for request in requests:
        if request.answered and request.tokens == 1 and request.samples:
            decodes += 1
            continue
        prompt_tokens += request.tokens
        positions += request.tokens * request.computed + request.tokens * (request.tokens - 1) // 2
    return Step(prompt_tokens, positions, decodes)


class Words:
    """The words of answers. Which one comes follows from the prompt and the position alone."""

    def __init__(self, model: Path):
        """``model`` holds the ``tokenizer.json``; ValueError if it does not, or has no words."""
        self._tokens = _stable_words(model / "tokenizer.json")

    def __len__(self) -> int:
        return len(self._tokens)

    @staticmethod
    def key(prompt: Sequence[int]) -> int:
        """What of a prompt the words after it depend on."""
        return zlib.crc32(array("q", prompt))

    def token(self, key: int, position: int) -> int:
        """The token at that position of the context that begins with the prompt of ``key``."""
        return self._tokens[zlib.crc32(position.to_bytes(8, "little"), key) % len(self._tokens)]


def _stable_words(path: Path) -> list[int]:
    """The tokens that are a word with a space before it and that come back as one token when their
    text is read again, in the order of their ids."""
    if not path.is_file():
        raise ValueError(f"{path} is missing: paced answers are words of the model's tokenizer")
    tokenizer = Tokenizer.from_file(str(path))
    words = []
    for token in range(tokenizer.get_vocab_size()):
        text = tokenizer.decode([token])
        if text[:1] == " " and text[1:].isalpha() and tokenizer.encode(text).ids == [token]:
            words.append(token)
    if not words:
        raise ValueError(f"{path} has no token that is a word with a space before it")
    return words
