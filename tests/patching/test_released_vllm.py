"""The installed vLLM, imported for real in new processes."""

import json
from pathlib import Path

from tests.patching.vllm_trees import Site
from vllm_thunder.patching.fork import Fork
from vllm_thunder.patching.installed import find_installation, verify
from vllm_thunder.patching.records import State, sha256
from vllm_thunder.patching.series import load_series

SCRIPT = '''
import vllm_thunder

import inspect
import json
import multiprocessing
import sys


def names(struct):
    """``struct`` was found by importing its module: in a spawned process, while unpickling."""
    module = sys.modules[struct.__module__]
    return [module.__file__, *struct.__struct_fields__[-2:]]


def report():
    import traceback

    import vllm.v1.core.sched.scheduler
    import vllm.v1.engine.async_llm
    import vllm.v1.engine.core as core
    import vllm.v1.engine.core_client
    import vllm.v1.engine.input_processor
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.request import Request

    try:
        core.EngineCore.programs(None, "list")
    except AttributeError as error:
        (frame,) = traceback.extract_tb(error.__traceback__)[1:]
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        spawned = pool.apply(names, (EngineCoreRequest,))
    return {
        "here": names(EngineCoreRequest),
        "spawned": spawned,
        "core": core.__file__,
        "frame": [frame.filename, frame.line],
        "request": list(inspect.signature(Request).parameters)[-1],
        "modules": {
            name: sys.modules[name].__file__ for name in json.loads(sys.argv[1])
            if name in sys.modules
        },
    }


if __name__ == "__main__":
    print(json.dumps(report()))
'''


def test_the_record_is_of_the_installed_vllm() -> None:
    fork = Fork.load()
    installation = verify(fork)
    for record in fork.files:
        content = installation.read(record)
        assert content is not None
        assert record.released == {sha256(content)}, record.path
        assert installation.state(record) is (State.APPLIES if record.patched else State.RELEASED)
        if record.patched:
            assert sha256(fork.patched_content(record, content)) == record.patched


def test_record_and_patches_name_the_same_files(repo_root: Path) -> None:
    fork = Fork.load()
    assert fork.directory == repo_root / "patches" / "0.32.0"
    changed = {path for patch in load_series(fork.directory) for path in patch.paths}
    assert changed == {record.path for record in fork.files if record.patched}


def test_patched_modules_here_and_in_a_spawned_process(site: Site) -> None:
    installation = find_installation()
    assert installation is not None
    modules = Fork.load().modules
    result = site.run(SCRIPT, json.dumps(sorted(modules)))
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout.splitlines()[-1])

    cached = {str(file) for file in site.cached_files()}
    assert report["here"][1:] == ["kv_hints", "program"]
    assert report["spawned"] == report["here"]
    assert report["request"] == "program"
    assert report["frame"] == [report["core"], "return self.scheduler.programs(op, *args)"]
    for name, file in report["modules"].items():
        record = modules[name]
        expected = cached if record.patched else {str(installation.root / record.path)}
        assert file in expected, name
    assert {name for name, record in modules.items() if record.patched} <= set(report["modules"])
