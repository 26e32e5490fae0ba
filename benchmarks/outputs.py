"""Does scheduling by program change the text? Greedy outputs against stock vLLM's.

The same scripted programs run on stock vLLM, on stock vLLM in another arrival order, and on
vllm_thunder in the first order, with a KV cache that holds a part of them. Floating-point sums
depend on what else is in a batch, so stock vLLM's greedy output may differ from its own where two
tokens are almost equally likely. Such a *divergence* is the only difference that scheduling may
make.

A turn's prompt is built from stock vLLM's outputs in the first order, whatever the run itself
said before: one divergence does not carry into later turns.
"""

import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from typing import Any

__all__ = [
    "TIE",
    "Comparison",
    "Divergence",
    "EngineSpec",
    "Outcome",
    "Run",
    "RunFailed",
    "Script",
    "ScriptedTurn",
    "TurnOutput",
    "arrival_order",
    "compare",
    "run_all",
]

#: Two tokens whose log-probabilities are closer than this are a tie that rounding may break.
TIE = 1e-4
_LOGPROBS = 5
_WORKER = Path(__file__).with_name("output_worker.py")
_ROOT = Path(__file__).resolve().parent.parent


class RunFailed(RuntimeError):
    """An engine did not give its outputs; the message holds the end of its log."""


@dataclass(frozen=True, slots=True)
class ScriptedTurn:
    """``new_tokens`` are appended to the context, then ``output_tokens`` are generated."""

    new_tokens: list[int]
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Script:
    program_id: str
    turns: list[ScriptedTurn]


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """``usable_blocks`` x ``block_size`` tokens of KV cache, each ``kv_bytes_per_token`` bytes."""

    model: Path
    usable_blocks: int
    block_size: int
    kv_bytes_per_token: int
    max_model_len: int

    def arguments(self) -> dict[str, Any]:
        """For ``LLM``. float32: in half precision, ties are common and the comparison is blunt."""
        pool = self.usable_blocks + 1  # vLLM keeps one block as its null block
        size = pool * self.block_size * self.kv_bytes_per_token
        return {
            "model": str(self.model),
            "dtype": "float32",
            "enforce_eager": True,
            "seed": 0,
            "block_size": self.block_size,
            "num_gpu_blocks_override": pool,
            "kv_cache_memory_bytes": max(size, 64 << 20),
            "max_model_len": self.max_model_len,
            "max_num_seqs": 64,
            "disable_log_stats": True,
        }


