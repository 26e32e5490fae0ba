"""Patches apply exactly, or not at all."""

import difflib
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unidiff.patch import PatchSet

from vllm_thunder.patching.series import Patch, apply_diff, load_series, patched_text
from vllm_thunder.program.errors import PatchError

HEADER = "Why: one\n     two\nHow: three\nUpstream: four\nWhen it can go: five\n\n"
LINES = [f"line {n}\n" for n in range(1, 21)]
DIFF = """\
--- a/vllm/x.py
+++ b/vllm/x.py
@@ -4,7 +4,8 @@
 line 4
 line 5
 line 6
-line 7
+line seven
+line seven and a half
 line 8
 line 9
 line 10
@@ -14,6 +15,5 @@
 line 14
 line 15
 line 16
-line 17
 line 18
 line 19
"""
PATCHED = "".join(
    [*LINES[:6], "line seven\n", "line seven and a half\n", *LINES[7:16], *LINES[17:]]
)


def write_patch(directory: Path, text: str, name: str = "0001-x.patch") -> Path:
    file = directory / name
    file.write_bytes(text.encode())
    return file


def apply(text: str, diff: str = DIFF) -> str:
    (parsed,) = PatchSet(diff)
    return apply_diff(text, parsed, "0001-x.patch")


def test_hunks_apply_at_their_lines() -> None:
    assert apply("".join(LINES)) == PATCHED


def edited(*edits: tuple[int, list[str]]) -> str:
    """LINES with each line (counted from 1) replaced by the given ones."""
    lines = {number: [line] for number, line in enumerate(LINES, 1)} | dict(edits)
    return "".join(line for number in sorted(lines) for line in lines[number])


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (edited((4, ["line four\n"])), 4),
        (edited((6, ["line 6 \n"])), 6),
        (edited((6, ["\tline 6\n"])), 6),
        (edited((6, ["Line 6\n"])), 6),
        (edited((7, ["line 70\n"])), 7),
        (edited((8, ["line 8\r\n"])), 8),
        (edited((10, [])), 10),
        (edited((17, ["line 17 # changed\n"])), 17),
        (edited((19, ["line 19 # changed\n"])), 19),
        (edited((19, ["line 19"]), (20, [])), 19),
        (edited((19, []), (20, [])), 19),
        (edited((1, ["line 1\n", "one more\n"])), 4),
        (edited((1, [])), 4),
        (edited((12, ["line 12\n", "one more\n"])), 14),
        ("".join(LINES).replace("\n", "\r\n"), 4),
        (PATCHED, 7),
        ("", 4),
    ],
    ids=[
        "context before", "trailing blank", "tab", "case", "removed line", "one CRLF",
        "context gone", "removed line of the second hunk", "context after", "no final newline",
        "end gone", "offset down", "offset up", "offset between hunks", "CRLF", "applied already",
        "empty",
    ],
)  # fmt: skip
def test_any_difference_is_refused(text: str, line: int) -> None:
    with pytest.raises(
        PatchError, match=rf"0001-x\.patch does not apply to vllm/x\.py, line {line}:"
    ):
        apply(text)


def test_lines_outside_the_hunks_may_differ() -> None:
    assert apply(edited((12, ["twelve\n"]))) == PATCHED.replace("line 12\n", "twelve\n")


def test_overlapping_hunks_are_refused() -> None:
    first, second = DIFF.index("@@ -4"), DIFF.index("@@ -14")
    swapped = DIFF[:first] + DIFF[second:] + DIFF[first:second]
    with pytest.raises(PatchError, match="overlap at line 4"):
        apply("".join(LINES), swapped)


# Form feeds and Unicode line separators are no line ends for diff and patch.
_line = st.text(st.sampled_from("ab -+\\@\t\r\f\x1c\u2028é"), max_size=4).map(lambda s: s + "\n")
_body = st.lists(_line, max_size=30)


@settings(deadline=None)
@given(old=_body, new=_body)
def test_a_diff_turns_old_into_new(old: list[str], new: list[str]) -> None:
    old, new = ["head\n", *old, "tail\n"], ["head\n", *new, "tail\n"]
    diff = "".join(difflib.unified_diff(old, new, "a/vllm/x.py", "b/vllm/x.py"))
    for parsed in PatchSet(diff):
        assert apply_diff("".join(old), parsed, "p") == "".join(new)


@settings(deadline=None)
@given(old=_body, new=_body, data=st.data())
def test_no_diff_survives_a_changed_line(
    old: list[str], new: list[str], data: st.DataObject
) -> None:
    old, new = ["head\n", *old, "tail\n"], ["head\n", *new, "tail\n"]
    for parsed in PatchSet("".join(difflib.unified_diff(old, new, "a/vllm/x.py", "b/vllm/x.py"))):
        covered = [line.source_line_no - 1 for hunk in parsed for line in hunk if not line.is_added]
        changed = list(old)
        changed[data.draw(st.sampled_from(covered))] = "another line\n"
        with pytest.raises(PatchError, match="does not apply"):
            apply_diff("".join(changed), parsed, "p")


