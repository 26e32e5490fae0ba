"""How many tokens a body is, and which prompts begin alike."""

import base64
import json
import random
import time

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from vllm_thunder.coordinator.prompts.prompts import Prompts
from vllm_thunder.coordinator.prompts.sizes import (
    MEDIA_TOKENS,
    PrefixIndex,
    TokenEstimate,
    body_size,
    prefix_marks,
)

WRITERS = {
    "plain": {},
    "compact": {"separators": (",", ":")},
    "indented": {"indent": 2},
    "unicode": {"ensure_ascii": False},
}


def chat(*contents, **others):
    messages = [{"role": "user", "content": content} for content in contents]
    return {"model": "m", "messages": messages, **others}


def dump(body, **writer):
    return json.dumps(body, **writer).encode()


def picture(size, kind="image/png"):
    return f"data:{kind};base64,{base64.b64encode(random.Random(1).randbytes(size)).decode()}"


def raw(size):
    return base64.b64encode(random.Random(2).randbytes(size)).decode()


MEDIA = {
    "openai image": {"type": "image_url", "image_url": {"url": picture(300_000)}},
    "openai sound": {"type": "input_audio", "input_audio": {"data": raw(300_000), "format": "wav"}},
    "openai file": {
        "type": "file",
        "file": {"file_data": picture(300_000, "application/pdf"), "filename": "a.pdf"},
    },
    "responses": {"type": "input_image", "image_url": picture(300_000)},
    "messages": {
        "type": "image",
        "source": {"type": "base64", "media_type": "image/png", "data": raw(300_000)},
    },
    "video": {"type": "video_url", "video_url": {"url": picture(300_000, "video/mp4;codecs=x")}},
}


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("kind", MEDIA)
def test_media_count_as_tokens_not_as_characters(kind, writer):
    words = {"type": "text", "text": "what is this?"}
    without = body_size(dump(chat([words]), **WRITERS[writer]))
    size = body_size(dump(chat([words, MEDIA[kind], MEDIA[kind]]), **WRITERS[writer]))
    assert size.counted_tokens == 2 * MEDIA_TOKENS
    assert size.text_bytes < without.text_bytes + 800


def test_a_picture_of_five_megabytes_is_not_a_million_tokens():
    body = dump(chat([{"type": "image_url", "image_url": {"url": picture(5_000_000)}}]))
    assert TokenEstimate().tokens(body_size(body)) < 2 * MEDIA_TOKENS


@pytest.mark.parametrize(
    "content",
    [
        "a style sheet: url(data:image/png;base64,AAAA) " + "word " * 5000,
        'an escaped "data:image/png;base64,AAAA" ' + "word " * 5000,
        'tool said {"data": "' + "A" * 5000 + '"}',
        "data of 5000 words: " + "word " * 5000,
    ],
)
def test_text_about_media_is_text(content):
    body = dump(chat(content))
    assert body_size(body) == (len(body), 0, False)


def test_values_called_data_that_are_short_or_words_are_text():
    for value in (
        "short",
        "words " * 100,
        "",
        "data:text/plain,hello",
        5,
        None,
        ["x"],
        {"data": 1},
    ):
        body = dump({"model": "m", "messages": [{"data": value}], "data": "data"})
        assert body_size(body) == (len(body), 0, False)


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("name", ["prompt", "input", "token_ids"])
@pytest.mark.parametrize(
    "ids", [[5], list(range(1000)), [[1, 2, 3], [4], [5, 6]], [[7]], [[1], [2]], [123456789] * 999]
)
def test_of_prompts_of_token_ids_the_longest_counts(ids, name, writer):
    body = dump({"model": "m", name: ids, "max_tokens": 5}, **WRITERS[writer])
    lists = ids if isinstance(ids[0], list) else [ids]
    expected = max(map(len, lists))
    size = body_size(body)
    assert size.counted_tokens == expected
    assert size.text_bytes < 100
    assert size.several is (len(lists) > 1)
    last = body_size(dump({"model": "m", name: ids}, **WRITERS[writer]))
    assert last.counted_tokens == expected


@pytest.mark.parametrize(
    "prompt", ["text", ["a text"], "[1, 2, 3]", [], [[]], {"a": [1, 2]}, [{"x": 1}], None]
)
def test_prompts_that_are_no_ids_are_text(prompt):
    for name in ("prompt", "input"):
        body = dump({"model": "m", name: prompt, "stop_token_ids": [1, 2, 3]})
        assert body_size(body) == (len(body), 0, False)


