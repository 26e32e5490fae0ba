"""The import hook: vLLM's modules come from patched files, or the import fails."""

import sys
from collections.abc import Sequence
from functools import cached_property
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from vllm_thunder.patching.fork import Fork

__all__ = ["PatchFinder", "install"]


def install() -> None:
    """Put the import hook in place; a second call changes nothing.

    Costs a few microseconds and imports nothing while vLLM is not imported.

    Raises:
        PatchError: a module to patch is already imported as released, or a file of an imported
            module is not the one that was recorded.
    """
    if any(isinstance(finder, PatchFinder) for finder in sys.meta_path):
        return
    finder = PatchFinder()
    if "vllm" in sys.modules:
        finder.check_imported(sys.modules)
    sys.meta_path.insert(0, finder)


class PatchFinder:
    """A meta path finder for the modules in ``hashes.json``; it leaves all others alone.

    ``directory`` holds patches and ``hashes.json``; by default the ones for the vLLM version
    that this package is made for.
    """

    def __init__(self, directory: "Path | None" = None) -> None:
        self._directory = directory
        self._version_accepted = False

    @cached_property
    def _fork(self) -> "Fork":
        from vllm_thunder.patching.fork import Fork

        return Fork.load(self._directory)

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        """The spec of a patched or pinned module; None for every other one.

        Raises:
            PatchError: vLLM has another version, or the file of this module is not the one that
                was recorded, or its patched copy cannot be written.
        """
        if not fullname.startswith("vllm."):
            return None
        record = self._fork.modules.get(fullname)
        if record is None:
            return None
        spec = self._released_spec(fullname, path, target)
        if spec is None:  # not installed: the import system says so better
            return None
        self._accept_version()
        copy = self._fork.patched_copy(record, spec.origin)
        if copy is None:
            return spec

        from importlib.util import spec_from_file_location

        return spec_from_file_location(
            fullname, copy, submodule_search_locations=spec.submodule_search_locations
        )

    def _accept_version(self) -> None:
        if not self._version_accepted:
            from vllm_thunder.patching.installed import require_version

            require_version(self._fork.version)
            self._version_accepted = True

    def _released_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> ModuleSpec | None:
        # Only those behind this one: another hook that asks everybody must not come back here.
        finders = list(sys.meta_path)
        for finder in finders[finders.index(self) + 1 :] if self in finders else finders:
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                return spec
        return None

    def check_imported(self, modules: dict[str, ModuleType]) -> None:
        """Refuse to come too late.

        A baked fork imports this package from the middle of vLLM's own imports: there the
        modules that are already imported are patched, and that is fine.
        """
        for name, record in self._fork.modules.items():
            module = modules.get(name)
            if module is not None:
                spec = getattr(module, "__spec__", None)
                self._fork.check_imported(record, spec.origin if spec else None)
