"""The comparison's order, its resumption row by row, and what it pools."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
from rich.console import Console

from vllm_thunder.program.errors import ConfigError
from vllm_thunder.replay.records import ProgramRecord, Replay, StepRecord

QUIET = Console(quiet=True)


@pytest.fixture(scope="module")
def compare(repo_root: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("compare", repo_root / "benchmarks/compare.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["compare"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def result(kind: str, seed: int, latency: float = 1.0, blocks: int = 750) -> Replay:
    return Replay(
        kind=kind,
        seconds=10.0,
        programs=[ProgramRecord("a", True, 1, 1, ended_at=latency)],
        steps=[StepRecord("a", 0, True, 0.0, first_token_seconds=0.5, latency_seconds=latency)],
        about={
            "workload": {
                "name": "thrash",
                "seed": seed,
                "programs": 1,
                "blocks": blocks,
                "block_size": 32,
            }
        },
    )


def test_kinds_alternate(compare: ModuleType) -> None:
    rows = compare.plan(["stock", "thunder"], [0, 1, 2])
    assert [(row.kind, row.seed) for row in rows] == [
        ("stock", 0),
        ("thunder", 0),
        ("thunder", 1),
        ("stock", 1),
        ("stock", 2),
        ("thunder", 2),
    ]


def test_a_kind_with_a_limit(compare: ModuleType) -> None:
    row = compare.Row("stock@6", 0)
    assert (row.server_kind, row.most_programs) == ("stock", 6)
    assert compare.Row("stock", 0).most_programs is None


@pytest.mark.parametrize("kind", ["stack", "stock@", "stock@0", "stock@x"])
def test_what_is_not_a_kind_is_refused(compare: ModuleType, kind: str) -> None:
    with pytest.raises(ConfigError, match="--kinds"):
        compare._kinds([kind])


def test_a_row_that_is_there_is_not_run_again(compare: ModuleType, tmp_path: Path) -> None:
    rows = compare.plan(["stock", "thunder"], [0, 1])
    ran: list[str] = []

    def dies_at_the_third(row) -> Replay:
        if len(ran) == 2:
            raise KeyboardInterrupt
        ran.append(f"{row.kind}{row.seed}")
        return result(row.kind, row.seed)

    with pytest.raises(KeyboardInterrupt):
        compare.run_rows(rows, tmp_path / "rows", dies_at_the_third, QUIET)
    assert ran == ["stock0", "thunder0"]

    def goes_on(row) -> Replay:
        ran.append(f"{row.kind}{row.seed}")
        return result(row.kind, row.seed)

    results = compare.run_rows(rows, tmp_path / "rows", goes_on, QUIET)
    assert ran == ["stock0", "thunder0", "thunder1", "stock1"]
    assert [(r.kind, r.about["workload"]["seed"]) for r in results] == [
        ("stock", 0),
        ("thunder", 0),
        ("thunder", 1),
        ("stock", 1),
    ]
    assert compare.run_rows(rows, tmp_path / "rows", goes_on, QUIET) == results
    assert len(ran) == 4


def test_rows_of_another_load_are_not_pooled(compare: ModuleType, tmp_path: Path) -> None:
    rows = compare.plan(["stock", "thunder"], [0])
    result("stock", 0, blocks=100).save(rows[0].path(tmp_path))
    with pytest.raises(ConfigError, match="another workload"):
        compare.run_rows(rows, tmp_path, lambda row: result(row.kind, row.seed), QUIET)


def test_pooled_by_kind(compare: ModuleType) -> None:
    results = [result("stock", 0, 2.0), result("thunder", 0, 1.0), result("stock", 1, 4.0)]
    stock, thunder = compare.pool(results)
    assert (stock.kind, stock.runs, thunder.kind, thunder.runs) == ("stock", 2, "thunder", 1)
    assert stock.step_latency_mean == pytest.approx(3.0)


def test_the_whole_command(
    compare: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    measured: list[tuple[str, int | None, tuple[str, ...]]] = []

    def measure(spec, workload, client, *, log, console, label):
        measured.append((label, client.max_concurrent_programs, spec.extra))
        return result(label, workload.seed, 1.0 if spec.kind == "thunder" else 2.0)

    monkeypatch.setattr(compare, "measure", measure)
    monkeypatch.setattr(compare, "RESULTS", tmp_path / "results")
    monkeypatch.chdir(tmp_path)
    arguments = ["--name", "test", "--kinds", "stock", "thunder", "stock@6", "--seeds", "0", "1"]
    arguments += ["--thunder-arg=--thunder-max-wait=30", "--model", "some"]
    assert compare.main(arguments) == 0
    flag = ("--thunder-max-wait=30",)
    assert measured == [
        ("stock", None, ()),
        ("thunder", None, flag),
        ("stock@6", 6, ()),
        ("stock@6", 6, ()),
        ("thunder", None, flag),
        ("stock", None, ()),
    ]
    assert len(list((tmp_path / "results" / "test").glob("*-seed?.json"))) == 6
    report = json.loads((tmp_path / "results" / "test.json").read_text())
    assert report["ratios"]["thunder"]["step_latency_p99"] == pytest.approx(0.5)
    assert [run["worst_wait"] for run in report["runs"]] == [0.5] * 6
    assert (tmp_path / "results" / "test.png").read_bytes().startswith(b"\x89PNG")
    assert "as a multiple of stock" in capsys.readouterr().out
    assert compare.main(["--name", "x", "--workload", "nothing"]) == 2
    assert "neither a file nor one of" in capsys.readouterr().err
