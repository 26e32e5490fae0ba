"""The plugin on a small test of vLLM's kind: what is put in place, and what is recorded."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.conformance.stand_ins import STAND_INS, write_hub_cache

#: Builds what vLLM's tests build, in the ways in which they build it.
THEIRS = """
import torch
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

def pool():
    return BlockPool(num_gpu_blocks=4, enable_caching=True, hash_block_size=16)

def manager():
    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=1, dtype=torch.float32)
    config = KVCacheConfig(
        num_blocks=4, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["a"], spec)]
    )
    return KVCacheManager(
        config, max_model_len=64, scheduler_block_size=16, hash_block_size=16, enable_caching=True
    )

def test_pool():
    made = pool()
    queue = made.free_block_queue
    first = queue.fake_free_list_head.next_free_block
    assert made.get_new_blocks(1) == [first]
    made.get_new_blocks(2)
    assert queue.fake_free_list_head.next_free_block is queue.fake_free_list_tail

def test_manager():
    assert manager().block_pool.get_num_free_blocks() == 3

def test_bare():
    assert type(object.__new__(Scheduler)) is Scheduler

def test_fails():
    assert type(pool()) is None

def test_books():
    pool().free_block_queue.num_free_blocks += 1
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, repo_root: Path) -> dict[str, dict]:
    """The records of ``THEIRS`` with ours in place, by the test's name."""
    folder = tmp_path_factory.mktemp("theirs")
    (folder / "tests").mkdir()
    (folder / "tests/test_theirs.py").write_text(THEIRS)
    command = [sys.executable, "-m", "pytest", "-p", "scripts.conformance.plugin"]
    command += ["-p", "no:cacheprovider", f"--rootdir={folder}"]
    done = subprocess.run(
        [*command, "--scheduler=ours", "--results=out.jsonl", "tests"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(repo_root)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr  # one of them fails
    records = map(json.loads, (folder / "out.jsonl").read_text().splitlines())
    return {record["id"].partition("::")[2]: record for record in records}


def test_ours_is_built_where_a_test_builds_theirs(results: dict[str, dict]) -> None:
    assert results["test_pool"]["built"] == ["ProgramBlockPool"]
    assert results["test_manager"]["built"] == ["ProgramBlockPool"]
    assert results["test_pool"]["outcome"] == results["test_manager"]["outcome"] == "passed"


def test_an_object_without_its_constructor_stays_theirs(results: dict[str, dict]) -> None:
    assert results["test_bare"]["outcome"] == "passed"
    assert results["test_bare"]["built"] == []


def test_a_failure_is_recorded_with_its_message(results: dict[str, dict]) -> None:
    assert results["test_fails"]["outcome"] == "failed"
    assert "ProgramBlockPool" in results["test_fails"]["message"]


def test_the_books_are_checked_after_a_test(results: dict[str, dict]) -> None:
    assert results["test_books"]["outcome"] == "passed"
    assert results["test_books"]["problems"]
    assert results["test_pool"]["problems"] == []


def test_stand_ins_are_a_hub_cache(tmp_path: Path) -> None:
    """As the hub's own client finds them, without a network."""
    write_hub_cache(tmp_path)
    code = (
        "import sys; from huggingface_hub import try_to_load_from_cache as find\n"
        "assert all(isinstance(find(name, 'config.json'), str) for name in sys.argv[1:])"
    )
    environment = {**os.environ, "HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    subprocess.run([sys.executable, "-c", code, *STAND_INS], env=environment, check=True)
