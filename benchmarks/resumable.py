"""Takes measurements one after the other, and none twice: what both sessions have in common."""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeVar

from rich.console import Console

from vllm_thunder.program.errors import ConfigError
from vllm_thunder.replay.machine import describe_machine
from vllm_thunder.replay.records import Replay

__all__ = ["ResumableSession"]


class _Measurement(Hashable, Protocol):
    def path(self, work: Path) -> Path: ...


_M = TypeVar("_M", bound=_Measurement)


class ResumableSession(ABC, Generic[_M]):
    """Measures on servers that it starts when they are needed and stops with the ``with`` block.

    ``planned`` is everything that will be asked for: it says which kinds to start together.
    ``work`` takes the runs and the servers' logs; a run that lies there is not taken again.
    """

    def __init__(self, work: Path, planned: Sequence[_M], console: Console):
        self._work = work
        self._console = console
        self._missing = [m for m in dict.fromkeys(planned) if not m.path(work).is_file()]
        self._commit = describe_machine()["commit"]
        self._servers = contextlib.ExitStack()
        #: What runs, by kind.
        self._running: dict[str, Any] = {}

    def __enter__(self) -> Self:
        self._work.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop_servers()

    def stop_servers(self) -> None:
        """The next run gets new ones."""
        self._running = {}
        self._servers.close()

    def run(self, measurement: _M) -> Replay:
        """The measurement's run: from ``work``, or taken now and put there.

        Raises ConfigError when the run in ``work`` was not taken as this one would be.
        """
        path = measurement.path(self._work)
        told = self._identity(measurement)
        if path.is_file():
            result = Replay.load(path)
            found = result.about["measurement"]
            changed = [name for name in told if found.get(name) != told[name]]
            if changed:
                raise ConfigError(
                    f"{path} was measured otherwise ({', '.join(changed)}): use --fresh or "
                    "another --work"
                )
            return result
        result = self._take(measurement)
        result.about["measurement"] = told
        result.save(path)
        self._missing.remove(measurement)
        return result

    @abstractmethod
    def _take(self, measurement: _M) -> Replay:
        """Measure now."""

    @abstractmethod
    def _identity(self, measurement: _M) -> dict[str, Any]:
        """What has to be equal for a stored run to stand for a new one; JSON values."""
