"""Fetches vLLM's tests: its wheels have none, so they come from the source archive."""

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path, PurePosixPath

from vllm_thunder.version import VLLM_VERSION

#: SHA-256 of the source archive, by vLLM version.
SHA256 = {"0.32.0": "d2c957d5eee3d0985012151315ddc62cbe0cd368fc96a5fc3510438d9dddf2ad"}

#: ``pip download`` asks a source archive for its metadata, and vLLM's own answer needs its whole
#: build environment. This answers in its place, and nothing of the archive is run.
BUILD_BACKEND = """\
from pathlib import Path


def prepare_metadata_for_build_wheel(directory, config_settings=None):
    folder = Path(directory, "vllm-{version}.dist-info")
    folder.mkdir()
    text = "Metadata-Version: 2.1\\nName: vllm\\nVersion: {version}\\n"
    folder.joinpath("METADATA").write_text(text)
    return folder.name
"""

_COMPLETE = ".complete"


class ArchiveError(Exception):
    """The source archive could not be had, or is not the recorded one."""


def cache_directory() -> Path:
    """Where ``scripts/env.sh`` keeps what it builds."""
    chosen = os.environ.get("VLLM_THUNDER_ENV_DIR")
    if chosen:
        return Path(chosen).absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vllm_thunder"


def vllm_tests(cache: Path, archive: Path | None = None) -> Path:
    """The folder in ``cache`` that holds vLLM's ``tests`` package, fetched if it is not there yet.

    ``archive``: a source archive that is there already; None: pip downloads it, from the index
    that pip is set up for. The folder appears under its name only when it is complete.

    Raises:
        ArchiveError: pip failed, or the archive's hash is not the recorded one.
    """
    digest = SHA256[VLLM_VERSION]
    folder = cache / f"vllm-tests-{VLLM_VERSION}-{digest[:12]}"
    if (folder / _COMPLETE).is_file():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".vllm-tests-", dir=cache) as scratch:
        found = archive or download(VLLM_VERSION, Path(scratch))
        check_hash(found, digest)
        unfinished = Path(scratch, "unpacked")
        unpack_tests(found, unfinished)
        (unfinished / _COMPLETE).touch()
        shutil.rmtree(folder, ignore_errors=True)  # left by hand: ours are complete
        try:
            unfinished.rename(folder)
        except OSError:
            if not (folder / _COMPLETE).is_file():  # else somebody else fetched it meanwhile
                raise
    return folder


def download(version: str, directory: Path) -> Path:
    """vLLM's source archive in ``directory``, by pip; raises ArchiveError with pip's last words."""
    backend = directory / "backend" / "setuptools"
    backend.mkdir(parents=True)
    (backend / "__init__.py").touch()
    (backend / "build_meta.py").write_text(BUILD_BACKEND.format(version=version))
    command = [sys.executable, "-m", "pip", "download", "--no-input", "--no-deps"]
    command += ["--no-binary", "vllm", "--no-build-isolation", "--dest", str(directory)]
    done = subprocess.run(
        [*command, f"vllm=={version}"],
        env={**os.environ, "PYTHONPATH": str(backend.parent)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        last = "\n".join(done.stdout.splitlines()[-10:])
        raise ArchiveError(f"pip cannot download the source archive of vLLM {version}:\n{last}")
    (archive,) = directory.glob("vllm-*.tar.gz")
    return archive


def check_hash(archive: Path, expected: str) -> None:
    """Raises ArchiveError unless ``archive`` has this SHA-256 (lower-case hexadecimal)."""
    with archive.open("rb") as file:
        actual = hashlib.file_digest(file, "sha256").hexdigest()
    if actual != expected:
        raise ArchiveError(f"{archive.name} has SHA-256 {actual}, recorded is {expected}")


def unpack_tests(archive: Path, folder: Path) -> None:
    """Unpack the Python files of the archive's ``tests`` into ``folder/tests``, nothing else."""
    with tarfile.open(archive) as tar:
        for member in tar:
            path = PurePosixPath(member.name)
            if member.isfile() and path.suffix == ".py" and path.parts[1:2] == ("tests",):
                member.name = str(PurePosixPath(*path.parts[1:]))
                tar.extract(member, folder, filter="data")
    if not (folder / "tests").is_dir():
        raise ArchiveError(f"{archive.name} has no folder of tests")
