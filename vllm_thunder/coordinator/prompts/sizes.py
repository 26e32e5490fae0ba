"""How many tokens a request body is, and which prompts begin alike, without tokenizing anything.

Both look at the bytes that the client sent. Estimates need not be exact: engines that know
programs count for themselves, and what they report corrects the ratio.
"""

import hashlib
import re
from collections import OrderedDict
from math import inf
from typing import NamedTuple

import msgspec

__all__ = ["MEDIA_TOKENS", "BodySize", "PrefixIndex", "TokenEstimate", "body_size", "prefix_marks"]

#: Tokens that an inline picture, recording or film counts as. A picture of a megapixel is 765 to
#: 1,300 tokens in the models that tile or patch it, half a minute of sound 750.
MEDIA_TOKENS = 1000

#: Bytes of JSON a token before anything is known of a model.
_PRIOR_BYTES_PER_TOKEN = 4.0
#: No text has fewer or more: bodies that seem to are mostly something else than their prompt.
_LEAST_BYTES_PER_TOKEN, _MOST_BYTES_PER_TOKEN = 0.25, 64.0
#: Share of what was known that counts beside a new prompt: the last ten or so are what is known.
_KEPT_SHARE = 0.9
#: Models beyond this many are estimated by the prior: names come from clients.
_MOST_MODELS = 1000
#: Prompts with less text than this say little of a model's ratio.
_FEWEST_BYTES = 64

#: What base64 content stands behind: a data URL that is a whole value, or the name ``data``.
_DATA = b'"data'
_BASE64_FOLLOWS = b";base64,"
#: The head of a data URL is no longer than this: media type and parameters.
_LONGEST_HEAD = 200
#: A value of ``data`` that begins with so much base64 is taken for it.
_BASE64 = re.compile(rb'\s*:\s*"(?=[A-Za-z0-9+/=_\-]{256})')
#: Lists: of texts, of token ids, and of either of these or of whole chats.
_TEXTS = re.compile(rb'\[\s*"')
_IDS = re.compile(rb"\[[\s\[]*\d")
_LISTS = re.compile(rb"\[\s*\[")
#: What stands between two of their items. In a text its quotes would be escaped.
_BETWEEN_TEXTS = re.compile(rb'"\s*,\s*"')
_BETWEEN_LISTS = re.compile(rb"\]\s*,\s*\[")
_CHAT = b'"messages"'
_CHATS_FOLLOW = re.compile(rb"\s*:\s*\[\s*\[")

#: Places in a body, and items of a list, that are looked at; behind them all is text, and items are
#: taken to be no longer.
_MOST_PLACES = 2000

#: The first mark covers so many bytes, the next twice as many, up to ``_LONGEST_MARK``.
_FIRST_MARK = 1024
_LONGEST_MARK = 1 << 20


class BodySize(NamedTuple):
    """``text_bytes``: of the body, without what is not text. ``counted_tokens``: token ids, and an
    allowance for every picture, recording or film. ``several``: there are several prompts, for
    each of which an engine needs memory of its own; this is the size of the largest."""

    text_bytes: int
    counted_tokens: int
    several: bool = False


def body_size(body: bytes | None) -> BodySize:
    """What a model call's JSON body is made of; a picture given by its address counts as its
    address. Costs a few searches through the bytes, nothing is parsed. None: a body that is no
    JSON, which is a recording in nearly all cases."""
    if body is None:
        return BodySize(0, MEDIA_TOKENS)
    media, media_bytes = _inline_media(body)
    text_bytes = len(body) - media_bytes
    ids, several = 0, False
    for prompts in _lists_in(body):
        text_bytes -= len(prompts)
        largest, among = _largest(prompts)
        several = several or among
        if _IDS.match(prompts):
            ids = max(largest.count(b",") + 1, ids)
        else:
            text_bytes += len(largest)
    return BodySize(max(text_bytes, 0), ids + media * MEDIA_TOKENS, several)


