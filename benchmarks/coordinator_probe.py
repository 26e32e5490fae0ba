"""What a coordinator takes, sampled from outside, and whether its memory stays flat."""

import os
import re
import resource
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp

__all__ = ["Probe", "Sample", "drift"]


@dataclass(frozen=True, slots=True)
class Sample:
    """The coordinator at one moment. ``seconds`` since the first one; ``cpu_share`` of one core,
    since the sample before; ``decision_ms``: what its last decision took."""

    seconds: float
    rss_mib: float
    open_files: int
    cpu_share: float
    decision_ms: float
    held_turns: int


class Probe:
    """Reads the process ``pid`` that serves ``url``."""

    def __init__(self, session: aiohttp.ClientSession, url: str, pid: int):
        self._session = session
        self._url = url
        self._folder = Path(f"/proc/{pid}")
        self._began = self._before = time.monotonic()
        self._cpu_before = self._cpu_seconds()

    async def sample(self) -> Sample:
        open_files = self.open_files()  # without the connection of the question below
        async with self._session.get(f"{self._url}/metrics") as answer:
            text = await answer.text()
        now, cpu = time.monotonic(), self._cpu_seconds()
        share = (cpu - self._cpu_before) / max(now - self._before, 1e-9)
        self._before, self._cpu_before = now, cpu
        resident_pages = int((self._folder / "statm").read_text().split()[1])
        return Sample(
            seconds=round(now - self._began, 2),
            rss_mib=resident_pages * resource.getpagesize() / 2**20,
            open_files=open_files,
            cpu_share=round(share, 4),
            decision_ms=round(_metric(text, "decision_seconds") * 1000, 4),
            held_turns=int(_metric(text, "held_turns")),
        )

    def open_files(self) -> int:
        return len(os.listdir(self._folder / "fd"))

    def _cpu_seconds(self) -> float:
        fields = (self._folder / "stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _metric(text: str, name: str) -> float:
    found = re.search(rf"^vllm_thunder_coordinator:{name} (\S+)$", text, re.MULTILINE)
    if found is None:
        raise RuntimeError(f"the coordinator's metrics have no {name}")
    return float(found[1])


def drift(samples: Sequence[Sample]) -> float:
    """What resident memory would grow in as long as the soak took, as a share of its level: the
    least-squares slope over the last two thirds, times the whole time, by the mean there."""
    whole = samples[-1].seconds - samples[0].seconds
    late = [s for s in samples if s.seconds - samples[0].seconds >= whole / 3]
    fit = statistics.linear_regression([s.seconds for s in late], [s.rss_mib for s in late])
    return fit.slope * whole / statistics.fmean(s.rss_mib for s in late)
