"""Run by test_offline in a process of its own: programs without a server.

Prints one JSON object of what was seen. ``python -m tests.serving.offline_script MODEL``.
"""

import json
import sys
from functools import partial
from typing import Any

from vllm_thunder import LLM

BLOCKS = 101


def main(model: str) -> dict[str, Any]:
    from vllm import SamplingParams

    from tests.serving.client import words

    llm = LLM(
        model=model,
        dtype="float32",
        enforce_eager=True,
        block_size=32,
        num_gpu_blocks_override=BLOCKS,
        kv_cache_memory_bytes=64 << 20,
        max_model_len=2048,
        thunder={"retention": 60.0},
    )
    four = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    fan = SamplingParams(max_tokens=4, temperature=1, ignore_eos=True, n=3)
    prompts = [words(200, f"prompt {number}") for number in range(6)]
    seen: dict[str, Any] = {}

    labelled = llm.generate(prompts, four, program_id=["a", "b", "c", None, "a", "b"])
    seen["programs"] = {p["program_id"]: p["turns"] for p in llm.programs()}
    plain = llm.generate(prompts, four)
    texts = [[output.outputs[0].text for output in outputs] for outputs in (labelled, plain)]
    seen["same_text"] = texts[0] == texts[1]

    fanned = llm.generate(prompts[:2], fan, program_id="fan")
    seen["choices"] = [len(output.outputs) for output in fanned]
    seen["fan"] = next(
        {name: p[name] for name in ("turns", "phase", "turns_in_flight")}
        for p in llm.programs()
        if p["program_id"] == "fan"
    )
    chat = [{"role": "user", "content": "hello"}]
    llm.chat(chat, four, program_id="chat")
    llm.chat([chat, chat], four, program_id=["chat", "chat 2"])
    seen["chat"] = {
        p["program_id"]: p["turns"] for p in llm.programs() if p["program_id"].startswith("chat")
    }

    # More than memory holds at once: turns are held, and every one of them ends.
    large = [words(1200, f"large {number}") for number in range(8)]
    outputs = llm.generate(large, four, program_id=[f"large {number}" for number in range(8)])
    seen["large"] = [len(output.outputs[0].token_ids) for output in outputs]

    wrongs = [
        partial(llm.generate, prompts, four, program_id=wrong)
        for wrong in (["a"], [1.5] * 6, 1.5, True, {"a": 1}, "")
    ]
    wrongs += [partial(llm.release, wrong) for wrong in (None, ["a"], "")]
    for call in wrongs:
        try:
            call()
        except Exception as error:
            seen.setdefault("errors", []).append(type(error).__name__)
    llm.generate(prompts, four, program_id=[1, 1, 1, 2, 2, 2])
    turns = {p["program_id"]: p["turns"] for p in llm.programs()}
    seen["integers"] = {name: turns[name] for name in ("1", "2")}
    llm.release(1)
    seen["after_errors"] = len(llm.generate(prompts, four, program_id="after")[0].outputs)

    seen["released"] = [llm.release("a")["released"], llm.release("a")["released"]]
    for program in llm.programs():
        llm.release(program["program_id"])
    seen["left"] = llm.programs()
    summary = llm._programs("summary")
    seen["free"] = summary["free_blocks"] - summary["total_blocks"]
    llm._programs("check_integrity")
    return seen


if __name__ == "__main__":
    print("\n" + json.dumps(main(sys.argv[1])))
