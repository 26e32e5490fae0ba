"""The fork: recorded files, the patches, and the patched copies that get imported."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NoReturn

from vllm_thunder.patching.cache import cache_directory, is_whole, write_atomically
from vllm_thunder.patching.records import HASHES, FileRecord, State, load_records, sha256
from vllm_thunder.program.errors import PatchError
from vllm_thunder.version import VLLM_VERSION, __version__

__all__ = ["Fork", "series_directory"]


def series_directory(version: str = VLLM_VERSION) -> Path:
    """Where the patches for one vLLM version are: package data of a wheel, or the checkout.

    Raises:
        PatchError: in neither place.
    """
    package = Path(__file__).resolve().parent.parent
    places = [base / "patches" / version for base in (package, package.parent)]
    for place in places:
        if (place / HASHES).is_file():
            return place
    raise PatchError(f"no patches for vLLM {version}: looked in {places[0]} and {places[1]}")


@dataclass(frozen=True)
class Fork:
    """vLLM ``version`` with the patches in ``directory``."""

    directory: Path
    version: str
    files: tuple[FileRecord, ...]

    @classmethod
    def load(cls, directory: Path | None = None) -> "Fork":
        directory = directory or series_directory()
        return cls(directory, *load_records(directory / HASHES))

    @cached_property
    def modules(self) -> Mapping[str, FileRecord]:
        """The records by module name."""
        return {record.module: record for record in self.files}

    def patched_copy(self, record: FileRecord, origin: str | None) -> Path | None:
        """The file to import instead of ``origin``, where vLLM has the module; None: ``origin``.

        Raises:
            PatchError: the file is none of those recorded, or its patched copy cannot be made.
        """
        content = self._read(record, origin)
        state = record.state(content)
        if state is State.DIFFERS:
            self._refuse(record, origin)
        return self._cached_copy(record, content) if state is State.APPLIES else None

    def check_imported(self, record: FileRecord, origin: str | None) -> None:
        """Accept an imported module if its file is already patched, or a pinned one."""
        state = record.state(self._read(record, origin))
        if state is State.APPLIES:
            raise PatchError(
                f"{record.module} is already imported without the patches: import vllm_thunder "
                "before vllm, or start with `vllm_thunder serve`. In a spawned process the main "
                "module must do so: an interactive session or `python -c` cannot"
            )
        if state is State.DIFFERS:
            self._refuse(record, origin)

    def patched_content(self, record: FileRecord, content: bytes) -> bytes:
        """Apply the patches to a released file and compare with the record.

        Raises:
            PatchError: a patch does not apply, or the result is not the recorded one.
        """
        from vllm_thunder.patching.series import load_series, patched_text

        text = patched_text(record.path, content.decode("utf-8"), load_series(self.directory))
        patched = text.encode("utf-8")
        if sha256(patched) != record.patched:
            raise PatchError(
                f"{record.path}: the patches in {self.directory} give another file than "
                f"{HASHES} says; after changing a patch run patches/record.py"
            )
        return patched

    def _cached_copy(self, record: FileRecord, content: bytes) -> Path:
        assert record.patched is not None
        patches = [file.read_bytes() for file in sorted(self.directory.glob("*.patch"))]
        key = sha256("".join(map(sha256, [content, *patches])).encode())
        file = cache_directory() / "patches" / self.version / key[:32] / record.path
        if not is_whole(file, record.patched):
            write_atomically(file, self.patched_content(record, content))
        return file

    def _read(self, record: FileRecord, origin: str | None) -> bytes:
        try:
            return Path(str(origin)).read_bytes()
        except OSError as error:
            raise PatchError(
                f"{record.module} has no source file that could be checked: {origin}"
            ) from error

    def _refuse(self, record: FileRecord, origin: str | None) -> NoReturn:
        raise PatchError(
            f"{record.path} is not the file of vLLM {self.version} that vllm_thunder "
            f"{__version__} was made for: {origin} was changed; `vllm_thunder patches check` "
            "lists every such file"
        )
