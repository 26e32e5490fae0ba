"""Patched copies on disk, shared by processes that start at the same time."""

import os
from pathlib import Path

from vllm_thunder.patching.records import sha256
from vllm_thunder.program.errors import PatchError

__all__ = ["CACHE_VARIABLE", "cache_directory", "is_whole", "write_atomically"]

#: Environment variable that names the cache directory.
CACHE_VARIABLE = "VLLM_THUNDER_CACHE"


def cache_directory() -> Path:
    """``$VLLM_THUNDER_CACHE``, else ``vllm_thunder`` in the XDG cache directory.

    Raises:
        PatchError: the variable is not set and there is no home directory.
    """
    if chosen := os.environ.get(CACHE_VARIABLE):
        return Path(chosen).absolute()
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):  # the XDG rules say to ignore a relative one
        return Path(base) / "vllm_thunder"
    try:
        return Path.home() / ".cache" / "vllm_thunder"
    except RuntimeError as error:
        raise PatchError(f"no home directory for the cache: set {CACHE_VARIABLE}") from error


def is_whole(file: Path, digest: str) -> bool:
    """Whether the file is there and undamaged: its SHA-256 is ``digest``."""
    try:
        return sha256(file.read_bytes()) == digest
    except OSError:
        return False


def write_atomically(file: Path, content: bytes) -> None:
    """Write so that another process sees the old file or the whole new one, never a part.

    Raises:
        PatchError: the directory cannot be written; the message names it and the variable.
    """
    # Not mkstemp: its files are for one user, and an image's cache is filled by another.
    temporary = file.with_name(f".{file.name}.{os.urandom(8).hex()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(temporary, "xb") as stream:
                stream.write(content)
            os.replace(temporary, file)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise PatchError(
            f"{file.parent}: cannot keep the patched copy of {file.name} there ({error.strerror}): "
            f"set {CACHE_VARIABLE} to a directory that can be written"
        ) from error
