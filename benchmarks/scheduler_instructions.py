"""How many machine instructions programs cost the scheduler itself: the same twice, on any machine.

    python benchmarks/scheduler_instructions.py

The load ``fits`` of ``scheduler_cost.py``, where both schedulers do the same work, under valgrind's
callgrind: counted is what ``schedule()`` and ``update_from_output()`` execute, in some steps of
every hundred. Unlike times, which differ by several per cent between two processes that do the
same, the count does not depend on what else the machine does or on where memory lies. It says
nothing of cache misses: see the times as well.

Needs valgrind with its header, and a C compiler.
"""

import argparse
import ctypes
import gc
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.scheduler_cost import LOADS, PROGRAMS, SCHEDULERS, ClosedLoop
from vllm_thunder.replay.machine import describe_machine

LOAD = "fits"
#: Counted are the last steps of every hundred: an instrumented step takes ten times as long.
STEPS_OF_A_HUNDRED = 5

#: Requests to valgrind are instructions, which only a compiler can write.
_SWITCHES = """
#include <valgrind/callgrind.h>
void instrument(int on) {
    if (on) { CALLGRIND_START_INSTRUMENTATION; } else { CALLGRIND_STOP_INSTRUMENTATION; }
}
void toggle_collect(void) { CALLGRIND_TOGGLE_COLLECT; }
"""


def build_switches(folder: Path) -> Path:
    """Compile what turns counting on and off; SystemExit where that is impossible."""
    for tool in ("valgrind", "cc"):
        if shutil.which(tool) is None:
            raise SystemExit(f"{tool} is needed to count instructions and is not installed")
    source, library = folder / "switches.c", folder / "switches.so"
    source.write_text(_SWITCHES, encoding="utf-8")
    built = subprocess.run(
        ["cc", "-O2", "-shared", "-fPIC", str(source), "-o", str(library)],
        capture_output=True,
        text=True,
        check=False,
    )
    if built.returncode != 0:
        raise SystemExit(f"valgrind's header is needed to count instructions:\n{built.stderr}")
    return library


class Counted(ClosedLoop):
    """The closed loop, counting in the two methods that are measured."""

    def __init__(self, kind: str, switches: Path):
        super().__init__(SCHEDULERS[kind], LOADS[LOAD], PROGRAMS)
        self._switches = ctypes.CDLL(str(switches))
        scheduler = self.engine.scheduler
        scheduler.schedule = self._counting(scheduler.schedule)
        scheduler.update_from_output = self._counting(scheduler.update_from_output)

    def _counting(self, method: Any) -> Any:
        def call(*args: Any) -> Any:
            self._switches.toggle_collect()
            try:
                return method(*args)
            finally:
                self._switches.toggle_collect()

        return call

    def run(self, steps: int, warm_up: int) -> int:
        """The number of counted steps, of the ``steps`` after the first ``warm_up``."""
        gc.disable()
        for _ in range(warm_up):
            self.step()
        self.turn_ends = self.prefilled = counted = 0
        for done in range(steps):
            if done % 100 == 0:
                gc.collect()
            counts = done % 100 >= 100 - STEPS_OF_A_HUNDRED
            if counts and done % 100 == 100 - STEPS_OF_A_HUNDRED:
                self._switches.instrument(1)
            self.step()
            counted += counts
            if done % 100 == 99:
                self._switches.instrument(0)
        return counted


def run_child(kind: str, steps: int, warm_up: int, switches: Path) -> None:
    loop = Counted(kind, switches)
    counted = loop.run(steps, warm_up)
    result = {
        "counted_steps": counted,
        "turn_ends_per_step": loop.turn_ends / steps,
        "prefilled_tokens_per_step": loop.prefilled / steps,
    }
    print(json.dumps(result), flush=True)


def start(kind: str, steps: int, warm_up: int, switches: Path) -> subprocess.Popen[str]:
    valgrind = ["valgrind", "--tool=callgrind", "--instr-atstart=no", "--collect-atstart=no"]
    profile = f"--callgrind-out-file={switches.with_name(kind)}.out"
    child = [sys.executable, __file__, "--child", kind, str(switches)]
    sizes = ["--steps", str(steps), "--warm-up", str(warm_up)]
    return subprocess.Popen(
        [*valgrind, profile, *child, *sizes],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONHASHSEED": "0"},
    )


def finish(process: subprocess.Popen[str]) -> dict[str, Any]:
    output, errors = process.communicate()
    collected = re.search(r"Collected : (\d+)", errors)
    if process.returncode != 0 or collected is None:
        raise SystemExit(f"valgrind ended with status {process.returncode}:\n{errors[-2000:]}")
    result: dict[str, Any] = json.loads(output.splitlines()[-1])
    return {"instructions_per_step": int(collected[1]) / result["counted_steps"], **result}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--warm-up", type=int, default=200)
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        kind, switches = args.child
        run_child(kind, args.steps, args.warm_up, Path(switches))
        return
    with tempfile.TemporaryDirectory() as folder:
        switches = build_switches(Path(folder))
        running = {kind: start(kind, args.steps, args.warm_up, switches) for kind in SCHEDULERS}
        try:
            results = {kind: finish(process) for kind, process in running.items()}
        finally:
            for process in running.values():
                process.kill()
    stock, thunder = (results[kind]["instructions_per_step"] for kind in SCHEDULERS)
    report = {"load": LOAD, "overhead": thunder / stock - 1, **results}
    print(json.dumps(report, indent=1))
    if args.json:
        report["machine"] = describe_machine()
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
