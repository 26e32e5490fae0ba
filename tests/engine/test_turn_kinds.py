"""Turns that are not the next one of a growing context, and turns that memory pushes out."""

import logging
from unittest.mock import MagicMock

import pytest

from tests.engine.following import Follower
from tests.engine.harness import BLOCK, text
from vllm_thunder.program.errors import ThunderError

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def cached(engine, context):
    """Tokens of a context that a turn would find in the prefix cache."""
    request = engine.request(context)
    return engine.scheduler.kv_cache_manager.get_computed_blocks(request)[1]


def test_a_one_off_leaves_its_programs_context_and_goes_first(make_engine):
    engine = make_engine(blocks=64)
    context = engine.turn(text(1, 10 * BLOCK), "p")
    engine.turn(text(2, 20 * BLOCK), "p", one_off=True)
    program = engine.program("p")
    assert program.context_tokens == len(context)
    assert program.unique_blocks == 10
    assert cached(engine, text(2, 20 * BLOCK)) > 0  # until somebody needs the blocks
    engine.turn(text(3, 44 * BLOCK), "q")
    assert cached(engine, text(2, 20 * BLOCK)) == 0
    assert cached(engine, context) == 10 * BLOCK


def test_a_one_off_does_not_spend_what_others_hold(make_engine):
    engine = make_engine(blocks=64)
    context = engine.turn(text(1, 10 * BLOCK), "p")
    engine.turn(context[: 8 * BLOCK] + text(2, 4 * BLOCK), "q", one_off=True)
    assert engine.program("p").unique_blocks == 10
    engine.turn(text(3, 48 * BLOCK), "r")
    assert cached(engine, context) == 10 * BLOCK


def test_an_aborted_one_off_leaves_nothing(make_engine):
    engine = make_engine(blocks=64)
    request = engine.send(text(1, 20 * BLOCK), "p", one_off=True, max_tokens=30)
    engine.step()
    engine.abort(request)
    engine.scheduler.release_program("p")
    assert engine.free_blocks == 64
    assert len(engine.scheduler.table) == 0


def test_a_short_side_call_keeps_the_long_context(make_engine):
    """A title for the conversation, a summary: same id, other text."""
    engine = make_engine(blocks=64)
    context = engine.turn(text(1, 20 * BLOCK), "p")
    engine.turn(text(2, 6 * BLOCK), "p")
    program = engine.program("p")
    assert program.context_tokens == len(context)
    assert program.unique_blocks == 20
    engine.turn(context, "p")
    assert engine.program("p").unique_blocks == 20


def test_two_short_calls_in_a_row_are_a_new_context(make_engine):
    """The client compacted its history."""
    engine = make_engine(blocks=64)
    engine.turn(text(1, 20 * BLOCK), "p")
    engine.turn(text(2, 6 * BLOCK), "p")
    context = engine.turn(text(2, 7 * BLOCK), "p")
    program = engine.program("p")
    assert program.context_tokens == len(context)
    assert program.unique_blocks == 7


def test_the_prompt_that_is_told_is_the_contexts_and_the_last_turns(make_engine):
    """A coordinator learns from it how many tokens the body of that turn was."""
    engine = make_engine(blocks=64)
    follower = Follower(engine)

    def told():
        follower.catch_up()
        return follower.programs["p"].prompt_tokens

    engine.turn(text(1, 5 * BLOCK), "p", one_off=True)
    assert told() == 0
    context = engine.turn(text(2, 20 * BLOCK), "p", max_tokens=40)
    assert told() == 20 * BLOCK
    engine.turn(text(3, 6 * BLOCK), "p", one_off=True)
    assert told() == 0
    prompt = context + text(4, 40)
    engine.turn(prompt, "p", max_tokens=30)
    assert told() == len(prompt)
    engine.turn(text(5, 6 * BLOCK), "p")  # a side call, as far as anybody can know
    assert told() == 0
    engine.turn(text(5, 7 * BLOCK), "p")
    assert told() == 7 * BLOCK
    engine.abort(engine.send(text(5, 9 * BLOCK), "p"))
    assert told() == 0


def test_a_context_that_changes_at_its_head_is_counted(make_engine):
    engine = make_engine(blocks=64)
    for turn in range(5):
        engine.turn(text(turn, 12 * BLOCK), "p")
    assert engine.program("p").hit_rate == 0.0
    assert engine.program("p").unique_blocks == 12
    counters = engine.scheduler.programs("metrics")["counters"]
    assert counters["program_hit_rate_collapses"] == 4


def test_a_context_that_grows_has_a_high_hit_rate(make_engine):
    engine = make_engine(blocks=64)
    context = engine.turn(text(1, 12 * BLOCK), "p")
    assert engine.program("p").hit_rate is None
    for turn in range(5):
        context = engine.turn(context + text(turn, 20), "p")
    assert engine.scheduler.status.get("p")["hit_rate"] > 0.8
    counters = engine.scheduler.programs("metrics")["counters"]
    assert counters["program_hit_rate_collapses"] == 0


