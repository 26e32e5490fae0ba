"""Small vLLM trees on disk, imported in processes of their own."""

import difflib
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from vllm_thunder.patching.records import sha256

HEADER = "Why: a test\nHow: a diff\nUpstream: no\nWhen it can go: now\n\n"


def unified_diff(path: str, old: str, new: str) -> str:
    lines = (old.splitlines(keepends=True), new.splitlines(keepends=True))
    return "".join(difflib.unified_diff(*lines, f"a/{path}", f"b/{path}"))


@dataclass
class Site:
    """A directory for ``sys.path`` with a package ``vllm``, and a cache of its own."""

    root: Path
    cache: Path
    repo_root: Path

    def write(self, path: str, text: str) -> Path:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text.encode())
        for parent in Path(path).parents:
            if parent != Path("."):
                (self.root / parent / "__init__.py").touch()
        return file

    def set_version(self, version: str, distribution: str = "vllm") -> None:
        name = distribution.replace("-", "_")
        self.write_metadata(f"{name}-{version}.dist-info", distribution, version)

    def write_metadata(self, folder: str, distribution: str, version: str) -> None:
        directory = self.root / folder
        directory.mkdir(parents=True)
        text = f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
        (directory / "METADATA").write_text(text)

    def start(self, script: str, *args: str) -> "subprocess.Popen[str]":
        """Run a script file in a new interpreter that finds this tree first."""
        file = self.root.parent / f"script_{sha256(script.encode())[:12]}.py"
        if not file.exists():  # another process may be reading it
            file.write_text(script)
        paths = os.pathsep.join([str(self.root), str(self.repo_root)])
        env = os.environ | {"PYTHONPATH": paths, "VLLM_THUNDER_CACHE": str(self.cache)}
        return subprocess.Popen(
            [sys.executable, str(file), *args],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env,
            cwd=self.root.parent,
        )  # fmt: skip

    def run(self, script: str, *args: str) -> "subprocess.CompletedProcess[str]":
        with self.start(script, *args) as process:
            out, err = process.communicate(timeout=250)
        return subprocess.CompletedProcess(args, process.returncode, out, err)

    def cached_files(self) -> list[Path]:
        return sorted(p for p in self.cache.rglob("*") if p.is_file() and p.suffix != ".pyc")


@dataclass
class SmallFork:
    """Patches for a vLLM of a few lines."""

    site: Site
    directory: Path

    @property
    def released(self) -> str:
        """The beginning of a script: the package is imported, its own hook taken away."""
        return (
            "import sys\nfrom pathlib import Path\n"
            "from vllm_thunder.patching.finder import PatchFinder\n"
            "assert isinstance(sys.meta_path.pop(0), PatchFinder)\n"
        )

    @property
    def hook(self) -> str:
        """Installs the hook with these patches, as ``install`` does it with the real ones."""
        return (
            f"finder = PatchFinder(Path({str(self.directory)!r}))\n"
            "finder.check_imported(sys.modules)\n"
            "sys.meta_path.insert(0, finder)\n"
        )

    @property
    def prologue(self) -> str:
        return self.released + self.hook


CORE = '''\
"""The engine."""


def step():
    return 1


def fail():
    raise RuntimeError("in the engine")
'''
CORE_PATCHED = CORE.replace("    return 1\n", "    # patched\n    return 2\n")
ENGINE = "KIND = 'released'\n\nNAME = __name__\n"
ENGINE_PATCHED = ENGINE.replace("released", "patched")
PINNED = "VALUE = 'as released'\n"
