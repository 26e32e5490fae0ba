"""Rendezvous hashing: who has a program, so that all who know the same names agree.

D. Thaler and C. Ravishankar, "Using name-based mappings to increase hit rates", IEEE/ACM
Transactions on Networking 6 (1), 1998: each name gets a score from itself and the key, and the
highest has the key. Who leaves moves its own keys only.
"""

import hashlib
from collections.abc import Iterable

__all__ = ["Rendezvous"]


class Rendezvous:
    """``names``: all that may have keys. Their order does not matter, nor which process asks."""

    __slots__ = ("_begun",)

    def __init__(self, names: Iterable[str]):
        # A hash of the name that goes on with the key; the length tells where the name ends.
        self._begun = {
            name: hashlib.blake2b(b"%d:%b" % (len(name.encode()), name.encode()), digest_size=8)
            for name in names
        }

    def owner(self, key: str, present: Iterable[str]) -> str:
        """Which of ``present``, at least one, has ``key``."""
        data = key.encode()
        return max((self._score(name, data), name) for name in present)[1]

    def _score(self, name: str, key: bytes) -> bytes:
        score = self._begun[name].copy()
        score.update(key)
        return score.digest()
