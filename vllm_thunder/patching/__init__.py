"""Applies ``patches/`` to vLLM when it is imported.

A patch that a general plugin installs comes too late in a spawned engine core, which imports
vLLM's engine modules before it loads plugins. So :func:`install` puts an import hook in place
when this package is first imported, and spawn re-imports the main module, which imports it.
"""

from vllm_thunder.patching.finder import install

__all__ = ["install"]