TEXTS = ["short", "word " * 500, 'odd ", " [1, 2], [3] \\ ', "", "☃", *["word " * 20] * 1000]


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize(
    "name", ["prompt", "input", "texts", "documents", "queries", "items", "text_2", "data_1"]
)
def test_of_a_list_of_texts_the_longest_counts(name, writer):
    several = body_size(dump({"model": "m", name: TEXTS}, **WRITERS[writer]))
    one = body_size(dump({"model": "m", name: [TEXTS[1]]}, **WRITERS[writer]))
    assert several.text_bytes == pytest.approx(one.text_bytes, abs=60)
    assert (several.several, one.several) == (True, False)
    longest_last = body_size(dump({name: TEXTS[::-1]}, **WRITERS[writer]))
    assert longest_last.text_bytes == pytest.approx(one.text_bytes, abs=60)


@pytest.mark.parametrize("writer", WRITERS)
def test_of_several_chats_the_longest_counts(writer):
    chats = [[{"role": "user", "content": "word " * n}] for n in (10, 900, 20)]
    size = body_size(dump({"model": "m", "messages": chats}, **WRITERS[writer]))
    one = body_size(dump({"model": "m", "messages": chats[1]}, **WRITERS[writer]))
    assert size.text_bytes == pytest.approx(one.text_bytes, abs=60)
    assert (size.several, one.several) == (True, False)


def test_what_is_no_json_has_no_text():
    assert body_size(None) == (0, MEDIA_TOKENS, False)


def test_neither_lists_nor_what_is_no_json_move_the_ratio():
    prompts = Prompts()
    before = prompts.look(dump(chat("x" * 1000)), 0.0, is_new=False).tokens
    for body in (None, dump({"input": ["x" * 1000] * 100}), dump({"prompt": [[1] * 50] * 9})):
        size = prompts.look(body, 0.0, is_new=True).size
        assert (size is None) is (body is None)
        for tokens in (1, 1500, 100_000) if size is not None else ():
            prompts.counted(size, tokens)
    assert prompts.look(dump(chat("x" * 1000)), 0.0, is_new=False).tokens == before


@given(body=st.binary(max_size=300) | st.text(max_size=300).map(str.encode))
@settings(max_examples=200, deadline=None)
def test_any_bytes_have_a_size_and_marks(body):
    for start in (b"", b'{"prompt": [1, ', b'{"data":"data:;base64,', b'{"input" : [[1'):
        size = body_size(start + body)
        assert 0 <= size.text_bytes <= len(start + body)
        assert size.counted_tokens >= 0
        assert TokenEstimate().tokens(size) >= 1
        assert len(prefix_marks(start + body)) <= 1


@pytest.mark.parametrize("bytes_per_token", [0.4, 1.5, 4.0, 40.0])
def test_the_ratio_is_learned_within_twenty_turns(bytes_per_token):
    """From a prior that is up to ten times too large or too small."""
    rng = random.Random(1)
    estimate = TokenEstimate()
    for _ in range(20):
        size = body_size(dump(chat("x" * rng.randint(500, 50_000))))
        true = size.text_bytes / (bytes_per_token * rng.uniform(0.8, 1.2))
        estimate.learn(size, round(true), "m")
    size = body_size(dump(chat("x" * 20_000)))
    assert estimate.tokens(size, "m") == pytest.approx(size.text_bytes / bytes_per_token, rel=0.15)
    assert estimate.bytes_per_token("another") == 4.0


def test_a_ratio_follows_a_change_and_short_or_pictured_prompts_do_not_move_it():
    estimate = TokenEstimate()
    text = body_size(dump(chat("x" * 10_000)))
    for ratio in [2.0] * 20 + [3.0] * 40:
        estimate.learn(text, round(text.text_bytes / ratio))
    learned = estimate.bytes_per_token()
    assert learned == pytest.approx(3.0, rel=0.05)
    estimate.learn(body_size(b"{}"), 50)
    estimate.learn(body_size(dump(chat([MEDIA["messages"]]))), 1200)
    estimate.learn(body_size(dump({"prompt": [1] * 1000})), 1000)
    estimate.learn(text, 0)
    assert estimate.bytes_per_token() == learned


def test_names_of_models_take_bounded_memory():
    estimate = TokenEstimate()
    size = body_size(dump(chat("x" * 1000)))
    for n in range(5000):
        estimate.learn(size, 100, f"m{n}")
    assert estimate.bytes_per_token("m0") != 4.0
    assert estimate.bytes_per_token("m4999") == 4.0


