"""Trees on disk that hold a package ``vllm``, and patches for them."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.patching.vllm_trees import (
    CORE,
    CORE_PATCHED,
    ENGINE,
    ENGINE_PATCHED,
    HEADER,
    PINNED,
    Site,
    SmallFork,
    unified_diff,
)
from vllm_thunder.patching.records import sha256


@pytest.fixture
def site(tmp_path: Path, repo_root: Path) -> Site:
    (tmp_path / "site").mkdir()
    return Site(tmp_path / "site", tmp_path / "cache", repo_root)


@pytest.fixture
def small_fork(site: Site) -> SmallFork:
    """A tree with a patched package, a patched module, a pinned one and one of no interest."""
    directory = site.root.parent / "patches"
    directory.mkdir()
    targets = {
        "vllm/v1/engine/__init__.py": (ENGINE, ENGINE_PATCHED),
        "vllm/v1/engine/core.py": (CORE, CORE_PATCHED),
    }
    files = {}
    for number, (path, (old, new)) in enumerate(targets.items(), 1):
        site.write(path, old)
        (directory / f"000{number}-test.patch").write_text(HEADER + unified_diff(path, old, new))
        digest = sha256(old.encode())
        files[path] = {"cpu": digest, "cuda": digest, "patched": sha256(new.encode())}
    site.write("vllm/v1/engine/__init__.py", ENGINE)
    site.write("vllm/v1/pool.py", PINNED)
    digest = sha256(PINNED.encode())
    files["vllm/v1/pool.py"] = {"cpu": digest, "cuda": digest}
    site.write("vllm/v1/other.py", "VALUE = 'other'\n")
    (directory / "hashes.json").write_text(json.dumps({"vllm": "0.32.0", "files": files}))
    site.set_version("0.32.0")
    return SmallFork(site, directory)


@pytest.fixture
def refused() -> Callable[["subprocess.CompletedProcess[str]"], str]:
    """The last line of a process that ended with an error."""

    def check(result: "subprocess.CompletedProcess[str]") -> str:
        assert result.returncode == 1, (result.returncode, result.stdout, result.stderr)
        return result.stderr.strip().splitlines()[-1]

    return check