class TokenEstimate:
    """Tokens of request bodies, by a ratio of bytes to tokens that is learned for each model."""

    def __init__(self) -> None:
        #: By model, bytes and tokens of its prompts lately.
        self._seen: dict[str, tuple[float, float]] = {}

    def tokens(self, size: BodySize, model: str = "") -> int:
        """Tokens of the prompt, at least 1."""
        return max(round(size.text_bytes / self.bytes_per_token(model)) + size.counted_tokens, 1)

    def learn(self, size: BodySize, tokens: int, model: str = "") -> None:
        """A prompt of this size turned out to have ``tokens`` tokens."""
        text_tokens = tokens - size.counted_tokens
        if size.several or size.text_bytes < _FEWEST_BYTES:
            return
        # Where text is the smaller part the allowances for media decide, and they are no measure.
        if text_tokens <= size.counted_tokens:
            return
        if model not in self._seen and len(self._seen) >= _MOST_MODELS:
            return
        text_tokens = min(text_tokens, round(size.text_bytes / _LEAST_BYTES_PER_TOKEN))
        text_tokens = max(text_tokens, round(size.text_bytes / _MOST_BYTES_PER_TOKEN))
        # Sums rather than a mean of ratios: what large prompts take is what matters.
        seen_bytes, seen_tokens = self._seen.get(model, (0.0, 0.0))
        self._seen[model] = (
            seen_bytes * _KEPT_SHARE + size.text_bytes,
            seen_tokens * _KEPT_SHARE + text_tokens,
        )

    def bytes_per_token(self, model: str = "") -> float:
        """Of the JSON text of a prompt."""
        seen = self._seen.get(model)
        return _PRIOR_BYTES_PER_TOKEN if seen is None else seen[0] / seen[1]


class _Prompt(msgspec.Struct):
    """Members of a body that the engine makes the prompt of, in the order in which templates put
    them; the model, or adapter, decides whose KV it is."""

    model: msgspec.Raw = msgspec.Raw()
    tools: msgspec.Raw = msgspec.Raw()
    system: msgspec.Raw = msgspec.Raw()
    instructions: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()


_PROMPT_DECODER = msgspec.json.Decoder(_Prompt)
_PROMPT_MEMBERS = ("model", "tools", "system", "instructions", "messages", "prompt", "input")


def prefix_marks(body: bytes) -> list[int]:
    """Hashes of the first 1, 2, 4, ... KiB of a body's prompt, as far as it goes, at most 1 MiB.

    Bodies whose prompts begin alike have as many marks in common, whatever order their client
    writes the members in and whatever else they say: sampling does not matter. Tools and system
    prompt come first, as in the prompt that the engine makes. Empty for what is not a JSON object.
    """
    try:
        prompt = _PROMPT_DECODER.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return []
    marks: list[int] = []
    digest = hashlib.blake2b(digest_size=8)
    hashed, next_mark = 0, _FIRST_MARK
    for name in _PROMPT_MEMBERS:
        raw = memoryview(getattr(prompt, name))
        if not len(raw):
            continue
        digest.update(name.encode())
        at = 0
        while next_mark - hashed <= len(raw) - at:
            digest.update(raw[at : at + next_mark - hashed])
            at += next_mark - hashed
            hashed = next_mark
            marks.append(int.from_bytes(digest.digest()))
            if next_mark == _LONGEST_MARK:
                return marks
            next_mark *= 2
        digest.update(raw[at:])
        hashed += len(raw) - at
    return marks