@dataclass(frozen=True, slots=True)
class TurnOutput:
    """``logprobs``: at each position, those of the likeliest tokens and of the chosen one."""

    tokens: list[int]
    logprobs: list[dict[int, float]]
    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Run:
    """``turns[program][step]``. ``programs``: what vllm_thunder counted; None of stock vLLM."""

    turns: list[list[TurnOutput]]
    seconds: float
    programs: dict[str, Any] | None = None

    @property
    def hit_rate(self) -> float:
        """Cached prompt tokens per prompt token."""
        turns = [turn for turns in self.turns for turn in turns]
        return sum(t.cached_tokens for t in turns) / sum(t.prompt_tokens for t in turns)

    @property
    def smallest_margin(self) -> float:
        """Between the likeliest token and the next one, over all positions: how near a tie was."""
        positions = (p for turns in self.turns for turn in turns for p in turn.logprobs)
        return min(first - second for first, second, *_ in map(_descending, positions))


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first position at which two outputs of one prompt differ.

    ``gap``: how far apart the two candidates' log-probabilities are, in the run where they are
    further apart; infinite when a run does not count the other's token among the likeliest.
    """

    program: int
    step: int
    position: int
    reference_token: int
    token: int
    gap: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """``largest_drift``: of a chosen token's log-probability, where both chose the same."""

    turns: int
    tokens: int
    divergences: list[Divergence]
    largest_drift: float

    @property
    def largest_gap(self) -> float:
        """Over all divergences; 0 if there is none."""
        return max((divergence.gap for divergence in self.divergences), default=0.0)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The three runs, and what the other two say beside the reference."""

    reference: Run
    reordered: Run
    thunder: Run

    @property
    def stock(self) -> Comparison:
        """Stock vLLM against itself in another arrival order."""
        return compare(self.reference, self.reordered)

    @property
    def program(self) -> Comparison:
        """vllm_thunder against stock vLLM."""
        return compare(self.reference, self.thunder)

    def failures(self) -> list[str]:
        """Why the outputs are not as good as stock vLLM's; empty: they are."""
        stock, program = self.stock, self.program
        found = []
        if len(program.divergences) > len(stock.divergences):
            found.append(
                f"{len(program.divergences)} outputs differ from stock vLLM's, "
                f"{len(stock.divergences)} of its own in another order"
            )
        found += [f"not a tie: {d}" for d in program.divergences if not d.gap <= TIE]
        return found

    def to_json(self) -> dict[str, Any]:
        runs = {"stock": self.reference, "stock, other order": self.reordered}
        runs["vllm_thunder"] = self.thunder
        return {
            "tie": TIE,
            "smallest_margin": self.reference.smallest_margin,
            "runs": {
                name: {"seconds": round(run.seconds, 1), "hit_rate": round(run.hit_rate, 3)}
                for name, run in runs.items()
            },
            "vllm_thunder_counted": self.thunder.programs,
            "stock_against_itself": _comparison_json(self.stock),
            "vllm_thunder_against_stock": _comparison_json(self.program),
            "failures": self.failures(),
        }

    def __str__(self) -> str:
        lines = [f"smallest margin between two tokens: {self.reference.smallest_margin:.1e}"]
        for name, found in (
            ("stock vLLM in another order", self.stock),
            ("vllm_thunder", self.program),
        ):
            lines.append(
                f"{name}: {len(found.divergences)} of {found.turns} outputs differ "
                f"({found.tokens} tokens), largest gap {found.largest_gap:.1e}, "
                f"largest drift {found.largest_drift:.1e}"
            )
        for name, run in (
            ("stock vLLM", self.reference),
            ("stock vLLM in another order", self.reordered),
            ("vllm_thunder", self.thunder),
        ):
            lines.append(f"{name}: {run.seconds:.0f} s, hit rate {run.hit_rate:.2f}")
        lines.append(f"programs: {self.thunder.programs}")
        return "\n".join(lines)


def arrival_order(scripts: Sequence[Script], seed: int) -> list[list[int]]:
    """Rounds of programs whose next turns arrive together, until every script has ended.

    Two thirds of the programs that are left arrive in a round, in a shuffled order: which
    programs meet in memory changes from round to round.
    """
    rng = random.Random(f"arrival/{seed}")
    left = {program: len(script.turns) for program, script in enumerate(scripts)}
    rounds = []
    while left:
        arriving = [program for program in left if rng.random() < 2 / 3]
        rng.shuffle(arriving)
        for program in arriving:
            left[program] -= 1
            if not left[program]:
                del left[program]
        if arriving:
            rounds.append(arriving)
    return rounds


def compare(reference: Run, other: Run) -> Comparison:
    """Output by output; raises ValueError when the runs are not of the same scripts."""
    divergences: list[Divergence] = []
    drift, turns, tokens = 0.0, 0, 0
    for program, (expected, found) in enumerate(zip(reference.turns, other.turns, strict=True)):
        for step, (one, two) in enumerate(zip(expected, found, strict=True)):
            if (one.prompt_tokens, len(one.tokens)) != (two.prompt_tokens, len(two.tokens)):
                raise ValueError(f"program {program}, step {step}: not the same turn")
            turns += 1
            tokens += len(one.tokens)
            for position, (a, b) in enumerate(zip(one.tokens, two.tokens, strict=True)):
                left, right = one.logprobs[position], two.logprobs[position]
                if a != b:
                    gap = max(_gap(left, a, b), _gap(right, a, b))
                    divergences.append(Divergence(program, step, position, a, b, gap))
                    break
                drift = max(drift, abs(left[a] - right[b]))
    return Comparison(turns, tokens, divergences, drift)