def test_the_turn_that_is_cheapest_to_recompute_is_preempted(make_engine):
    """Decoding outgrows memory: vLLM takes the last in its list, whatever that costs."""
    engine = make_engine(blocks=64, high_watermark=1.0, low_watermark=1.0)
    small = engine.send(text(1, 10 * BLOCK), "small", max_tokens=300)
    engine.step()
    large = engine.send(text(2, 40 * BLOCK), "large", max_tokens=300)
    for _ in range(600):
        engine.step(0.01)
        if small.num_preemptions or large.num_preemptions:
            break
    assert (small.num_preemptions, large.num_preemptions) == (1, 0)
    assert engine.scheduler.running == [large]
    engine.run(large, small, steps=2000)


def test_without_programs_the_victim_is_vllms(make_engine):
    engine = make_engine(blocks=64)
    small = engine.send(text(1, 10 * BLOCK), max_tokens=300)
    engine.step()
    large = engine.send(text(2, 40 * BLOCK), max_tokens=300)
    for _ in range(600):
        engine.step(0.01)
        if small.num_preemptions or large.num_preemptions:
            break
    assert (small.num_preemptions, large.num_preemptions) == (0, 1)


@pytest.mark.parametrize("seed", range(4))
def test_turns_that_outgrow_memory_all_end(make_engine, seed):
    engine = make_engine(blocks=40)
    requests = [
        engine.send(text(seed * 10 + i, (3 + 2 * i) * BLOCK), f"p{i}", max_tokens=150 + 20 * i)
        for i in range(6)
    ]
    engine.run(*requests, steps=6000)
    assert all(len(r.output_token_ids) == 150 + 20 * i for i, r in enumerate(requests))


def test_the_tool_that_runs_is_known(make_engine):
    engine = make_engine()
    engine.turn(text(1, 50), "p")
    scheduler = engine.scheduler
    assert scheduler.programs("tool", "p", "pytest") == {"program_id": "p", "known": True}
    assert scheduler.status.get("p")["tool"] == "pytest"
    assert scheduler.programs("tool", "q", "pytest") == {"program_id": "q", "known": False}
    assert "q" not in scheduler.table


def test_pages_of_programs(make_engine):
    engine = make_engine()
    for name in ("c", "a", "d", "b"):
        engine.turn(text(1, 20), name)

    def page(*args):
        return [record["program_id"] for record in engine.scheduler.programs("list", *args)]

    assert page() == ["a", "b", "c", "d"]
    assert page("", "2") == ["a", "b"]
    engine.scheduler.release_program("b")
    assert page("b", "2") == ["c", "d"]
    with pytest.raises(ThunderError, match="limit"):
        page("", "two")


def test_decisions_are_logged_one_line_each_at_debug_level(make_engine, caplog):
    engine = make_engine(blocks=64)
    logger = logging.getLogger("vllm.vllm_thunder.engine.status")  # under vLLM's: its handlers

    def said():
        return [r.getMessage() for r in caplog.records if r.name == logger.name]

    logger.addHandler(caplog.handler)
    try:
        with caplog.at_level(logging.INFO, logger=logger.name):
            engine.turn(text(1, 10 * BLOCK), "silent")
        assert not said()
        with caplog.at_level(logging.DEBUG, logger=logger.name):
            engine.turn(text(2, 10 * BLOCK), "told")
        (line,) = {line for line in said() if "'told'" in line}
    finally:
        logger.removeHandler(caplog.handler)
    assert line.startswith("restore Program('told'")
    assert "\n" not in line


def test_transferred_kv_is_never_held(make_engine):
    engine = make_engine(blocks=64)
    engine.send(text(1, 60 * BLOCK), "blocker", max_tokens=30)
    engine.step()
    params = {"extra_args": {"kv_transfer_params": {"do_remote_decode": True}}}
    engine.scheduler.connector = MagicMock()
    engine.scheduler.connector.request_finished.return_value = (False, None)
    request = engine.send(text(2, 30 * BLOCK), "p", sampling=params)
    assert request in engine.scheduler.waiting
    engine.abort(request)
    engine.scheduler.connector = None


def test_without_a_connector_nothing_is_transferred_and_the_field_jumps_no_queue(make_engine):
    engine = make_engine(blocks=64)
    engine.send(text(1, 60 * BLOCK), "blocker", max_tokens=30)
    engine.step()
    params = {"extra_args": {"kv_transfer_params": {"x": 1}}}
    request = engine.send(text(2, 30 * BLOCK), "p", sampling=params)
    assert request.request_id in engine.scheduler._held
    engine.run(request)
