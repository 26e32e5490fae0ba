"""Who chooses the engine of a call where no coordinator does: pure functions of what a router sees.

Both are given the engines themselves, without a proxy between: that favours them.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Protocol

__all__ = ["One", "PrefixHash", "Router", "Sticky"]

Messages = Sequence[Mapping[str, str]]


class Router(Protocol):
    def choose(self, program_id: str, messages: Messages, loads: Sequence[int]) -> int:
        """The index of the engine for this call; ``loads``: calls in flight at each."""


class One:
    """There is one server to call: the coordinator."""

    def choose(self, program_id: str, messages: Messages, loads: Sequence[int]) -> int:
        return 0


class Sticky:
    """All calls of a program go to one engine, chosen by a hash of its id."""

    def choose(self, program_id: str, messages: Messages, loads: Sequence[int]) -> int:
        return _hash(program_id) % len(loads)


class PrefixHash:
    """Prefix hashing with bounded loads, by the rules and defaults of the policy ``prefix_hash`` of
    SGLang's model gateway: the engine of a hash of the prompt's first 256 tokens; if more calls are
    in flight there than 1.25 times the mean, this call counted, the least loaded one of those below
    that bound; if there is none, the first one after all.

    A token is a word here, as it is for the tiny model's tokenizer. The hash is taken modulo the
    number of engines, which is more even than a ring of three.
    """

    def __init__(self, tokens: int = 256, load_factor: float = 1.25):
        self._tokens = tokens
        self._load_factor = load_factor

    def choose(self, program_id: str, messages: Messages, loads: Sequence[int]) -> int:
        first = _hash(self._prefix(messages)) % len(loads)
        most = self._load_factor * (sum(loads) + 1) / len(loads)
        if loads[first] <= most:
            return first
        others = [index for index, load in enumerate(loads) if load <= most]
        return min(others, key=lambda index: loads[index], default=first)

    def _prefix(self, messages: Messages) -> str:
        words: list[str] = []
        for message in messages:
            missing = self._tokens - len(words)
            if missing <= 0:
                break
            words += message["content"].split(maxsplit=missing)[:missing]
        return " ".join(words)


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8])
