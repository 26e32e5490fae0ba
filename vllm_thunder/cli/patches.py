"""``vllm_thunder patches``: the fork's state against the installed vLLM."""

import argparse
import shutil
import sys
from pathlib import Path

from vllm_thunder.patching.fork import Fork
from vllm_thunder.patching.installed import (
    Installation,
    find_installation,
    verify,
    version_problem,
)
from vllm_thunder.patching.records import State
from vllm_thunder.patching.series import load_series
from vllm_thunder.program.errors import PatchError

__all__ = ["add_parser", "run"]


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "patches",
        help="show, check or export the patches to vLLM",
        description="The patches that vllm_thunder applies to vLLM when it is imported.",
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="{list,check,export}")
    actions.add_parser("list", help="each patch, its purpose, its files and their state")
    actions.add_parser("check", help="compare every patched and pinned file; exit 1 if one differs")
    export = actions.add_parser(
        "export", help="write the patched files and the patches, to bake them into an image"
    )
    export.add_argument("directory", metavar="DIR", type=Path, help="a new or empty directory")


def run(args: argparse.Namespace) -> int:
    """Run one action; the exit code is 1 where vLLM is not what the patches were made for."""
    try:
        match args.action:
            case "list":
                return _list()
            case "check":
                return _check()
            case "export":
                return _export(args.directory)
            case _:
                raise AssertionError(args.action)
    except PatchError as error:
        print(f"vllm_thunder patches {args.action}: {error}", file=sys.stderr)
        return 1


def _list() -> int:
    fork = Fork.load()
    installation = find_installation()
    _print_heading(fork, installation)
    for patch in load_series(fork.directory):
        print(f"\n{patch.name}\n  {patch.purpose}")
        for record in fork.files:
            if record.path in patch.paths:
                state = installation.state(record) if installation else State.MISSING
                print(f"  {state.value:<12} {record.path}")
    pinned = [record for record in fork.files if record.patched is None]
    print("\nRelied on as released")
    for record in pinned:
        state = installation.state(record) if installation else State.MISSING
        print(f"  {state.value:<12} {record.path}")
    return 0


def _check() -> int:
    fork = Fork.load()
    installation = verify(fork)
    targets = [record for record in fork.files if record.patched is not None]
    for record in targets:
        if installation.state(record) is State.APPLIES:
            content = installation.read(record)
            assert content is not None
            fork.patched_content(record, content)
    _print_heading(fork, installation)
    baked = sum(installation.state(record) is State.BAKED for record in targets)
    print(
        f"{len(targets)} files to patch ({baked} already patched on disk) and "
        f"{len(fork.files) - len(targets)} relied on are as recorded"
    )
    return 0


def _export(directory: Path) -> int:
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise PatchError(f"{directory} is not an empty directory")
    fork = Fork.load()
    installation = verify(fork)
    patched: dict[str, bytes] = {}
    for record in fork.files:
        if record.patched is not None:
            content = installation.read(record)
            assert content is not None
            baked = installation.state(record) is State.BAKED
            patched[record.path] = content if baked else fork.patched_content(record, content)
    try:
        for path, content in patched.items():
            file = directory / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
        for patch in load_series(fork.directory):
            shutil.copyfile(patch.file, directory / patch.name)
    except OSError as error:
        raise PatchError(f"{error.filename}: cannot be written: {error.strerror}") from error
    print(f"{len(patched)} patched files and the patches are in {directory}")
    print("to bake them into an image, in the directory that holds vllm/:")
    print(f'  for p in {directory}/*.patch; do patch -p1 --fuzz=0 < "$p" || exit 1; done')
    return 0


def _print_heading(fork: Fork, installation: Installation | None) -> None:
    if installation is None:
        print("vLLM is not installed")
    else:
        names = " and ".join(f"{name} {v}" for name, v in installation.versions.items())
        print(f"{names or 'vLLM of unknown version'} in {installation.root}")
    if problem := version_problem(installation.versions if installation else {}, fork.version):
        print(problem)
    print(f"patches in {fork.directory}")
