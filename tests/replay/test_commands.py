"""``vllm_thunder demo`` and ``benchmarks/serve_programs.py``, without an engine."""

import argparse
import asyncio
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from tests.replay.fake_server import FakeServer
from tests.replay.test_measure import in_thread
from vllm_thunder.cli import demo
from vllm_thunder.program.errors import ConfigError
from vllm_thunder.replay.arguments import (
    add_client_arguments,
    add_workload_arguments,
    client_options,
    load_workload,
)
from vllm_thunder.replay.driver import replay
from vllm_thunder.replay.records import Replay


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[dict[str, Any]]:
    """The demo's measurements run against the tests' server; what it asked for is kept."""
    asked: list[dict[str, Any]] = []

    def measure(spec, workload, client, *, log, console) -> Replay:
        asked.append({"spec": spec, "workload": workload, "log": log})

        async def run() -> Replay:
            server = FakeServer(fail_at={0: "500"} if "fail" in spec.extra else {})
            async with server.serving():
                options = type(client)(server.url)
                return await replay(workload, options, kind=spec.kind)

        return asyncio.run(run())

    monkeypatch.setattr(demo, "measure", measure)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return asked


def run_demo(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    demo.add_parser(parser.add_subparsers(dest="command"))
    return demo.run(parser.parse_args(["demo", *arguments]))


def test_demo_runs_stock_then_thunder(measured, tmp_path: Path, capsys) -> None:
    assert run_demo("--workload", "smoke", "--out", str(tmp_path / "out")) == 0
    assert [asked["spec"].kind for asked in measured] == ["stock", "thunder"]
    spec = measured[0]["spec"]
    assert (spec.usable_blocks, spec.block_size) == (40, 32)
    assert (Path(spec.model) / "model.safetensors").is_file()
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "replay-stock.json",
        "replay-thunder.json",
        "report.json",
        "report.png",
    }
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert [summary["steps"] for summary in report["summaries"]] == [18, 18]
    assert "thunder" in report["ratios"]
    shown = capsys.readouterr().out
    for text in ("steps per minute", "step latency, p99", "time per program", "recomputed tokens"):
        assert text in shown
    assert "thunder against stock: steps per minute x" in shown


def test_demo_of_one_kind_and_own_sizes(measured, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    arguments = ["--workload", "smoke", "--only", "stock", "--programs", "2", "--blocks", "60"]
    assert run_demo(*arguments, "--model", "mine", "--out", out) == 0
    (asked,) = measured
    assert asked["spec"].model == "mine"
    assert asked["spec"].usable_blocks == 60
    assert len(asked["workload"].programs) == 2


def test_demo_fails_when_a_program_did_not_finish(measured, tmp_path: Path, capsys) -> None:
    arguments = ["--workload", "smoke", "--out", str(tmp_path), "--server-arg=fail"]
    assert run_demo(*arguments) == 1
    assert "HTTP 500" in capsys.readouterr().out


def test_demo_replays_the_committed_trace_unless_told_otherwise(measured, tmp_path: Path) -> None:
    run_demo("--only", "stock", "--out", str(tmp_path), "--trace-max-tool-seconds", "0.01")
    workload = measured[0]["workload"]
    assert (workload.name, len(workload.programs)) == ("agents_small", 24)
    assert workload.pressure == pytest.approx(4, abs=0.05)


def test_demo_cannot_write(measured, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="--out"):
        run_demo("--out", str(tmp_path / "file"))
    assert not measured


def arguments_of(*texts: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_workload_arguments(parser, default="smoke")
    add_client_arguments(parser)
    return parser.parse_args(texts)


def test_none_means_none() -> None:
    texts = ["--program-id-field", "none", "--release-path", "none", "--no-exact-output"]
    options = client_options(arguments_of(*texts), "http://x")
    assert options.program_id_field is None
    assert options.release_path is None
    assert options.final_field is None
    assert not options.exact_output
    assert client_options(arguments_of(), "http://x").release_path == "/programs/release"


def test_a_trace_file_is_cut_as_the_flags_say(tmp_path: Path) -> None:
    steps = [{"new_input_tokens": 100, "output_tokens": 10, "tool": "user", "tool_seconds": 5}] * 4
    record = {"program_id": "a", "source": "s", "shared_prefix_tokens": 0, "steps": steps}
    path = tmp_path / "mine.jsonl"
    path.write_text(json.dumps(record))
    flags = ["--workload", str(path), "--trace-max-steps", "2", "--trace-user-seconds", "0.5"]
    load = load_workload(arguments_of(*flags, "--trace-scale", "2"), seed=7)
    assert (load.name, load.seed, load.steps) == ("mine", 7, 2)
    assert load.programs[0].steps[0].new_input_tokens == 200
    assert load.programs[0].steps[0].tool_seconds == 0.5
    assert load.blocks * 32 >= 1.5 * load.longest_context


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (("--workload", "nothing"), "neither a file nor one of"),
        (("--trace-scale", "2"), "--trace-scale: smoke is a preset"),
        (("--programs", "0"), "--programs: 0 is below 1"),
    ],
)
def test_workload_flags_that_make_no_sense(texts: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_workload(arguments_of(*texts))


def test_serve_programs_against_a_url(repo_root: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    path = repo_root / "benchmarks/serve_programs.py"
    spec = importlib.util.spec_from_file_location("serve_programs", path)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    monkeypatch.setenv("OPENAI_API_KEY", "key")
    server = FakeServer()
    out = tmp_path / "deep" / "run.json"
    flags = ["--workload", "smoke", "--program-id-field", "header:X-Session-ID", "--label", "peer"]
    with in_thread(server):
        assert script.main(["--url", server.url, *flags, "--out", str(out)]) == 0
    assert {headers["X-Session-ID"] for headers in server.headers} == set(server.released)
    assert server.headers[0]["Authorization"] == "Bearer key"
    assert Replay.load(out).kind == "peer"
    assert out.with_suffix(".png").is_file()
    assert "steps per minute" in capsys.readouterr().out
    assert script.main(["--url", "http://127.0.0.1:9", *flags]) == 2
    assert "http://127.0.0.1:9/v1/models" in capsys.readouterr().err
