"""The patches: unified diffs with a header that says why, applied without any tolerance."""

from collections.abc import Iterable
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

from unidiff.errors import UnidiffParseError
from unidiff.patch import PatchedFile, PatchSet

from vllm_thunder.program.errors import PatchError

__all__ = ["Patch", "apply_diff", "load_series", "patched_text"]

_HEADINGS = ("Why", "How", "Upstream", "When it can go")


@dataclass(frozen=True, slots=True)
class Patch:
    """One patch file. ``header`` maps each heading to its text."""

    file: Path
    header: dict[str, str]
    diffs: tuple[PatchedFile, ...]

    @property
    def name(self) -> str:
        return self.file.name

    @property
    def purpose(self) -> str:
        """The first line of Why."""
        return self.header["Why"].splitlines()[0]

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(diff.path for diff in self.diffs)

    @classmethod
    def read(cls, file: Path) -> "Patch":
        """Parse a patch file.

        Raises:
            PatchError: a heading is missing, the diff is malformed, or it does anything but
                change lines of existing files in hunks that have context.
        """
        text = file.read_bytes().decode("utf-8")  # read_text would hide a carriage return
        if "\r" in text:
            raise PatchError(f"{file.name}: a carriage return in it")
        header = _parse_header(file.name, text)
        try:
            diffs = tuple(PatchSet(StringIO(text)))
        except UnidiffParseError as error:
            raise PatchError(f"{file.name}: not a unified diff: {error}") from error
        if not diffs:
            raise PatchError(f"{file.name}: no diff in it")
        for diff in diffs:
            _check_diff(file.name, diff)
        # The parser skips what it does not understand, and the end of a hunk that is too long.
        _, _, body = text.partition("\n--- ")
        if body.count("\n") != sum(2 + sum(1 + len(hunk) for hunk in diff) for diff in diffs):
            raise PatchError(f"{file.name}: lines that belong to no hunk")
        return cls(file, header, diffs)


def load_series(directory: Path) -> tuple[Patch, ...]:
    """The patches in a directory, in the order in which they apply: by name."""
    return tuple(Patch.read(file) for file in sorted(directory.glob("*.patch")))


def patched_text(path: str, text: str, series: Iterable[Patch]) -> str:
    """Apply every patch that changes ``path``, in order; raises as :func:`apply_diff`."""
    for patch in series:
        for diff in patch.diffs:
            if diff.path == path:
                text = apply_diff(text, diff, patch.name)
    return text


def apply_diff(text: str, diff: PatchedFile, patch_name: str) -> str:
    """Apply one file's hunks, each at its own line: no offset, no fuzz, no partial result.

    Raises:
        PatchError: a context or removed line differs; the message names patch, file and line.
    """
    source = _lines(text)
    result: list[str] = []
    done = 0  # source lines consumed
    for hunk in diff:
        start = hunk.source_start - 1
        if start < done:
            raise PatchError(f"{patch_name}: hunks of {diff.path} overlap at line {start + 1}")
        result += source[done:start]
        done = start
        for line in hunk:
            if not line.is_added:
                found = source[done] if done < len(source) else None
                if found != line.value:
                    raise PatchError(
                        f"{patch_name} does not apply to {diff.path}, line {done + 1}: "
                        f"expected {line.value!r}, found {found!r}"
                    )
                done += 1
            if not line.is_removed:
                result.append(line.value)
    return "".join(result + source[done:])


def _lines(text: str) -> list[str]:
    # As diff and patch count them: str.splitlines would also break at form feeds.
    return list(StringIO(text))


def _parse_header(name: str, text: str) -> dict[str, str]:
    header: dict[str, list[str]] = {}
    section: list[str] | None = None
    for line in text.splitlines():
        if line.startswith("--- "):
            break
        heading, colon, rest = line.partition(":")
        if colon and heading in _HEADINGS:
            section = header.setdefault(heading, [])
            section.append(rest.strip())
        elif section is not None and line.strip():
            section.append(line.strip())
    for heading in _HEADINGS:
        if not "".join(header.get(heading, ())):
            raise PatchError(f"{name}: the header does not say {heading!r}")
    return {heading: "\n".join(lines) for heading, lines in header.items()}


def _check_diff(name: str, diff: PatchedFile) -> None:
    if diff.is_rename or diff.is_binary_file or not diff.is_modified_file or not len(diff):
        raise PatchError(f"{name}: {diff.path}: only lines of existing files can be changed")
    for hunk in diff:
        if not any(line.is_context for line in hunk):
            raise PatchError(
                f"{name}: {diff.path}, line {hunk.source_start}: a hunk without context"
            )
        for line in hunk:
            if not (line.is_context or line.is_added or line.is_removed):
                raise PatchError(
                    f"{name}: {diff.path}: a line that is not part of a hunk after line "
                    f"{hunk.source_start + hunk.source_length - 1}"
                )
