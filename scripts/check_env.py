"""Ends non-zero, and says why, unless this interpreter has the engine and every pinned package.

Usage: check_env.py REQUIREMENT_FILE...
"""

import importlib.metadata
import runpy
import sys
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent


def unmet_requirements(file: Path) -> list[str]:
    """One line per requirement of ``file`` that is not installed as it asks."""
    problems = []
    for line in file.read_text().splitlines():
        text = line.partition("#")[0].strip()
        if not text:
            continue
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate():
            continue
        try:
            installed = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            problems.append(f"{file.name}: {requirement.name} is not installed")
            continue
        if not requirement.specifier.contains(installed, prereleases=True):
            problems.append(f"{file.name}: {text} asked for, {installed} installed")
    return problems


def main(files: list[Path]) -> int:
    problems = [problem for file in files for problem in unmet_requirements(file)]

    import torch
    import vllm

    wanted = runpy.run_path(str(ROOT / "vllm_thunder" / "version.py"))["VLLM_VERSION"]
    if vllm.__version__.partition("+")[0] != wanted:
        problems.append(f"vLLM {wanted} wanted, {vllm.__version__} imported from {vllm.__file__}")
    for problem in problems:
        print(problem, file=sys.stderr)
    print(f"vLLM {vllm.__version__}, torch {torch.__version__}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main([Path(name) for name in sys.argv[1:]]))
