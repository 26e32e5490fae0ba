"""What programs add to the scheduler's work when memory is enough: no model, real scheduler.

    python benchmarks/roomy_cost.py --json FILE

The load of the suite's row ``roomy`` is played three times in a closed loop: with vLLM's
``AsyncScheduler``, with ``ProgramScheduler`` and program ids, and with ``ProgramScheduler`` and no
ids; a step of each in turn in one process. All three get the same requests; no program may be
paused, which is checked. Timed are ``add_request()``, ``schedule()``, ``update_from_output()`` and
the release of a program. ``extra_seconds`` is the mean CPU time of that in a step, less
AsyncScheduler's: the median over the seeds. What HTTP costs is not in it.
"""

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.engine.harness import BLOCK, Engine, text  # imports vllm_thunder, which goes first

# isort: split
from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from benchmarks.suite.rows import LOADS
from vllm_thunder.engine.scheduler import ProgramScheduler
from vllm_thunder.replay.machine import describe_machine
from vllm_thunder.replay.tiny_model import TinyModel, build_tiny_model, default_cache
from vllm_thunder.replay.workload import ProgramShape, Workload

STEP_SECONDS = 0.05
BATCHED_TOKENS = 4096
TIMED = ("add_request", "schedule", "update_from_output", "release_program")


class ClosedLoop:
    """One scheduler that plays a load; its clock advances by ``STEP_SECONDS`` a step."""

    def __init__(self, scheduler: type[AsyncScheduler], load: Workload, *, ids: bool):
        self.engine = Engine(
            build_tiny_model(default_cache(), TinyModel()),
            blocks=load.blocks * load.block_size // BLOCK,
            scheduler=scheduler,
            max_num_batched_tokens=BATCHED_TOKENS,
        )
        self.spent = 0.0
        self.steps = 0
        for name in TIMED:
            if hasattr(self.engine.scheduler, name):
                setattr(self.engine.scheduler, name, self._timed(name))
        self._ids = ids
        self._requests: dict[int, Any] = {}
        self._contexts = {i: text(i, p.steps[0].new_input_tokens) for i, p in _numbered(load)}
        self._turns = {i: list(p.steps) for i, p in _numbered(load)}
        self._due = {0: list(self._turns)}

    def _timed(self, name: str) -> Callable[..., Any]:
        call = getattr(self.engine.scheduler, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.thread_time()
            try:
                return call(*args, **kwargs)
            finally:
                self.spent += time.thread_time() - began

        return timed

    @property
    def done(self) -> bool:
        return not self._turns

    @property
    def seconds_a_step(self) -> float:
        return self.spent / self.steps

    def step(self) -> None:
        for number in self._due.pop(self.steps, ()):
            self._requests[number] = self.engine.send(
                self._contexts[number],
                f"p{number}" if self._ids else None,
                max_tokens=self._turns[number][0].output_tokens,
            )
        self.engine.step(STEP_SECONDS)
        self.steps += 1
        for number, request in list(self._requests.items()):
            if request.is_finished():
                del self._requests[number]
                self._turn_ended(number, list(request.all_token_ids))

    def _turn_ended(self, number: int, context: list[int]) -> None:
        ended, *left = self._turns[number]
        if not left:
            del self._turns[number]
            if self._ids:
                self.engine.scheduler.release_program(f"p{number}")
            return
        self._turns[number] = left
        observed = text(number + 1000 * len(left), left[0].new_input_tokens)
        self._contexts[number] = [*context, *observed]
        steps = 1 + round(ended.tool_seconds / STEP_SECONDS)
        self._due.setdefault(self.steps + steps, []).append(number)


def _numbered(load: Workload) -> list[tuple[int, ProgramShape]]:
    return list(enumerate(load.programs))


def seconds_a_step(load: Workload) -> dict[str, float]:
    """Mean CPU seconds of a step of each of the three schedulers."""
    loops = {
        "stock": ClosedLoop(AsyncScheduler, load, ids=False),
        "ids": ClosedLoop(ProgramScheduler, load, ids=True),
        "no_ids": ClosedLoop(ProgramScheduler, load, ids=False),
    }
    order = list(loops.values())
    gc.collect()
    gc.disable()
    try:
        while left := [loop for loop in order if not loop.done]:
            for loop in left:
                loop.step()
            order.append(order.pop(0))  # nobody is always the first
    finally:
        gc.enable()
    if pauses := loops["ids"].engine.scheduler.table.pauses:
        raise SystemExit(f"roomy_cost.py: {pauses} pauses where memory is enough")
    return {name: loop.seconds_a_step for name, loop in loops.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(10)), metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    args = parser.parse_args()
    runs = []
    for seed in args.seeds:
        runs.append({"seed": seed, **seconds_a_step(LOADS["roomy"](seed))})
    report = {
        "extra_seconds": {
            name: statistics.median(run[name] - run["stock"] for run in runs)
            for name in ("ids", "no_ids")
        },
        "seconds_a_step": runs,
        "machine": describe_machine(),
    }
    print(json.dumps(report, indent=1))
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