class PrefixIndex:
    """Which backends computed which prompt prefixes lately; forgets the marks unused for longest.

    ``most_marks``: marks that are remembered at most.
    """

    def __init__(self, most_marks: int = 100_000):
        self._most_marks = most_marks
        #: For each mark when it was used last, by backend; the mark used the longest ago first.
        self._used: OrderedDict[int, dict[str, float]] = OrderedDict()
        self._marks_of: dict[str, dict[int, None]] = {}

    def __len__(self) -> int:
        """Marks that are remembered."""
        return len(self._used)

    def remember(self, marks: list[int], backend_id: str, now: float) -> None:
        """A prompt with these marks was computed on the backend."""
        known = self._marks_of.setdefault(backend_id, {})
        for mark in reversed(marks):  # so that the shortest, which most have, is forgotten last
            self._used.setdefault(mark, {})[backend_id] = now
            self._used.move_to_end(mark)
            known[mark] = None
        while len(self._used) > self._most_marks:
            mark, backends = self._used.popitem(last=False)
            for each in backends:
                self._forget_mark(each, mark)
        if not known:
            self._marks_of.pop(backend_id, None)

    def longest(self, marks: list[int], since: float = -inf) -> dict[str, int]:
        """Bytes of the longest prefix that each backend computed at ``since`` or later."""
        longest: dict[str, int] = {}
        for index in range(len(marks) - 1, -1, -1):
            for backend_id, used in self._used.get(marks[index], {}).items():
                if used >= since:
                    longest.setdefault(backend_id, _FIRST_MARK << index)
        return longest

    def forget(self, backend_id: str) -> None:
        """The backend's cache is empty, or the backend is gone."""
        for mark in self._marks_of.pop(backend_id, {}):
            backends = self._used[mark]
            del backends[backend_id]
            if not backends:
                del self._used[mark]

    def _forget_mark(self, backend_id: str, mark: int) -> None:
        marks = self._marks_of[backend_id]
        del marks[mark]
        if not marks:
            del self._marks_of[backend_id]


def _inline_media(body: bytes) -> tuple[int, int]:
    """How many values in base64 there are, and how many bytes they take."""
    count = size = at = 0
    for _ in range(_MOST_PLACES):
        at = body.find(_DATA, at)
        if at < 0:
            break
        escaped, after = body[at - 1 : at] == b"\\", at + len(_DATA)
        start = -1 if escaped else _start_of_base64(body, after)
        at = max(after, start)
        if start >= 0:
            count += 1
            # Nothing in base64 is escaped: the next quote ends it.
            end = body.find(b'"', start)
            at = end if end >= 0 else len(body)
            size += at - start
    return count, size


def _start_of_base64(body: bytes, after: int) -> int:
    """Of the value that begins with ``data``, or has that name, up to ``after``; -1: none."""
    if body.startswith(b":", after):
        follows = body.find(_BASE64_FOLLOWS, after, after + _LONGEST_HEAD)
        return follows + len(_BASE64_FOLLOWS) if follows >= 0 else -1
    named = _BASE64.match(body, after + 1) if body.startswith(b'"', after) else None
    return -1 if named is None else named.end()


class _Lists(msgspec.Struct):
    """Members of a body that may be a list of prompts, or of what prompts are made of."""

    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()
    input_ids: msgspec.Raw = msgspec.Raw()
    token_ids: msgspec.Raw = msgspec.Raw()
    text: msgspec.Raw = msgspec.Raw()
    texts: msgspec.Raw = msgspec.Raw()
    documents: msgspec.Raw = msgspec.Raw()
    queries: msgspec.Raw = msgspec.Raw()
    items: msgspec.Raw = msgspec.Raw()
    text_1: msgspec.Raw = msgspec.Raw()
    text_2: msgspec.Raw = msgspec.Raw()
    data_1: msgspec.Raw = msgspec.Raw()
    data_2: msgspec.Raw = msgspec.Raw()


_LISTS_DECODER = msgspec.json.Decoder(_Lists)


def _lists_in(body: bytes) -> list[bytes]:
    """Its lists of texts, of token ids, and of lists of these or chats."""
    chat = body.find(_CHAT)
    if chat >= 0 and not _CHATS_FOLLOW.match(body, chat + len(_CHAT)):
        return []  # a chat is text, and to look for what is not there costs time
    try:
        found = msgspec.structs.astuple(_LISTS_DECODER.decode(body))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return []
    members = (bytes(raw) for raw in found if len(raw))
    return [raw for raw in members if _TEXTS.match(raw) or _IDS.match(raw) or _LISTS.match(raw)]


def _largest(prompts: bytes) -> tuple[bytes, bool]:
    """The longest item of a list of prompts, and whether there are others; of a list of ids, which
    is one prompt, all of it."""
    pattern = _BETWEEN_TEXTS if _TEXTS.match(prompts) else _BETWEEN_LISTS
    between = pattern.search(prompts)
    if between is None:
        return prompts, False
    items = prompts.split(between[0], _MOST_PLACES)
    return max(items[:_MOST_PLACES], key=len), True
