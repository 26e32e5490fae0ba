"""Generated words: what replayed programs say, and what the tiny model's tokenizer knows.

A trace gives token counts, never text. The replay writes as many words instead; the tiny
model's tokenizer has one token for each word (with the space before it), so that a context
has the length the trace asks for. Another model's tokenizer cuts the words into pieces: see
``words_per_token`` in :class:`vllm_thunder.replay.driver.ClientOptions`.
"""

import random
from functools import lru_cache

__all__ = ["LEXICON_SIZE", "lexicon", "write_words"]

LEXICON_SIZE = 2400
_LEXICON_SEED = "vllm_thunder lexicon 1"
_ONSETS = "b c d f g h j k l m n p r s t v w z br cl dr fl gr pl st tr".split()
_VOWELS = "a e i o u ai ea ou".split()
_CODAS = ["", "", "", "n", "r", "s", "l", "t", "m", "nd", "st"]


@lru_cache(maxsize=1)
def lexicon() -> tuple[str, ...]:
    """The ``LEXICON_SIZE`` words, always the same ones: two or three syllables, lower case."""
    rng = random.Random(_LEXICON_SEED)
    words: dict[str, None] = {}
    while len(words) < LEXICON_SIZE:
        syllables = rng.choice((2, 2, 3))
        stem = "".join(rng.choice(_ONSETS) + rng.choice(_VOWELS) for _ in range(syllables))
        words[stem + rng.choice(_CODAS)] = None
    return tuple(words)


def write_words(count: int, seed: str) -> str:
    """``count`` words separated by single spaces; the same ``seed`` gives the same text."""
    return " ".join(random.Random(seed).choices(lexicon(), k=count))