def test_the_header_is_read(tmp_path: Path) -> None:
    patch = Patch.read(write_patch(tmp_path, HEADER + DIFF))
    assert patch.purpose == "one"
    assert patch.header == {
        "Why": "one\ntwo", "How": "three", "Upstream": "four", "When it can go": "five",
    }  # fmt: skip
    assert patch.paths == ("vllm/x.py",)


def test_patches_apply_in_the_order_of_their_names(tmp_path: Path) -> None:
    second = DIFF.splitlines(keepends=True)[:2]
    second += ["@@ -6,3 +6,3 @@\n", " line 6\n", "-line seven\n", "+LINE SEVEN\n"]
    second += [" line seven and a half\n"]
    write_patch(tmp_path, HEADER + "".join(second), "0002-y.patch")
    write_patch(tmp_path, HEADER + DIFF, "0001-x.patch")
    series = load_series(tmp_path)
    assert [patch.name for patch in series] == ["0001-x.patch", "0002-y.patch"]
    result = patched_text("vllm/x.py", "".join(LINES), series)
    assert result == PATCHED.replace("line seven\n", "LINE SEVEN\n")
    with pytest.raises(PatchError, match=r"0002-y\.patch does not apply"):
        patched_text("vllm/x.py", "".join(LINES), series[::-1])


@pytest.mark.parametrize("heading", ["Why", "How", "Upstream", "When it can go"])
@pytest.mark.parametrize("damage", [lambda h: f"No{h}:", lambda h: f"{h}:"], ids=["gone", "empty"])
def test_a_header_must_say_everything(
    tmp_path: Path, heading: str, damage: Callable[[str], str]
) -> None:
    lines = [line for line in HEADER.splitlines() if not line.startswith(" ")]
    text = "\n".join(damage(heading) if line.startswith(f"{heading}:") else line for line in lines)
    with pytest.raises(PatchError, match=rf"0001-x\.patch: the header does not say '{heading}'"):
        Patch.read(write_patch(tmp_path, text + "\n\n" + DIFF))


@pytest.mark.parametrize(
    ("diff", "message"),
    [
        ("", "no diff in it"),
        (DIFF.replace("@@ -14,6 +15,5 @@", "@@ -14,9 +15,8 @@"), "not a unified diff"),
        (DIFF.replace("@@ -14,6 +15,5 @@", "@@ -14,4 +15,2 @@"), "not a unified diff"),
        (DIFF.replace("@@ -14,6 +15,5 @@", "@@ -14,5 +15,4 @@"), "belong to no hunk"),
        (DIFF + "+line 20\n", "belong to no hunk"),
        ("diff a/vllm/x.py b/vllm/x.py\n" + DIFF + "Only in a: z\n", "belong to no hunk"),
        (DIFF.replace("a/vllm/x.py", "/dev/null"), "only lines of existing files"),
        (DIFF.replace("b/vllm/x.py", "/dev/null"), "only lines of existing files"),
        (DIFF.replace("b/vllm/x.py", "b/vllm/y.py"), "only lines of existing files"),
        ("Binary files a/vllm/x.py and b/vllm/x.py differ\n", "only lines of existing files"),
        ("--- a/vllm/x.py\n+++ b/vllm/x.py\n", "only lines of existing files"),
        ("--- a/vllm/x.py\n+++ b/vllm/x.py\n@@ -4,0 +5 @@\n+x\n", "without context"),
        ("--- a/vllm/x.py\n+++ b/vllm/x.py\n@@ -4 +4 @@\n-line 4\n+x\n", "without context"),
        (DIFF + "\\ No newline at end of file\n", "not part of a hunk after line 19"),
        (DIFF + "\n", "not part of a hunk after line 19"),
    ],
    ids=[
        "none", "hunk too short", "hunk far too long", "hunk too long", "line at the end",
        "words between", "new file", "deleted file", "renamed file",
        "binary", "no hunk", "insertion without context", "change without context",
        "no final newline", "blank line",
    ],
)  # fmt: skip
def test_other_diffs_are_refused(tmp_path: Path, diff: str, message: str) -> None:
    with pytest.raises(PatchError, match=rf"0001-x\.patch: .*{message}"):
        Patch.read(write_patch(tmp_path, HEADER + diff))


def test_a_patch_with_carriage_returns_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PatchError, match=r"0001-x\.patch: a carriage return"):
        Patch.read(write_patch(tmp_path, HEADER + DIFF.replace("\n", "\r\n")))