SYSTEM = {"role": "system", "content": "You are careful. " * 600}
TOOLS = [
    {"type": "function", "function": {"name": f"tool{n}", "description": "x" * 90}}
    for n in range(30)
]


def with_system(task, **others):
    return {"messages": [SYSTEM, {"role": "user", "content": task}], **others}


def common(one, other):
    pairs = list(zip(prefix_marks(one), prefix_marks(other), strict=False))
    shared = [a == b for a, b in pairs]
    assert shared == sorted(shared, reverse=True), "marks part once and stay apart"
    return sum(shared)


def test_programs_with_the_same_system_prompt_have_marks_in_common():
    one = dump(with_system("first task " * 1000, model="m"))
    other = dump(with_system("second task " * 1000, model="m"))
    assert common(one, other) == 4  # 10 kB of system prompt: 1, 2, 4 and 8 KiB
    assert len(prefix_marks(one)) > 4
    turns = [SYSTEM, {"role": "user", "content": "task " * 1000}]
    before = dump({"model": "m", "messages": turns})
    after = dump({"model": "m", "messages": [*turns, {"role": "assistant", "content": "x" * 9000}]})
    assert common(before, after) == len(prefix_marks(before))


def test_neither_sampling_nor_the_order_of_members_matters():
    one = with_system("task", model="m", tools=TOOLS, temperature=0.5, stream=True, user="a")
    other = with_system("task", tools=TOOLS, model="m", top_p=0.9, seed=7, program_id="p")
    assert common(dump(one), dump(other)) == len(prefix_marks(dump(one))) >= 4
    backwards = dict(reversed(list(one.items())))
    assert prefix_marks(dump(backwards)) == prefix_marks(dump(one))


def test_another_model_or_other_tools_have_nothing_in_common():
    one = with_system("task", model="m", tools=TOOLS)
    assert common(dump(one), dump(one | {"model": "adapter"})) == 0
    assert common(dump(one), dump(one | {"tools": [*TOOLS[::-1]]})) == 0
    assert common(dump(one), dump(with_system("task", model="m"))) == 0


@pytest.mark.parametrize("name", ["prompt", "input", "messages"])
def test_marks_of_every_kind_of_prompt(name):
    values = ["word " * 5000, [1, 2, 3] * 2500, [{"role": "user", "content": "word " * 5000}]]
    for value in values:
        body = {"model": "m", name: value}
        assert len(prefix_marks(dump(body))) == 5  # 1 to 16 KiB
        assert prefix_marks(dump(body | {"seed": 3})) == prefix_marks(dump(body))
    anthropic = {"model": "m", "messages": [], "system": "word " * 5000}
    assert len(prefix_marks(dump(anthropic))) == 5


def test_marks_end_at_a_megabyte_and_short_prompts_have_none():
    assert len(prefix_marks(dump({"prompt": "x" * 3_000_000}))) == 11
    assert prefix_marks(dump(chat("short"))) == []
    for wrong in (b"", b"[]", b"{", b"5", b"\xff", b'{"messages":' + b"[" * 100_000):
        assert prefix_marks(wrong) == []


@given(
    shared=st.integers(0, 40_000),
    mine=st.integers(0, 20_000),
    theirs=st.integers(0, 20_000),
)
@settings(max_examples=60, deadline=None)
def test_marks_in_common_cover_what_is_common(shared, mine, theirs):
    text = "abcdefghij" * 4_000
    one = prefix_marks(dump({"prompt": text[:shared] + "x" * mine}))
    other = prefix_marks(dump({"prompt": text[:shared] + "y" * theirs}))
    same = sum(a == b for a, b in zip(one, other, strict=False))
    if not mine and not theirs:
        assert one == other
    else:
        # They part at the byte behind the text and its quote.
        assert same == sum(1024 << n <= shared + 1 for n in range(11))
        assert set(one[same:]).isdisjoint(other)


def test_an_index_tells_the_longest_prefix_by_backend():
    index = PrefixIndex()
    marks = [11, 12, 13, 14]
    index.remember(marks, "a", 1.0)
    index.remember(marks[:2], "b", 2.0)
    assert index.longest(marks) == {"a": 8192, "b": 2048}
    assert index.longest(marks, since=1.5) == {"b": 2048}
    assert index.longest([11, 99]) == {"a": 1024, "b": 1024}
    assert index.longest([99]) == {}
    assert index.longest([]) == {}
    index.forget("a")
    assert index.longest(marks) == {"b": 2048}
    index.forget("a")
    index.forget("b")
    assert len(index) == 0


