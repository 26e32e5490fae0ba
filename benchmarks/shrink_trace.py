"""Make a small trace out of a large one: numbers only, fewer and shorter programs.

    python benchmarks/shrink_trace.py FILE --programs 12 --scale 0.6 --max-steps 8 >> small.jsonl

Tool times that the source does not have are drawn as the replay would draw them (seed 0) and
capped, so that the small trace means the same wherever it is replayed. A user's turn keeps no time.
"""

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

from vllm_thunder.replay.traces import draw_tool_seconds, tool_class


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--programs", type=int, required=True, help="how many, spread over FILE")
    parser.add_argument("--scale", type=float, required=True, help="multiplies token counts")
    parser.add_argument("--max-steps", type=int, required=True, help="first steps to keep")
    parser.add_argument("--min-steps", type=int, default=1, help="leave shorter programs out")
    parser.add_argument("--max-tool-seconds", type=float, default=4.0, help="cap of tool times")
    args = parser.parse_args()
    lines = args.file.read_text(encoding="utf-8").splitlines()
    programs = [json.loads(line) for line in lines]
    programs = [program for program in programs if len(program["steps"]) >= args.min_steps]
    if not 1 <= args.programs <= len(programs):
        parser.error(f"--programs: {args.programs} is outside [1, {len(programs)}]")
    stride = len(programs) / args.programs

    def scaled(tokens: int) -> int:
        return max(1, round(tokens * float(args.scale)))

    def seconds(step: dict[str, Any], rng: random.Random) -> float | None:
        if step["tool"] == "user":
            return None
        known = step["tool_seconds"]
        if known is None:
            known = draw_tool_seconds(tool_class(step["tool"] or ""), rng)
        return round(min(known, float(args.max_tool_seconds)), 3)

    for index in range(args.programs):
        program = programs[int(index * stride)]
        rng = random.Random(f"0/{program['program_id']}")
        steps = [
            {
                "new_input_tokens": scaled(step["new_input_tokens"]),
                "output_tokens": scaled(step["output_tokens"]),
                "tool": step["tool"],
                "tool_seconds": seconds(step, rng),
            }
            for step in program["steps"][: args.max_steps]
        ]
        steps[-1] |= {"tool": None, "tool_seconds": None}
        shared = scaled(program["shared_prefix_tokens"])
        small = {**program, "shared_prefix_tokens": shared, "steps": steps}
        print(json.dumps(small, separators=(",", ":")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
