"""What programs cost the scheduler itself: no model, the real queues, KV-cache manager and pool.

    python benchmarks/scheduler_cost.py

1,000 programs in a closed loop: 256 of their turns run, the others wait or act; 50,000 KV blocks
of 16 tokens; about ten turns end in every step and as many arrive. vLLM's ``AsyncScheduler`` and
``ProgramScheduler`` are stepped through the same programs, each in a process of its own (in one
process the interpreter could not specialise its bytecode for either). The two take turns of a few
steps, so that what else the machine does meets both alike. Taken is the CPU time of ``schedule()``
plus ``update_from_output()``, and apart from it that of ``add_request()``; the result is the median
over the pairs of processes. Two loads: ``fits`` (all contexts fit into the pool, so that both
schedulers do the same work) and ``tight`` (they are twice as large as the pool: turns are held,
paused and restored, and stock vLLM prefills again instead).
"""

import argparse
import gc
import json
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

# The harness imports vllm, after vllm_thunder as it has to be.
from tests.engine.harness import BLOCK, AsyncScheduler, Engine, ModelRunnerOutput
from vllm_thunder.engine.scheduler import ProgramScheduler
from vllm_thunder.program.program import Phase
from vllm_thunder.replay.machine import describe_machine
from vllm_thunder.replay.tiny_model import TinyModel, build_tiny_model, default_cache

PROGRAMS = 1_000
RUNNING = 256
BLOCKS = 50_000
OUTPUT_TOKENS = 25
STEP_SECONDS = 0.03
#: Steps of one process before the other's turn.
TURN_STEPS = 20
#: Most blocks of a new context; all contexts together fit, or are twice as much as there is.
LOADS = {"fits": 36, "tight": 100}
SCHEDULERS = {"stock": AsyncScheduler, "thunder": ProgramScheduler}


class ClosedLoop:
    """Programs on one scheduler; the same seed gives the same contexts and tool times."""

    def __init__(self, scheduler: type[AsyncScheduler], context_blocks: int, programs: int):
        self.engine = Engine(
            build_tiny_model(default_cache(), TinyModel()),
            blocks=BLOCKS,
            scheduler=scheduler,
            max_num_seqs=RUNNING,
            max_num_batched_tokens=65_536,
        )
        self._labelled = scheduler is ProgramScheduler
        self._random = random.Random(0)
        self._tokens = context_blocks * BLOCK
        self._due: dict[int, list[str]] = {}
        self._contexts: dict[str, list[int]] = {}
        self._requests: dict[str, Any] = {}
        self.steps = 0
        self.turn_ends = 0
        self.prefilled = 0
        self.running: list[int] = []
        self.add_seconds = 0.0
        for number in range(programs):
            self._start(f"p{number}", number % 100)

    def _start(self, program_id: str, step: int) -> None:
        length = self._random.randint(self._tokens // 2, self._tokens)
        start = self._random.randrange(1_000_000)
        self._contexts[program_id] = [(start + 7 * i) % 1_000_003 for i in range(length)]
        self._due.setdefault(self.steps + step, []).append(program_id)

    def step(self) -> float:
        """One engine step; seconds in schedule() and update_from_output()."""
        engine = self.engine
        for program_id in self._due.pop(self.steps, ()):
            request = engine.request(
                self._contexts[program_id],
                program_id if self._labelled else None,
                max_tokens=OUTPUT_TOKENS,
            )
            self._requests[program_id] = request
            began = time.thread_time()
            engine.scheduler.add_request(request)
            self.add_seconds += time.thread_time() - began
        began = time.thread_time()
        scheduled = engine.scheduler.schedule()
        spent = time.thread_time() - began
        ids = list(scheduled.num_scheduled_tokens)
        sampled = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: i for i, request_id in enumerate(ids)},
            sampled_token_ids=[
                [] if engine.scheduler.requests[request_id].is_prefill_chunk else [11]
                for request_id in ids
            ],
        )
        began = time.thread_time()
        engine.scheduler.update_from_output(scheduled, sampled)
        spent += time.thread_time() - began
        engine.now += STEP_SECONDS
        self.running.append(len(engine.scheduler.running))
        self.prefilled += sum(n for n in scheduled.num_scheduled_tokens.values() if n > 1)
        self.steps += 1
        for program_id, request in list(self._requests.items()):
            if request.is_finished():
                del self._requests[program_id]
                self._turn_ended(program_id, list(request.all_token_ids))
        return spent

    def _turn_ended(self, program_id: str, context: list[int]) -> None:
        self.turn_ends += 1
        pause = 1 + int(self._random.expovariate(1 / 40))
        if len(context) > 1.5 * self._tokens:  # a new program takes its place
            if self._labelled:
                self.engine.scheduler.release_program(program_id)
            self._start(program_id + "'", pause)
            del self._contexts[program_id]
            return
        self._contexts[program_id] = [*context, *range(20)]
        self._due.setdefault(self.steps + pause, []).append(program_id)