def test_a_full_index_forgets_what_nobody_uses_and_the_longest_first():
    index = PrefixIndex(most_marks=6)
    index.remember([1, 2, 3], "a", 1.0)
    index.remember([4, 5, 6], "b", 2.0)
    index.remember([1, 2, 3], "a", 3.0)
    index.remember([7, 8], "a", 4.0)
    assert index.longest([4, 5, 6]) == {"b": 1024}
    assert index.longest([1, 2, 3]) == {"a": 4096}
    index.remember(list(range(20, 40)), "c", 5.0)
    assert index.longest(list(range(20, 40))) == {"c": 1024 << 5}
    assert len(index) == 6


class IndexMachine(RuleBasedStateMachine):
    """Beside a list of everything that was ever remembered."""

    MOST = 12

    def __init__(self):
        super().__init__()
        self.index = PrefixIndex(self.MOST)
        self.used = {}  # mark: {backend: time}
        self.order = []  # marks, the one used the longest ago first
        self.now = 0.0

    @rule(branch=st.integers(0, 3), length=st.integers(0, 8), backend=st.sampled_from("abc"))
    def remember(self, branch, length, backend):
        """All share their first two marks."""
        self.now += 1.0
        marks = self.marks(branch)[:length]
        self.index.remember(marks, backend, self.now)
        for mark in reversed(marks):
            self.used.setdefault(mark, {})[backend] = self.now
            if mark in self.order:
                self.order.remove(mark)
            self.order.append(mark)
        while len(self.order) > self.MOST:
            del self.used[self.order.pop(0)]

    @rule(backend=st.sampled_from("abcd"))
    def forget(self, backend):
        self.index.forget(backend)
        for mark in list(self.used):
            self.used[mark].pop(backend, None)
            if not self.used[mark]:
                del self.used[mark]
                self.order.remove(mark)

    @rule(branch=st.integers(0, 3), age=st.none() | st.integers(0, 10))
    def ask(self, branch, age):
        marks = self.marks(branch)
        since = float("-inf") if age is None else self.now - age
        expected = {}
        for position, mark in enumerate(marks):
            for backend, used in self.used.get(mark, {}).items():
                if used >= since:
                    expected[backend] = 1024 << position
        assert self.index.longest(marks, since) == expected

    def marks(self, branch):
        return [1, 2, *(10 * branch + n for n in range(3, 9))]

    @invariant()
    def is_bounded(self):
        assert len(self.index) == len(self.used) <= self.MOST


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def spent(function, *arguments, times=5):
    """CPU seconds of the fastest of some calls."""
    fastest = float("inf")
    for _ in range(times):
        began = time.process_time()
        function(*arguments)
        fastest = min(fastest, time.process_time() - began)
    return fastest


LARGE = {
    "chat": chat(*["word " * 1000] * 400),
    "text": {"model": "m", "prompt": "word " * 400_000},
    "ids": {"model": "m", "prompt": [100_000 + n for n in range(250_000)]},
    "lists of ids": {"model": "m", "input": [[1, 2]] * 250_000},
    "texts": {"model": "m", "input": ["word " * 20] * 20_000},
    "short texts": {"model": "m", "input": ["a"] * 400_000},
    "quotes": chat('"' * 1_000_000),
    "data": chat(*["data"] * 50_000, *['"data"'] * 50_000),
    "picture": chat([MEDIA["openai image"]] * 5),
}


@pytest.mark.parametrize("kind", LARGE)
def test_two_megabytes_take_milliseconds(kind):
    body = dump(LARGE[kind])
    assert 1_900_000 < len(body) < 9_000_000
    per_two_megabytes = 2_000_000 / len(body)
    assert spent(body_size, body) * per_two_megabytes < 0.010
    assert spent(prefix_marks, body) * per_two_megabytes < 0.015


def test_beyond_some_thousand_places_what_is_there_is_text():
    body = dump(chat([MEDIA["messages"] | {"source": {"data": "A" * 300}}] * 5_000))
    assert body_size(body).counted_tokens == 2000 * MEDIA_TOKENS


def test_items_beyond_some_thousand_are_taken_to_be_no_longer():
    for item in ("word " * 20, [1, 2, 3]):
        size = body_size(dump({"input": [item] * 5000}))
        few = body_size(dump({"input": [item] * 5}))
        assert size.text_bytes == pytest.approx(few.text_bytes, abs=20)
        assert size.counted_tokens == few.counted_tokens


def test_ten_kilobytes_take_microseconds():
    body = dump(chat(*["word " * 200] * 10))
    began = time.process_time()
    for _ in range(200):
        body_size(body)
    assert (time.process_time() - began) / 200 < 100e-6