def run_all(
    engine: EngineSpec,
    scripts: Sequence[Script],
    folder: Path,
    *,
    orders: tuple[int, int] = (0, 1),
    timeout: float = 600.0,
) -> Outcome:
    """Two engines, one after the other; jobs, results and logs go to ``folder``.

    ``orders`` are the seeds of :func:`arrival_order`, ``timeout`` is in seconds for each engine.
    Raises RunFailed.
    """
    first, second = (arrival_order(scripts, seed) for seed in orders)
    reference, reordered = _run(
        "stock", engine, scripts, folder, timeout, orders=[first, second], histories=None
    )
    histories = [[turn.tokens for turn in turns] for turns in reference.turns]
    (thunder,) = _run(
        "thunder", engine, scripts, folder, timeout, orders=[first], histories=histories
    )
    return Outcome(reference, reordered, thunder)


def _run(
    kind: str,
    engine: EngineSpec,
    scripts: Sequence[Script],
    folder: Path,
    timeout: float,
    **job: Any,
) -> list[Run]:
    """One run for each of the job's ``orders``, on one engine in a process of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    job_file, result_file, log_file = (
        folder / f"{kind}.{name}" for name in ("job.json", "result.json", "log")
    )
    job |= {"engine": engine.arguments(), "logprobs": _LOGPROBS}
    job["scripts"] = [asdict(script) for script in scripts]
    job_file.write_text(json.dumps(job), encoding="utf-8")
    result_file.unlink(missing_ok=True)
    environment = {
        **os.environ,
        # In this one process: steps then depend on the order of arrival, not on a race with it.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # Without a compiler: all that vLLM still compiles in eager mode ranks log-probabilities.
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
    }
    if kind == "thunder":
        paths = [str(_ROOT), os.environ.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    # -P: else this folder would come first on sys.path.
    command = [sys.executable, "-P", str(_WORKER), kind, str(job_file), str(result_file)]
    with log_file.open("wb") as log:
        try:
            status: int | str = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                timeout=timeout,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            status = f"not finished after {timeout:g} s"
    if status != 0 or not result_file.is_file():
        end = log_file.read_text(encoding="utf-8", errors="replace").splitlines()[-30:]
        raise RunFailed("\n".join([f"{kind}: {status}", *end]))
    return [_run_from_json(run) for run in json.loads(result_file.read_text(encoding="utf-8"))]


def _run_from_json(run: dict[str, Any]) -> Run:
    turns = [
        [
            TurnOutput(
                turn["tokens"],
                [{int(token): p for token, p in one.items()} for one in turn["logprobs"]],
                turn["prompt_tokens"],
                turn["cached_tokens"],
            )
            for turn in program
        ]
        for program in run["turns"]
    ]
    return Run(turns, run["seconds"], run["programs"])


def _gap(logprobs: dict[int, float], one: int, two: int) -> float:
    if one not in logprobs or two not in logprobs:
        return inf
    return abs(logprobs[one] - logprobs[two])


def _descending(logprobs: dict[int, float]) -> list[float]:
    return sorted(logprobs.values(), reverse=True)


def _comparison_json(found: Comparison) -> dict[str, Any]:
    """JSON has no infinity: such a gap is null."""
    divergences = [asdict(d) | {"gap": _finite(d.gap)} for d in found.divergences]
    return {
        **asdict(found),
        "divergences": divergences,
        "largest_gap": _finite(found.largest_gap),
    }


def _finite(gap: float) -> float | None:
    return None if gap == inf else gap