class Child:
    """One kind under one load in a process of its own, stepped from here."""

    def __init__(self, kind: str, load: str):
        command = [sys.executable, __file__, "--child", kind, load]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def step(self, steps: int) -> float:
        """CPU seconds that the scheduler took for so many steps."""
        return float(self._ask(str(steps))["seconds"])

    def finish(self) -> dict[str, Any]:
        """What the process saw since its first step; it ends."""
        result = self._ask("finish")
        if self._process.wait() != 0:
            raise SystemExit("a child failed")
        return result

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _ask(self, line: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(line, file=self._process.stdin, flush=True)
        for answer in self._process.stdout:
            if answer.startswith("{"):  # else a line that vLLM logs
                result: dict[str, Any] = json.loads(answer)
                return result
        raise SystemExit(f"a child ended with status {self._process.wait()}")


def serve_child(kind: str, load: str) -> None:
    """The other end of ``Child``. Garbage is collected between what is timed."""
    loop = ClosedLoop(SCHEDULERS[kind], LOADS[load], PROGRAMS)
    gc.disable()
    for line in sys.stdin:
        if line.strip() == "finish":
            break
        gc.collect()
        seconds = sum(loop.step() for _ in range(int(line)))
        print(json.dumps({"seconds": seconds}), flush=True)
    result = {
        "add_request_us": 1e6 * loop.add_seconds / loop.turn_ends,
        "running": statistics.mean(loop.running),
        "turn_ends_per_step": loop.turn_ends / loop.steps,
        "prefilled_tokens_per_step": loop.prefilled / loop.steps,
    }
    if kind == "thunder":
        loop.engine.check()
        table = loop.engine.scheduler.table
        acting = sum(p.phase is Phase.ACTING for p in table)
        result |= {"waiting": len(table.waiting), "acting": acting, "pauses": table.pauses}
    print(json.dumps(result), flush=True)


def compare(load: str, pairs: int, steps: int, warm_up: int) -> dict[str, Any]:
    """Both kinds through one load, ``pairs`` times."""
    runs: dict[str, list[dict[str, Any]]] = {kind: [] for kind in SCHEDULERS}
    for _ in range(pairs):
        children = {kind: Child(kind, load) for kind in SCHEDULERS}
        try:
            for child in children.values():
                child.step(warm_up)
            seconds = dict.fromkeys(children, 0.0)
            for turn in range(steps // TURN_STEPS):
                for kind in list(children)[:: -1 if turn % 2 else 1]:
                    seconds[kind] += children[kind].step(TURN_STEPS)
            for kind, child in children.items():
                ms_per_step = 1e3 * seconds[kind] / (steps // TURN_STEPS * TURN_STEPS)
                runs[kind].append({"ms_per_step": ms_per_step, **child.finish()})
        finally:
            for child in children.values():
                child.kill()
    ratios = [
        thunder["ms_per_step"] / stock["ms_per_step"]
        for stock, thunder in zip(runs["stock"], runs["thunder"], strict=True)
    ]
    return {"load": load, "overhead": statistics.median(ratios) - 1, "ratios": ratios, **runs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--warm-up", type=int, default=200)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS))
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        serve_child(*args.child)
        return
    results = []
    for load in args.loads:
        results.append(compare(load, args.pairs, args.steps, args.warm_up))
        print(json.dumps(results[-1], indent=1), flush=True)
    if args.json:
        report = {"machine": describe_machine(), "results": results}
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
