"""Make a small trace out of a large one: numbers only, fewer and shorter programs.

    python benchmarks/shrink_trace.py FILE --programs 12 --scale 0.6 --max-steps 8 >> small.jsonl

Tool times that the source does not have are drawn as the replay would draw them (seed 0) and
capped, so that the small trace means the same wherever it is replayed; with ``--leave-unknown``
they are left to the replay, which draws others for every seed. A user's turn keeps no time. More
programs than FILE has are its programs again, under ids that end with a number.
"""

import argparse
import json
import random
import sys
from collections import Counter
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
    parser.add_argument(
        "--leave-unknown", action="store_true", help="draw no tool times, cap those that are known"
    )
    args = parser.parse_args()
    lines = args.file.read_text(encoding="utf-8").splitlines()
    programs = [json.loads(line) for line in lines]
    programs = [program for program in programs if len(program["steps"]) >= args.min_steps]
    if args.programs < 1 or not programs:
        parser.error(f"--programs: {args.programs} of the {len(programs)} programs in FILE")
    stride = len(programs) / args.programs

    def scaled(tokens: int) -> int:
        return max(1, round(tokens * float(args.scale)))

    def seconds(step: dict[str, Any], rng: random.Random) -> float | None:
        if step["tool"] == "user":
            return None
        known = step["tool_seconds"]
        if known is None and args.leave_unknown:
            return None
        if known is None:
            known = draw_tool_seconds(tool_class(step["tool"] or ""), rng)
        return round(min(known, float(args.max_tool_seconds)), 3)

    taken: Counter[int] = Counter()
    for index in range(args.programs):
        place = int(index * stride)
        program = programs[place]
        taken[place] += 1
        if taken[place] > 1:
            program = {**program, "program_id": f"{program['program_id']}/{taken[place]}"}
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
