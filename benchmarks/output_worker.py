"""Greedy outputs of scripted programs from one engine in this process.

    python -P output_worker.py stock|thunder JOB.json RESULT.json

Started by its path by :mod:`outputs`, which also says what the two files hold. It is a script of
its own so that with ``stock`` no line of vllm_thunder is in the process.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any


def main() -> None:
    kind, job_file, result_file = sys.argv[1:]
    job = json.loads(Path(job_file).read_text())
    llm = start_engine(kind, job)
    histories = job["histories"]
    runs = []
    for order in job["orders"]:
        # Each order starts with an empty cache. The first one tells the history of all others.
        if not llm.llm_engine.reset_prefix_cache():
            sys.exit("output_worker.py: the prefix cache of an idle engine was not reset")
        run = run_order(llm, kind, job, order, histories)
        if histories is None:
            histories = [[turn["tokens"] for turn in turns] for turns in run["turns"]]
        runs.append(run)
    if kind == "stock" and "vllm_thunder" in sys.modules:
        sys.exit("output_worker.py: vllm_thunder is loaded; this was not stock vLLM")
    Path(result_file).write_text(json.dumps(runs))


def start_engine(kind: str, job: dict[str, Any]) -> Any:
    if kind == "thunder":
        from vllm_thunder import LLM  # first: its patches have to be in place before vLLM loads
    else:
        from vllm import LLM
    return LLM(**job["engine"])


def run_order(
    llm: Any,
    kind: str,
    job: dict[str, Any],
    order: list[list[int]],
    histories: list[list[list[int]]] | None,
) -> dict[str, Any]:
    from vllm import SamplingParams

    scripts = job["scripts"]
    contexts: list[list[int]] = [[] for _ in scripts]
    turns: list[list[dict[str, Any]]] = [[] for _ in scripts]
    began = time.monotonic()
    for arriving in order:
        params = []
        for program in arriving:
            script = scripts[program]["turns"][len(turns[program])]
            contexts[program] += script["new_tokens"]
            params.append(
                SamplingParams(
                    temperature=0.0,
                    max_tokens=script["output_tokens"],
                    ignore_eos=True,
                    logprobs=job["logprobs"],
                    detokenize=False,
                )
            )
        prompts = [{"prompt_token_ids": list(contexts[program])} for program in arriving]
        labels = {"program_id": [scripts[program]["program_id"] for program in arriving]}
        outputs = llm.generate(
            prompts, params, use_tqdm=False, **(labels if kind == "thunder" else {})
        )
        for program, output in zip(arriving, outputs, strict=True):
            step = len(turns[program])
            turns[program].append(describe(output))
            own = turns[program][-1]["tokens"]
            contexts[program] += own if histories is None else histories[program][step]
        print(f"{sum(map(len, turns))} turns of {sum(map(len, order))}", flush=True)
    seconds = time.monotonic() - began
    run = {"seconds": seconds, "turns": turns, "programs": None}
    if kind == "thunder":
        run["programs"] = end_programs(llm)
    return run


def describe(output: Any) -> dict[str, Any]:
    """A turn as JSON: at each position the log-probabilities of the likeliest tokens."""
    completion = output.outputs[0]
    return {
        "tokens": list(completion.token_ids),
        "logprobs": [
            {str(token): value.logprob for token, value in position.items()}
            for position in completion.logprobs
        ],
        "prompt_tokens": len(output.prompt_token_ids),
        "cached_tokens": output.num_cached_tokens,
    }


def end_programs(llm: Any) -> dict[str, Any]:
    """What the engine did with its programs, and what is left of them after their release."""
    before = llm._programs("summary")
    evicted = llm._programs("metrics")["labelled_counters"]["evicted_blocks"]
    restored_again = sum(max(program["restores"] - 1, 0) for program in llm.programs())
    for program in llm.programs():
        llm.release(program["program_id"])
    llm._programs("check_integrity")
    after = llm._programs("summary")
    return {
        "pauses": before["pauses"],
        "restores": before["restores"],
        "free_restores": before["free_restores"],
        # a program's first restore is its first admission
        "restores_after_a_pause": restored_again,
        "evicted_blocks": {labels["class"]: int(count) for labels, count in evicted},
        "longest_wait_seconds": before["longest_wait_seconds"],
        "programs_left": after["programs"],
        "blocks_not_free": after["total_blocks"] - after["free_blocks"],
    }


if __name__ == "__main__":
    main()
