"""Without ``vllm_thunder serve``: the offline LLM, the scheduler alone, and bare vLLM."""

import json
import os
import subprocess
import sys
from pathlib import Path

LAUNCHER = Path("vllm_thunder") / "replay" / "stock_launcher.py"

#: What a bare vLLM process does at its start, and whether that brought anything of ours.
BARE = """
import sys
import vllm
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.v1.engine import EngineCoreRequest
ours = [name for name in sys.modules if name.partition(".")[0] == "vllm_thunder"]
hooks = [repr(finder) for finder in sys.meta_path if "vllm_thunder" in type(finder).__module__]
print([ours, hooks, "program" in EngineCoreRequest.__struct_fields__])
"""


def run(repo_root: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(repo_root)}
    return subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=240,
        env=environment,
        cwd=repo_root,
    )


def test_the_offline_llm(repo_root: Path, tiny_model: Path) -> None:
    ended = run(repo_root, "-m", "tests.serving.offline_script", str(tiny_model))
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert json.loads(ended.stdout.splitlines()[-1]) == {
        "programs": {"a": 2, "b": 2, "c": 1},
        "same_text": True,
        "choices": [3, 3],
        "fan": {"turns": 2, "phase": "ACTING", "turns_in_flight": 0},
        "chat": {"chat": 2, "chat 2": 1},
        "large": [4] * 8,
        "errors": ["IdentityError"] * 9,
        "integers": {"1": 3, "2": 3},
        "after_errors": 1,
        "released": [True, False],
        "left": [],
        "free": 0,
    }


def test_the_scheduler_alone_says_why_it_cannot_work(repo_root: Path, tiny_model: Path) -> None:
    """Bare ``vllm serve`` imports the engine before it looks at ``--scheduler-cls``: the patches
    come too late, and a scheduler without them would see no program."""
    ended = run(
        repo_root,
        "-P",
        str(LAUNCHER),
        "serve",
        str(tiny_model),
        "--scheduler-cls",
        "vllm_thunder.engine.ProgramScheduler",
        "--enforce-eager",
        "--dtype=float32",
        "--block-size=32",
        "--max-model-len=2048",
        "--num-gpu-blocks-override=101",
        "--kv-cache-memory-bytes=67108864",
    )
    assert ended.returncode != 0
    assert (
        "PatchError: vllm.v1.engine is already imported without the patches: import vllm_thunder "
        "before vllm, or start with `vllm_thunder serve`"
    ) in ended.stdout + ended.stderr


def test_bare_vllm_is_untouched(repo_root: Path) -> None:
    ended = run(repo_root, "-c", BARE)
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert ended.stdout.splitlines()[-1] == "[[], [], False]"
