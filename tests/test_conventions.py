"""What holds for every file of the repository."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "vllm_thunder"
PUBLIC_MODULES = sorted(
    p for p in PACKAGE.rglob("*.py") if not p.name.startswith("_") or p.name == "__init__.py"
)
MOST_LINES = 450

#: A checkout must not know the machine that it was written on, nor where packages come from.
#: Written with classes, so that this file does not contain what it forbids.
FORBIDDEN = {
    "a path of one machine": r"(?<![\w.])/(?:w[o]rk|r[o]ot|h[o]me/\w+|t[m]p|opt/p[y]pi)(?![\w-])",
    "a package registry": (
        r"pypi[.]org|pythonhosted[.]org|download[.]pytorch|npmjs[.]org|registry[.]npmjs"
        r"|ghcr[.]io|nvcr[.]io|quay[.]io|debian[.]org|crates[.]io"
    ),
}


def repository_files() -> list[Path]:
    """Tracked files and new ones that are not ignored; without git, all but hidden folders."""
    if not (ROOT / ".git").exists():
        skipped = (".", "__pycache__")
        parts = {p: p.relative_to(ROOT).parts for p in ROOT.rglob("*") if p.is_file()}
        return sorted(p for p in parts if not any(part.startswith(skipped) for part in parts[p]))
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return sorted(p for name in names.split("\0") if name and (p := ROOT / name).is_file())


def name_of(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


def assigned_names(node: ast.stmt) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [t.id for t in targets if isinstance(t, ast.Name)]


def defined_names(tree: ast.Module) -> set[str]:
    """Functions, classes and variables that a module makes at its top level, imports left out."""
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            names.update(assigned_names(node))
    return names


def importable_names(tree: ast.Module) -> set[str]:
    """``defined_names``, imported names, and the names that a module's ``__getattr__`` answers."""
    names = defined_names(tree)
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names.update((alias.asname or alias.name).split(".")[0] for alias in node.names)
        elif isinstance(node, ast.FunctionDef) and node.name == "__getattr__":
            texts = (n.value for n in ast.walk(node) if isinstance(n, ast.Constant))
            names.update(text for text in texts if isinstance(text, str))
    return names


def declared_all(tree: ast.Module) -> list[str] | None:
    for node in tree.body:
        if isinstance(node, ast.Assign) and assigned_names(node) == ["__all__"]:
            return ast.literal_eval(node.value)
    return None


def test_python_files_stay_small() -> None:
    lengths = {
        name_of(p): len(p.read_text().splitlines()) for p in repository_files() if p.suffix == ".py"
    }
    assert lengths, "no file found: the listing is broken"
    too_long = {name: n for name, n in lengths.items() if n >= MOST_LINES}
    assert not too_long, f"split by what it does: {too_long}"


def test_no_file_is_called_utils() -> None:
    assert not [name_of(p) for p in repository_files() if p.stem in ("utils", "util", "helpers")]


def test_every_package_folder_is_a_package() -> None:
    """A folder without ``__init__.py`` would be missing from the wheel."""
    folders = {p.parent for p in PACKAGE.rglob("*.py")}
    assert not [name_of(f) for f in sorted(folders) if not (f / "__init__.py").is_file()]


@pytest.mark.parametrize("what", FORBIDDEN)
def test_no_file_names(what: str) -> None:
    pattern = re.compile(FORBIDDEN[what])
    found = []
    for file in repository_files():
        try:
            text = file.read_text()
        except UnicodeDecodeError:
            continue  # a picture
        for number, line in enumerate(text.splitlines(), 1):
            if match := pattern.search(line):
                found.append(f"{name_of(file)}:{number}: {match.group()}")
    assert not found, "\n".join([f"{what} in:", *found])


def test_forbidden_patterns_match_what_they_should() -> None:
    path, host = (re.compile(FORBIDDEN[what]) for what in FORBIDDEN)
    for text in ("cd #work/main", "'#root'", "x=#tmp/a", "#home/me/x"):
        assert path.search(text.replace("#", "/")), text
    for text in ("a#tmp/b", "#workers", "https:##host#worklist", "frame#work.py"):
        assert not path.search(text.replace("#", "/")), text
    for escaped in host.pattern.split("|"):
        name = escaped.replace("[.]", ".")
        assert host.search(f"https://{name}/x"), name
        assert not host.search(name.replace(".", "-")), name


@pytest.mark.parametrize("file", PUBLIC_MODULES, ids=name_of)
def test_all_is_exact(file: Path) -> None:
    tree = ast.parse(file.read_text())
    names = declared_all(tree)
    defined = {n for n in defined_names(tree) if not n.startswith("_")}
    if names is None:
        in_program = PACKAGE / "program" in file.parents
        assert not (in_program and defined), f"no __all__, but it defines {sorted(defined)}"
        return
    assert len(set(names)) == len(names), "__all__ names something twice"
    missing = set(names) - importable_names(tree)
    assert not missing, f"__all__ names what is not there: {sorted(missing)}"
    if PACKAGE / "program" in file.parents:
        hidden = defined - set(names)
        assert not hidden, f"public, but not in __all__: {sorted(hidden)}"
