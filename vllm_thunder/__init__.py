"""Agent runs ("programs") as first-class citizens inside the vLLM engine.

Importing this package installs the import hook that applies ``patches/`` to vLLM
(see :mod:`vllm_thunder.patching`). The hook has to be in place before vLLM's engine
modules are imported, in this process and in every spawned one: spawn re-imports the
main module, and our entry points import this package first.
"""

from typing import Any

from vllm_thunder.patching import install as _install_patches
from vllm_thunder.version import __version__

_install_patches()

__all__ = ["LLM", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "LLM":  # imports vLLM: only on demand
        from vllm_thunder.offline import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
