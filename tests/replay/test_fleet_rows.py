"""The fleet benchmark by itself: the pace of its engines, its rows, bars and stored runs."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.fleet import __main__ as fleet
from benchmarks.fleet.pace import Pace, Scheduled, Step, Words, read_step
from benchmarks.fleet.routers import One, PrefixHash, Sticky
from benchmarks.fleet.rows import ROWS
from benchmarks.fleet.session import Measurement, Session
from benchmarks.fleet.watch import (
    Imbalance,
)
from benchmarks.suite.bars import ReplayBar
from tests.replay.test_fleet import sample
from vllm_thunder.program.errors import ConfigError
from vllm_thunder.replay.records import ProgramRecord, Replay, StepRecord
from vllm_thunder.replay.tiny_model import TinyModel, build_tiny_model, default_cache

SEEDS = range(5)


# -- the pace -----------------------------------------------------------------------------


def test_a_step_is_its_prompt_tokens_and_its_decodes() -> None:
    chunk = Scheduled(known=1000, computed=100, tokens=300, answered=0)
    rest = Scheduled(known=1000, computed=990, tokens=10, answered=0)
    decode = Scheduled(known=1001, computed=1000, tokens=1, answered=1)
    assert [request.samples for request in (chunk, rest, decode)] == [False, True, True]
    step = read_step([chunk, rest, decode, decode])
    assert step == Step(310, sum(range(100, 400)) + sum(range(990, 1000)), 2)
    pace = Pace(0.01, 1e-4, 1e-7, 1e-3)
    assert pace.seconds(step) == pytest.approx(0.01 + 0.031 + 1e-7 * step.positions + 0.002)


def test_what_a_preemption_lost_is_prompt_again() -> None:
    again = Scheduled(known=1010, computed=0, tokens=1010, answered=10)
    assert read_step([again]) == Step(1010, sum(range(1010)), 0)
    last_of_a_prompt = Scheduled(known=33, computed=32, tokens=1, answered=0)
    assert read_step([last_of_a_prompt]) == Step(1, 32, 0)


@pytest.mark.parametrize("wrong", [-1.0, 60.0, "fast"])
def test_a_pace_is_seconds(wrong: Any) -> None:
    with pytest.raises(ValueError, match="token_seconds"):
        Pace(token_seconds=wrong)


def test_words_follow_from_the_context_and_come_back_as_they_were() -> None:
    from tokenizers import Tokenizer

    model = build_tiny_model(default_cache(), TinyModel())
    words = Words(model)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    prompt = list(range(500))
    answer = [words.token(words.key(prompt), position) for position in range(500, 540)]
    assert answer == [words.token(words.key(list(prompt)), p) for p in range(500, 540)]
    assert len(set(answer)) > 30
    assert words.token(words.key([*prompt, 1]), 501) != answer[1]
    said = f"<|im_start|>assistant\n{tokenizer.decode(answer)}<|im_end|>\n"
    ids = tokenizer.encode(said).ids
    assert any(ids[i : i + 40] == answer for i in range(len(ids)))


def test_a_model_without_words_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tokenizer.json is missing"):
        Words(tmp_path)


# -- rows and runs ------------------------------------------------------------------------


def test_bars_name_contenders_of_their_row() -> None:
    for row in ROWS:
        labels = {contender.label for contender in row.contenders}
        assert row.bars
        for bar in row.bars:
            if isinstance(bar, ReplayBar):
                assert {bar.of, bar.over or bar.of} <= labels


def a_run(label: str, seconds: float, imbalance: dict[str, Any] | None, moves: int = 0) -> Replay:
    about: dict[str, Any] = {"moves": moves}
    if imbalance is not None:
        about["imbalance"] = imbalance
    steps = [StepRecord("p", 0, True, 0.0, latency_seconds=1.0)] * 10
    return Replay(
        label,
        seconds=seconds,
        programs=[ProgramRecord("p", True, 10, 10)],
        steps=steps,
        about={"fleet": about, "workload": {"seed": 0}},
    )


def test_facts_are_named_by_contender() -> None:
    even, uneven = (Imbalance.of([sample(x, 1)]).to_json() for x in (0.05, 0.4))
    runs = {
        "coordinator": [a_run("coordinator", 10, even)],
        "sticky": [a_run("sticky", 20, uneven)],
        "stock-sticky": [a_run("stock-sticky", 20, None)],
    }
    facts = fleet.facts_of(runs)
    assert facts == {
        "imbalance_points": pytest.approx(5.0),
        "imbalance_points_sticky": pytest.approx(40.0),
    }


class Counting(Session):
    """Takes no run: counts what it is asked to take."""

    def _take(self, measurement: Measurement) -> Replay:
        taken.append(measurement)
        result = a_run(
            measurement.contender.label, 10, Imbalance.of([sample(0.02, 1)]).to_json(), 3
        )
        result.about["workload"]["seed"] = measurement.seed
        return result


taken: list[Measurement] = []


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> list[Measurement]:
    taken.clear()
    monkeypatch.setattr(fleet, "Session", Counting)
    monkeypatch.setattr(fleet, "plot_replays", lambda *_: None)
    return taken


def test_contenders_alternate_and_nothing_is_measured_twice(
    counting: list[Measurement], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["real", "--work", str(tmp_path / "work"), "--out", str(tmp_path / "out")]
    argv += ["--seeds", "0", "1", "2"]
    assert fleet.main(argv) == 0
    order = [(m.contender.label, m.seed) for m in counting]
    assert order == [
        ("coordinator", 0),
        ("sticky", 0),
        ("sticky", 1),
        ("coordinator", 1),
        ("coordinator", 2),
        ("sticky", 2),
    ]
    report = json.loads((tmp_path / "out" / "fleet_real.json").read_text())
    assert report["facts"]["imbalance_points"] == pytest.approx(2.0)
    assert [bar["met"] for bar in report["bars"]] == [False, True]  # nobody told of recomputing
    assert fleet.main(argv) == 0
    assert len(counting) == 6
    assert fleet.main([*argv, "--fresh", "--seeds", "4"]) == 0
    assert [m.seed for m in counting[6:]] == [4, 4]
    assert "MISSED" in capsys.readouterr().out


def test_a_run_of_another_load_is_not_taken_for_this_one(
    counting: list[Measurement], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["paced", "--seeds", "0", "--work", str(tmp_path / "w"), "--out", str(tmp_path / "o")]
    assert fleet.main([*argv, "--steps", "2"]) == 0
    assert fleet.main(argv) == 2
    assert "was measured otherwise (load)" in capsys.readouterr().err


def test_the_plan_counts_what_is_left(
    counting: list[Measurement], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["real", "--work", str(tmp_path / "w"), "--out", str(tmp_path / "o")]
    assert fleet.main([*argv, "--seeds", "0"]) == 0
    capsys.readouterr()
    assert fleet.main([*argv, "--plan"]) == 0
    cells = [cell.strip() for cell in capsys.readouterr().out.splitlines()[-2].split("│")]
    assert cells[1:4] == ["real", "4", "2"]


def test_a_row_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        fleet.main(["thrash"])
    assert left.value.code == 2
    assert "is not a row" in capsys.readouterr().err


def test_stored_runs_of_other_arguments_are_refused(tmp_path: Path) -> None:
    row = ROWS[0]
    measurement = Measurement(row.setup, row.contenders[0], 0)
    console = fleet.Console(quiet=True)
    taken.clear()
    with Counting(tmp_path, [measurement], console) as session:
        session.run(measurement)
    with (
        Counting(
            tmp_path, [measurement], console, coordinator_arguments=("--stickiness", "0")
        ) as other,
        pytest.raises(ConfigError, match="coordinator_arguments"),
    ):
        other.run(measurement)


def test_every_contender_has_its_router() -> None:
    routers = {c.label: type(c.router) for row in ROWS for c in row.contenders}
    assert routers == {
        "coordinator": One,
        "sticky": Sticky,
        "prefix-hash": PrefixHash,
        "stock-sticky": Sticky,
        "stock-prefix-hash": PrefixHash,
    }
    assert all(
        (c.kind == "stock") == c.label.startswith("stock-") for row in ROWS for c in row.contenders
    )
