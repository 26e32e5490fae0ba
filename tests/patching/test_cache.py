"""Patched copies are whole, whoever writes them and whatever happened to them."""

import threading
from pathlib import Path

import pytest

from vllm_thunder.patching.cache import cache_directory, is_whole, write_atomically
from vllm_thunder.patching.records import sha256
from vllm_thunder.program.errors import PatchError


def test_a_reader_never_sees_a_part(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "down" / "core.py"
    contents = [bytes([n]) * 2_000_000 for n in range(4)]
    write_atomically(file, contents[0])
    digests = {sha256(content) for content in contents}
    done = threading.Event()
    seen: set[str] = set()

    def read() -> None:
        while not done.is_set():
            seen.add(sha256(file.read_bytes()))

    def write(content: bytes) -> None:
        for _ in range(25):
            write_atomically(file, content)

    reader = threading.Thread(target=read)
    writers = [threading.Thread(target=write, args=(content,)) for content in contents]
    for thread in (reader, *writers):
        thread.start()
    for thread in writers:
        thread.join()
    done.set()
    reader.join()
    assert seen
    assert seen <= digests
    assert list(file.parent.iterdir()) == [file], "temporary files stay behind"


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    file = tmp_path / "core.py"
    file.mkdir()
    with pytest.raises(PatchError, match=r"core\.py .*set VLLM_THUNDER_CACHE to a directory"):
        write_atomically(file, b"x")
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("damage", [b"", b"content"[:-1], b"cOntent", b"content\n", None])
def test_damage_is_seen(tmp_path: Path, damage: bytes | None) -> None:
    file = tmp_path / "core.py"
    write_atomically(file, b"content")
    assert is_whole(file, sha256(b"content"))
    file.unlink()
    if damage is not None:
        file.write_bytes(damage)
    assert not is_whole(file, sha256(b"content"))


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VLLM_THUNDER_CACHE", str(tmp_path / "chosen"))
    assert cache_directory() == tmp_path / "chosen"
    monkeypatch.delenv("VLLM_THUNDER_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_directory() == tmp_path / "xdg" / "vllm_thunder"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_directory() == tmp_path / ".cache" / "vllm_thunder"


def test_no_home_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_THUNDER_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(PatchError, match="set VLLM_THUNDER_CACHE"):
        cache_directory()
