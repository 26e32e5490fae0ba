"""Who may import whom: the contracts of pyproject.toml, and what they cannot say."""

import ast
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PACKAGE = Path(__file__).resolve().parent.parent / "vllm_thunder"
MODULES = sorted(PACKAGE.rglob("*.py"))

#: The modules that may import vLLM or torch; a folder stands for all its files.
ENGINE_SIDE = ("engine/", "cli/serve.py", "offline.py")

#: Scripts that run in a process without us: started by path, never imported.
STARTED_BY_PATH = ("replay/stock_launcher.py",)

#: What patching may import of ours: it runs before everything else.
PATCHING_KNOWS = ("vllm_thunder.patching", "vllm_thunder.program.errors", "vllm_thunder.version")

#: Distributions whose import name is another one.
IMPORT_NAMES = {"prometheus-client": "prometheus_client", "pyyaml": "yaml"}

#: vLLM, and what comes with it for code that runs inside its processes or that a flag asks for.
ENGINE_BRINGS = {"vllm", "torch", "starlette", "uvloop", "pydantic", "opentelemetry"}


def name_of(file: Path) -> str:
    return file.relative_to(PACKAGE).as_posix()


def imported_modules(file: Path) -> Iterator[str]:
    """Every module that ``file`` imports, at the top or inside a function, as an absolute name.

    ``from a import b`` counts as ``a.b`` when that is a module of ours, else as ``a``.
    """
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(file)}:{node.lineno}: a relative import"
            assert node.module is not None
            for alias in node.names:
                child = f"{node.module}.{alias.name}"
                path = PACKAGE.parent.joinpath(*child.split("."))
                is_module = path.is_dir() or path.with_suffix(".py").is_file()
                yield child if is_module else node.module


def within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def contracts(repo_root: Path) -> list[dict]:
    settings = tomllib.loads((repo_root / "pyproject.toml").read_text())
    return settings["tool"]["importlinter"]["contracts"]


def lint_imports(folder: Path, cache: Path) -> subprocess.CompletedProcess[str]:
    """Run import-linter on the package and the pyproject.toml in ``folder``."""
    main = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    return subprocess.run(
        [sys.executable, "-c", main, "--cache-dir", str(cache)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_import_linter_contracts_hold(repo_root: Path, tmp_path: Path) -> None:
    done = lint_imports(repo_root, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"Contracts: {len(contracts(repo_root))} kept, 0 broken." in done.stdout


def test_a_broken_contract_is_seen(repo_root: Path, tmp_path: Path) -> None:
    """The linter's word means something: a package that breaks one of our contracts fails."""
    package = tmp_path / "vllm_thunder" / "program"
    package.mkdir(parents=True)
    (tmp_path / "vllm_thunder" / "__init__.py").touch()
    (package / "__init__.py").write_text("def now():\n    import time\n    return time.time()\n")
    (contract,) = (c for c in contracts(repo_root) if c["id"] == "program-is-pure")
    external = [m for m in contract["forbidden_modules"] if not within(m, "vllm_thunder")]
    (tmp_path / "pyproject.toml").write_text(
        '[tool.importlinter]\nroot_package = "vllm_thunder"\ninclude_external_packages = true\n'
        '[[tool.importlinter.contracts]]\nname = "pure"\ntype = "forbidden"\n'
        f'source_modules = ["vllm_thunder.program"]\nforbidden_modules = {external}\n'
    )
    done = lint_imports(tmp_path, tmp_path / "cache")
    assert done.returncode != 0
    assert "vllm_thunder.program is not allowed to import time" in done.stdout


def test_every_room_has_a_contract(repo_root: Path) -> None:
    """A new folder under vllm_thunder/ has to say what it may not import."""
    rooms = {p.parent.name for p in PACKAGE.glob("*/__init__.py")}
    front_ends = {"cli"}  # imports every room: nothing to forbid
    ruled = {m.split(".")[1] for c in contracts(repo_root) for m in c["source_modules"]}
    assert rooms - front_ends == ruled


def test_engine_and_coordinator_share_only_program() -> None:
    for file in MODULES:
        room = name_of(file).split("/")[0]
        other = {"engine": "coordinator", "coordinator": "engine"}.get(room)
        if other is not None:
            guilty = [m for m in imported_modules(file) if within(m, f"vllm_thunder.{other}")]
            assert not guilty, f"{name_of(file)} imports {guilty}"


@pytest.mark.parametrize("file", MODULES, ids=name_of)
def test_only_the_engine_side_imports_vllm(file: Path) -> None:
    if name_of(file).startswith((*ENGINE_SIDE, *STARTED_BY_PATH)):
        return
    guilty = [m for m in imported_modules(file) if within(m, "vllm") or within(m, "torch")]
    assert not guilty, f"{name_of(file)} imports {guilty}"


@pytest.mark.parametrize("script", STARTED_BY_PATH)
def test_scripts_without_us_are_never_imported(script: str) -> None:
    module = "vllm_thunder." + script.removesuffix(".py").replace("/", ".")
    assert not [name_of(f) for f in MODULES if module in imported_modules(f)]
    ours = [m for m in imported_modules(PACKAGE / script) if within(m, "vllm_thunder")]
    assert not ours, f"{script} imports {ours}"


def test_patching_knows_the_errors_and_the_version_only() -> None:
    for file in (PACKAGE / "patching").rglob("*.py"):
        ours = [m for m in imported_modules(file) if within(m, "vllm_thunder")]
        guilty = [m for m in ours if not any(within(m, known) for known in PATCHING_KNOWS)]
        assert not guilty, f"{name_of(file)} imports {guilty}"


def test_dependencies_are_what_we_import(repo_root: Path) -> None:
    project = tomllib.loads((repo_root / "pyproject.toml").read_text())["project"]
    names = {canonicalize_name(Requirement(text).name) for text in project["dependencies"]}
    declared = {IMPORT_NAMES.get(name, name) for name in names}
    known = declared | ENGINE_BRINGS | sys.stdlib_module_names | {"vllm_thunder"}
    imported: dict[str, set[str]] = {}
    for file in MODULES:
        for module in imported_modules(file):
            imported.setdefault(module.split(".")[0], set()).add(name_of(file))
    undeclared = {top: files for top, files in imported.items() if top not in known}
    assert not undeclared, f"imported, but not in pyproject's dependencies: {undeclared}"
    unused = declared - imported.keys()
    assert not unused, f"in pyproject's dependencies, but imported nowhere: {unused}"
