"""``hashes.json``: which content each file of vLLM may have."""

import enum
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_thunder.program.errors import PatchError

__all__ = ["HASHES", "FileRecord", "State", "load_records", "module_name", "sha256"]

#: The file's name, beside the patches.
HASHES = "hashes.json"


class State(enum.Enum):
    """What a file of the installed vLLM is, compared with its record."""

    APPLIES = "applies"  #: as released; the patches apply
    BAKED = "baked"  #: already patched on disk, by an image that bakes the fork
    RELEASED = "as released"  #: a pinned file, unchanged
    DIFFERS = "differs"  #: any other content
    MISSING = "missing"


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file of vLLM that we patch, or that we rely on as it is (``patched`` is None).

    ``path`` is relative to the directory that holds the package ``vllm``. ``released`` holds
    the SHA-256 in the CPU wheel and in the CUDA wheel, ``patched`` the one after all patches;
    hexadecimal.
    """

    path: str
    released: frozenset[str]
    patched: str | None

    @property
    def module(self) -> str:
        return module_name(self.path)

    def state(self, content: bytes | None) -> State:
        """Compare ``content``, the file's bytes; None: there is no such file."""
        if content is None:
            return State.MISSING
        digest = sha256(content)
        if digest == self.patched:
            return State.BAKED
        if digest not in self.released:
            return State.DIFFERS
        return State.RELEASED if self.patched is None else State.APPLIES


def module_name(path: str) -> str:
    """``vllm/v1/engine/__init__.py`` is ``vllm.v1.engine``."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def load_records(file: Path) -> tuple[str, tuple[FileRecord, ...]]:
    """Read ``hashes.json``: vLLM's version, and the records.

    Raises:
        PatchError: the file is not there or not in the format that ``patches/record.py`` writes.
    """
    try:
        table: dict[str, Any] = json.loads(file.read_bytes())
        records = tuple(
            FileRecord(path, frozenset((known["cpu"], known["cuda"])), known.get("patched"))
            for path, known in table["files"].items()
        )
        return table["vllm"], records
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise PatchError(
            f"{file}: not readable as the record of vLLM's files: {error!r}"
        ) from error
