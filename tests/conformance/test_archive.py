"""vLLM's source archive: the recorded one or an error, and nothing of it but Python tests."""

import hashlib
import io
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from scripts.conformance import archive
from scripts.conformance.archive import ArchiveError, check_hash, unpack_tests, vllm_tests
from vllm_thunder.version import VLLM_VERSION

TOP = f"vllm-{VLLM_VERSION}"


def pack(file: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(file, "w:gz") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return file


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    members = {
        f"{TOP}/setup.py": b"raise SystemExit",
        f"{TOP}/tests/__init__.py": b"",
        f"{TOP}/tests/v1/core/test_scheduler.py": b"# theirs",
        f"{TOP}/tests/prompts/example.txt": b"text",
        f"{TOP}/vllm/tests/inner.py": b"",
    }
    return pack(tmp_path / "vllm.tar.gz", members)


@pytest.fixture
def recorded(packed: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The archive that ``vllm_tests`` expects."""
    digest = hashlib.sha256(packed.read_bytes()).hexdigest()
    monkeypatch.setitem(archive.SHA256, VLLM_VERSION, digest)
    return packed


def files(folder: Path) -> set[str]:
    return {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}


def test_only_python_files_of_the_tests_are_unpacked(packed: Path, tmp_path: Path) -> None:
    unpack_tests(packed, tmp_path / "out")
    expected = {"tests/__init__.py", "tests/v1/core/test_scheduler.py"}
    assert files(tmp_path / "out") == expected


def test_an_archive_without_tests_is_refused(tmp_path: Path) -> None:
    empty = pack(tmp_path / "empty.tar.gz", {f"{TOP}/setup.py": b""})
    with pytest.raises(ArchiveError, match=r"empty\.tar\.gz has no folder of tests"):
        unpack_tests(empty, tmp_path / "out")


def test_a_path_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    evil = pack(tmp_path / "evil.tar.gz", {f"{TOP}/tests/../../../evil.py": b""})
    with pytest.raises(tarfile.OutsideDestinationError):
        unpack_tests(evil, tmp_path / "deep" / "out")
    assert files(tmp_path) == {"evil.tar.gz"}


def test_the_hash_decides(packed: Path) -> None:
    digest = hashlib.sha256(packed.read_bytes()).hexdigest()
    check_hash(packed, digest)
    with pytest.raises(ArchiveError, match=f"SHA-256 {digest}, recorded is {'0' * 64}"):
        check_hash(packed, "0" * 64)


def test_every_recorded_hash_is_one(tmp_path: Path) -> None:
    assert VLLM_VERSION in archive.SHA256
    for digest in archive.SHA256.values():
        assert len(digest) == 64
        assert int(digest, 16)


def test_the_tests_are_unpacked_once(
    recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    folder = vllm_tests(cache, recorded)
    assert (folder / "tests/v1/core/test_scheduler.py").read_bytes() == b"# theirs"
    monkeypatch.setattr(archive, "download", None)  # a second call would fail
    assert vllm_tests(cache) == folder
    assert [p.name for p in cache.iterdir()] == [folder.name], "nothing else is left"


def test_a_wrong_archive_leaves_nothing(packed: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with pytest.raises(ArchiveError, match="recorded is"):
        vllm_tests(cache, packed)
    assert list(cache.iterdir()) == []


def test_an_interrupted_folder_is_fetched_again(recorded: Path, tmp_path: Path) -> None:
    folder = vllm_tests(tmp_path / "cache", recorded)
    (folder / ".complete").unlink()
    (folder / "tests/v1/core/test_scheduler.py").unlink()
    assert vllm_tests(tmp_path / "cache", recorded) == folder
    assert (folder / "tests/v1/core/test_scheduler.py").exists()


def test_the_cache_is_where_the_environments_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_THUNDER_ENV_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert archive.cache_directory() == Path("/caches/vllm_thunder")
    monkeypatch.setenv("VLLM_THUNDER_ENV_DIR", "/envs")
    assert archive.cache_directory() == Path("/envs")


@pytest.mark.usefixtures("no_network")
def test_pip_failing_says_why(tmp_path: Path) -> None:
    with pytest.raises(ArchiveError, match="No matching distribution found for vllm==0"):
        archive.download("0", tmp_path)


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")


@pytest.mark.usefixtures("no_network")
def test_pip_downloads_without_running_the_archive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a folder of archives: the same way as from an index, as far as building goes."""
    links = tmp_path / "links"
    links.mkdir()
    build = b'[build-system]\nrequires = ["nowhere"]\nbuild-backend = "setuptools.build_meta"\n'
    sent = pack(
        links / "vllm-9.9.tar.gz",
        {
            "vllm-9.9/pyproject.toml": build,
            "vllm-9.9/setup.py": b"raise SystemExit('the archive ran')",
            "vllm-9.9/PKG-INFO": b"Metadata-Version: 2.1\nName: vllm\nVersion: 9.9\n",
        },
    )
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    assert archive.download("9.9", scratch).read_bytes() == sent.read_bytes()


def test_the_command_fails_clearly_on_a_wrong_archive(
    packed: Path, tmp_path: Path, repo_root: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "scripts.conformance", "--archive", str(packed)],
        cwd=repo_root,
        env={"VLLM_THUNDER_ENV_DIR": str(tmp_path / "envs"), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("conformance: vllm.tar.gz has SHA-256 ")
    assert "Traceback" not in done.stderr
