"""What counts as a difference between two runs, without an engine."""

import json
from math import inf
from pathlib import Path

import pytest

from benchmarks import outputs
from benchmarks.outputs import (
    TIE,
    EngineSpec,
    Outcome,
    Run,
    RunFailed,
    Script,
    ScriptedTurn,
    TurnOutput,
    arrival_order,
    compare,
    run_all,
)


def turn(*positions: dict[int, float], cached: int = 0) -> TurnOutput:
    """A greedy output: at each position the first token is the chosen one."""
    return TurnOutput([next(iter(p)) for p in positions], list(positions), 10, cached)


def run(*turns: TurnOutput) -> Run:
    return Run([list(turns)], 1.0)


REFERENCE = run(turn({1: -0.5, 2: -2.0}, {3: -0.7, 4: -0.70001}, {5: -0.1, 6: -3.0}))
EQUAL = run(turn({1: -0.50001, 2: -2.0}, {3: -0.7, 4: -0.70001}, {5: -0.1, 6: -3.0}))
TIED = run(turn({1: -0.5, 2: -2.0}, {4: -0.70002, 3: -0.70003}, {9: -0.2, 8: -0.3}))
WRONG = run(turn({2: -0.5, 1: -0.6}, {3: -0.7, 4: -0.8}, {5: -0.1, 6: -3.0}))


def test_equal_outputs_only_drift() -> None:
    found = compare(REFERENCE, EQUAL)
    assert (found.turns, found.tokens, found.divergences) == (1, 3, [])
    assert found.largest_drift == pytest.approx(1e-5)
    assert found.largest_gap == 0


def test_a_divergence_is_the_first_differing_position_and_ends_the_comparison() -> None:
    (divergence,) = compare(REFERENCE, TIED).divergences
    assert (divergence.position, divergence.reference_token, divergence.token) == (1, 3, 4)
    assert divergence.gap == pytest.approx(1e-5)


def test_the_gap_is_that_of_the_run_where_the_candidates_are_further_apart() -> None:
    (divergence,) = compare(REFERENCE, WRONG).divergences
    assert divergence.position == 0
    assert divergence.gap == pytest.approx(1.5)


def test_a_token_that_the_other_run_does_not_rank_is_infinitely_far() -> None:
    (divergence,) = compare(REFERENCE, run(turn({7: -0.1, 1: -0.1}, {3: 0}, {5: 0}))).divergences
    assert divergence.gap == inf


def test_runs_of_other_scripts_are_not_compared() -> None:
    with pytest.raises(ValueError, match="not the same turn"):
        compare(REFERENCE, run(turn({1: -0.5, 2: -2.0})))
    with pytest.raises(ValueError, match="zip"):
        compare(REFERENCE, run(*REFERENCE.turns[0], *REFERENCE.turns[0]))


def test_a_tie_that_stock_breaks_too_is_no_failure() -> None:
    assert Outcome(REFERENCE, TIED, TIED).failures() == []
    assert Outcome(REFERENCE, TIED, EQUAL).failures() == []


def test_more_divergences_than_stock_are_a_failure() -> None:
    (failure,) = Outcome(REFERENCE, EQUAL, TIED).failures()
    assert failure == "1 outputs differ from stock vLLM's, 0 of its own in another order"


def test_a_divergence_that_is_no_tie_is_a_failure_whatever_stock_does() -> None:
    (failure,) = Outcome(REFERENCE, WRONG, WRONG).failures()
    assert failure.startswith("not a tie: ")


def test_margin_and_hit_rate() -> None:
    assert REFERENCE.smallest_margin == pytest.approx(1e-5)
    assert run(turn({1: 0, 2: -1}, cached=5), turn({1: 0, 2: -1})).hit_rate == 0.25


def test_outcome_as_json_and_text() -> None:
    values = Outcome(REFERENCE, EQUAL, WRONG).to_json()
    assert values["tie"] == TIE
    assert values["vllm_thunder_against_stock"]["largest_gap"] == pytest.approx(1.5)
    assert values["stock_against_itself"]["divergences"] == []
    assert len(values["failures"]) == 2
    unranked = run(turn({7: -0.1, 1: -0.1}, {3: 0}, {5: 0}))
    far = Outcome(REFERENCE, EQUAL, unranked).to_json()["vllm_thunder_against_stock"]
    assert far["largest_gap"] is None
    assert far["divergences"][0]["gap"] is None
    json.dumps(far, allow_nan=False)
    assert "vllm_thunder: 1 of 1 outputs differ" in str(Outcome(REFERENCE, EQUAL, WRONG))


def test_an_order_runs_every_turn_and_another_seed_is_another_order() -> None:
    scripts = [Script(str(n), [ScriptedTurn([1], 1)] * (n + 1)) for n in range(6)]
    first, second = arrival_order(scripts, 0), arrival_order(scripts, 1)
    for order in (first, second):
        arrivals = [program for arriving in order for program in arriving]
        assert [arrivals.count(n) for n in range(6)] == [1, 2, 3, 4, 5, 6]
        assert all(len(set(arriving)) == len(arriving) > 0 for arriving in order)
    assert first == arrival_order(scripts, 0)
    assert first != second


def run_with_worker(source: str, folder: Path, monkeypatch, timeout: float) -> None:
    worker = folder / "worker.py"
    worker.write_text(source)
    monkeypatch.setattr(outputs, "_WORKER", worker)
    engine = EngineSpec(folder / "model", 8, 32, 1024, 256)
    run_all(engine, [Script("a", [ScriptedTurn([1], 1)])], folder / "runs", timeout=timeout)


def test_an_engine_that_ends_early_says_why(tmp_path, monkeypatch) -> None:
    with pytest.raises(RunFailed, match=r"stock: 1\n.*no such model"):
        run_with_worker("raise SystemExit('no such model')", tmp_path, monkeypatch, 60)


def test_an_engine_that_hangs_is_stopped(tmp_path, monkeypatch) -> None:
    with pytest.raises(RunFailed, match=r"stock: not finished after 0\.5 s"):
        run_with_worker("import time; time.sleep(60)", tmp_path, monkeypatch, 0.5)


def test_an_engine_that_writes_nothing_is_no_result(tmp_path, monkeypatch) -> None:
    with pytest.raises(RunFailed, match="stock: 0"):
        run_with_worker("", tmp_path, monkeypatch, 60)
