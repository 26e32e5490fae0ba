"""Runs vLLM's own tests of its scheduler core, with vLLM's classes and with ours in their place.

Exit code 1 if a test passes with vLLM's and fails with ours, or leaves our books in disorder.

vLLM's tests build its synchronous ``Scheduler`` in most places, and ours is an
``AsyncScheduler``. So there are two comparisons. In the first, our scheduler stands for the
synchronous one with the bookkeeping of steps in flight taken out, and every test counts. In the
second it stands there as it is, and so does vLLM's own ``AsyncScheduler`` in the run that it is
compared with.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from scripts.conformance.archive import ArchiveError, cache_directory, vllm_tests
from scripts.conformance.outcomes import Outcome, compare, read_outcomes, report
from scripts.conformance.stand_ins import write_hub_cache

ROOT = Path(__file__).resolve().parent.parent.parent
CORE = "tests/v1/core"

#: Tests that start an engine with a model's real weights.
NEED_WEIGHTS = (
    "test_scheduler_e2e.py",
    "test_reset_prefix_cache_e2e.py",
    "prefix_cache/test_hybrid_prefix_cache_hit_rate.py",
)
#: Starts an interpreter of its own, which holds nothing of ours, and gives it 60 seconds.
FOREIGN = ("test_kv_cache_utils.py::test_is_kv_cache_spec_uniform",)
#: A minute or more each, six of them; the other half of the same test stays.
LONG = ("test_priority_scheduler_random.py::test_priority_scheduling_blast[standard",)


@dataclass(frozen=True)
class Run:
    """One pass over the tests: options of ``plugin.py``, and the run that it is compared with."""

    name: str
    options: tuple[str, ...]
    against: str | None = None
    title: str = ""
    required: bool = True


RUNS = (
    Run("stock", ("--scheduler=stock",)),
    Run("stock-async", ("--scheduler=stock-async",)),
    Run("ours", ("--scheduler=ours-sync",), "stock", "Requests without a program"),
    Run(
        "ours-async",
        ("--scheduler=ours",),
        "stock-async",
        "Requests without a program, asynchronous schedulers everywhere",
    ),
    Run(
        "programs-fcfs",
        ("--scheduler=ours-sync", "--programs", "--policy=fcfs"),
        "stock",
        "Every request is a program's turn, policy fcfs",
    ),
    Run(
        "programs-thunder",
        ("--scheduler=ours-sync", "--programs", "--policy=thunder"),
        "stock",
        "Every request is a program's turn, policy thunder: it holds turns that these tests "
        "expect in vLLM's queue",
        required=False,
    ),
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="conformance", description=__doc__.splitlines()[0])
    parser.add_argument("--archive", type=Path, help="vLLM's source archive, if it is here already")
    parser.add_argument("--long", action="store_true", help="with the tests of a minute or more")
    parser.add_argument(
        "--jobs", type=int, default=min(2, os.cpu_count() or 1), help="runs at once"
    )
    parser.add_argument("--select", default="", metavar="EXPRESSION", help="pytest's -k")
    parser.add_argument(
        "--keep", type=Path, metavar="DIRECTORY", help="keep the runs' logs and outcomes there"
    )
    arguments = parser.parse_args()
    try:
        tests = vllm_tests(cache_directory(), arguments.archive)
    except (ArchiveError, OSError) as error:
        print(f"conformance: {error}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="conformance-") as scratch:
        write_hub_cache(Path(scratch, "hub"))
        folder = arguments.keep or Path(scratch, "runs")
        folder.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(arguments.jobs) as pool:
            selected = selection(arguments.long, arguments.select)
            passes = pool.map(
                lambda run: perform(run, tests, Path(scratch, "hub"), folder, selected), RUNS
            )
            outcomes = dict(zip((run.name for run in RUNS), passes, strict=True))
    return conclude(outcomes, arguments.long)


def selection(long: bool, expression: str) -> list[str]:
    """pytest's arguments for which tests to run."""
    chosen = [f"--ignore={CORE}/{file}" for file in NEED_WEIGHTS]
    chosen += [f"--deselect={CORE}/{test}" for test in (*FOREIGN, *(() if long else LONG))]
    return [*chosen, *(["-k", expression] if expression else []), CORE]


def perform(
    run: Run, tests: Path, hub: Path, folder: Path, selected: list[str]
) -> dict[str, Outcome]:
    """Run the tests in a process of their own; the outcomes by test."""
    began = time.monotonic()
    results, log = folder / f"{run.name}.jsonl", folder / f"{run.name}.log"
    results.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-p", "scripts.conformance.plugin", "--noconftest"]
    command += ["-p", "no:cacheprovider", "-q", "-W", "ignore", "--tb=short", "--timeout=600"]
    command += [f"--rootdir={tests}", f"--results={results.resolve()}", *run.options, *selected]
    environment = {
        **os.environ,
        # vLLM's tests are a package named ``tests``, and so are ours: theirs comes first.
        "PYTHONPATH": os.pathsep.join([str(tests), str(ROOT)]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "HF_HUB_CACHE": str(hub),
        "HF_HUB_OFFLINE": "1",
    }
    with log.open("w") as output:
        done = subprocess.run(
            command, cwd=tests, env=environment, stdout=output, stderr=output, check=False
        )
    if done.returncode not in (0, 1):
        last = "\n".join(log.read_text().splitlines()[-30:])
        raise RuntimeError(f"the run {run.name!r} ended with code {done.returncode}:\n{last}")
    outcomes = read_outcomes(results)
    print(f"{run.name}: {len(outcomes)} tests in {time.monotonic() - began:.0f} s", flush=True)
    return outcomes


def conclude(outcomes: dict[str, dict[str, Outcome]], long: bool) -> int:
    """Print every comparison; the exit code."""
    conforms = True
    for run in RUNS:
        if run.against is not None:
            result = compare(outcomes[run.against], outcomes[run.name])
            print("", *report(run.title, result, required=run.required), sep="\n")
            conforms &= result.conforms if run.required else not result.broken_books
    print(f"\nNot run, of {CORE}:")
    print("  they need a model's weights:", *NEED_WEIGHTS)
    print("  it starts a process of its own without ours:", *FOREIGN)
    if not long:
        print("  they take minutes (--long runs them):", *(f"{name}*]" for name in LONG))
    print("conforms" if conforms else "DOES NOT CONFORM")
    return 0 if conforms else 1


if __name__ == "__main__":
    sys.exit(main())
