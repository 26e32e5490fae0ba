"""The log of changes: whoever reads it page by page knows in the end what is there."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from vllm_thunder.program.changes import ChangeLog
from vllm_thunder.program.errors import IntegrityError

NAMES = st.sampled_from("abcdef")


def test_every_program_is_told_once_in_the_order_of_its_last_change():
    log = ChangeLog()
    for name in "abcab":
        log.changed(name)
    assert log.page(0, 10) == (["c", "a", "b"], [], 5, True)
    assert log.page(3, 10) == (["a", "b"], [], 5, True)
    assert log.page(5, 10) == ([], [], 5, True)


def test_pages_leave_nothing_out():
    log = ChangeLog()
    for name in ("a", "b", "c", "b", "d"):
        log.changed(name)
    log.gone("c")
    pages, reached, complete = [], 0, False
    while not complete:
        changed, gone, reached, complete = log.page(reached, 1)
        pages.append((changed, gone))
    assert pages == [(["a"], []), (["b"], []), (["d"], []), ([], ["c"])]


def test_what_is_no_single_programs_moves_the_end():
    log = ChangeLog()
    log.changed("a")
    log.touched()
    assert log.sequence == 2
    assert log.page(1, 10) == ([], [], 2, True)
    assert log.page(0, 1) == (["a"], [], 2, True)


def test_who_comes_back_is_not_gone():
    log = ChangeLog()
    log.changed("a")
    log.gone("a")
    assert log.page(0, 10) == ([], ["a"], 2, True)
    log.changed("a")
    assert log.page(0, 10) == (["a"], [], 3, True)
    assert log.page(2, 10) == (["a"], [], 3, True)


def test_who_reads_from_the_beginning_hears_of_nobody_that_had_gone_before():
    log = ChangeLog()
    log.changed("a")
    log.gone("a")
    log.changed("b")
    began = log.sequence
    log.gone("b")
    assert log.page(0, 10, gone_after=began) == ([], ["b"], 4, True)


def test_ids_of_many_characters_make_short_pages():
    log = ChangeLog()
    for number in range(5):
        log.changed(f"{number}" * 600_000)
    sizes, reached, complete = [], 0, False
    while not complete:
        changed, _, reached, complete = log.page(reached, 100)
        sizes.append(len(changed))
    assert sizes == [1, 1, 1, 1, 1]


def test_what_is_forgotten_cannot_be_told():
    log = ChangeLog(most_gone=2)
    for name in "abc":
        log.changed(name)
    for name in "abc":
        log.gone(name)  # changes 4, 5 and 6
    assert not log.reaches_back_to(3)
    assert log.reaches_back_to(4)
    assert log.page(4, 10) == ([], ["b", "c"], 6, True)
    assert not log.reaches_back_to(7)
    log.check_integrity(set())


def test_replaced_changes_do_not_add_up():
    log = ChangeLog()
    for _ in range(10_000):
        log.changed("a")
        log.changed("b")
    assert len(log._entries) < 1100
    assert log.page(0, 10) == (["a", "b"], [], 20_000, True)


def test_check_integrity_sees_a_program_that_nobody_logged():
    log = ChangeLog()
    log.changed("a")
    with pytest.raises(IntegrityError, match="known on one side only"):
        log.check_integrity({"a", "b"})


class Reader:
    """Follows a log as a report's reader does, from the beginning when it has to."""

    def __init__(self, log, versions):
        self.log, self.versions = log, versions
        self.known: dict[str, int] = {}
        self.after: int | None = None
        self.began = 0
        self.complete = False

    def read(self, limit):
        if self.after is None or not self.log.reaches_back_to(max(self.after, self.began)):
            self.known, self.after, self.began = {}, 0, self.log.sequence
        changed, gone, self.after, self.complete = self.log.page(self.after, limit, self.began)
        assert len(changed) + len(gone) <= limit
        self.known.update((name, self.versions[name]) for name in changed)
        for name in gone:  # it may have come and gone since the page before
            self.known.pop(name, None)
        if self.complete:
            self.began = 0


class Log(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.log = ChangeLog(most_gone=2)
        self.versions: dict[str, int] = {}
        self.readers = [Reader(self.log, self.versions) for _ in range(2)]

    @rule(name=NAMES)
    def change(self, name):
        self.versions[name] = self.versions.get(name, 0) + 1
        self.log.changed(name)

    @rule(name=NAMES)
    def go(self, name):
        if self.versions.pop(name, None) is not None:
            self.log.gone(name)

    @rule()
    def touch(self):
        self.log.touched()

    @rule(who=st.integers(0, 1), limit=st.integers(1, 3))
    def read(self, who, limit):
        self.readers[who].read(limit)

    @rule(who=st.integers(0, 1), limit=st.integers(1, 3))
    def read_to_the_end(self, who, limit):
        reader = self.readers[who]
        for _ in range(20):
            reader.read(limit)
            if reader.complete:
                break
        assert reader.complete
        assert reader.known == self.versions

    @invariant()
    def the_books_agree(self):
        self.log.check_integrity(self.versions.keys())


TestLog = Log.TestCase
TestLog.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
