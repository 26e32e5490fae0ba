"""Books of a stock engine: what it would report if it knew programs."""

import time

import pytest

from tests.coordinator.logical_desk import BLOCK, Desk
from vllm_thunder.coordinator.logical.engine import LogicalEngine
from vllm_thunder.program.config import ThunderConfig
from vllm_thunder.program.errors import ThunderError
from vllm_thunder.program.turn import Turn


def test_the_first_report_is_whole_and_the_next_ones_tell_what_changed():
    desk = Desk()
    desk.run("p", 10)
    first = desk.engine.report(desk.now)
    assert first.reset
    assert [told.program_id for told in first.programs] == ["p"]
    assert desk.report() == {}
    desk.run("q", 10)
    assert desk.report().keys() == {"q"}
    whole = desk.engine.report(desk.now, whole=True)
    assert whole.reset
    assert {told.program_id for told in whole.programs} == {"p", "q"}


def test_a_turn_has_a_claim_from_when_it_was_sent_and_residency_when_it_was_computed():
    desk = Desk()
    turn = desk.send("p", 10)
    told = desk.report()["p"]
    assert (told.claimed, told.resident_blocks, told.turns_in_flight) == (True, 0, 1)
    desk.engine.first_byte(turn, 1.0)
    assert desk.report()["p"].resident_blocks == 10
    desk.engine.turn_ended(turn, 20 * BLOCK + 1, 2.0)
    told = desk.report()["p"]
    assert (told.context_tokens, told.resident_blocks) == (20 * BLOCK + 1, 20)
    assert (told.claimed, told.turns_in_flight) == (True, 0)


def test_room_is_what_nobody_claims_and_lapsed_claims_are_room_again():
    desk = Desk()
    desk.report()
    assert desk.memory.room_blocks == pytest.approx(95)  # the low watermark
    turn = desk.send("p", 60)
    desk.report()
    assert desk.memory.room_blocks == pytest.approx(35)
    other = desk.send("busy", 10)
    desk.engine.turn_ended(turn, 60 * BLOCK, desk.now)
    desk.report()
    assert desk.memory.room_blocks < 40
    assert desk.now < desk.engine.deadline < 10.0  # its claim lapses
    desk.now = desk.engine.deadline
    desk.report()
    assert desk.memory.room_blocks == pytest.approx(85)
    assert desk.known["p"].claimed  # nobody needs it yet
    assert desk.engine.deadline > desk.now
    desk.engine.turn_ended(other, None, desk.now)


def test_a_new_claim_takes_the_place_of_one_that_has_lapsed_not_of_a_smaller_one():
    desk = Desk(acting_half_life=100.0)
    desk.run("lapsed", 60)
    desk.now = 6.0
    desk.run("fresh", 20)
    desk.report()
    desk.send("new", 50)
    desk.report()
    assert not desk.known["lapsed"].claimed
    assert desk.known["fresh"].claimed
    assert desk.known["new"].claimed


def test_claims_that_outgrow_memory_are_shed_the_cheapest_first():
    desk = Desk()
    for program, blocks in (("large", 50), ("small", 30)):
        desk.run(program, blocks)
    desk.send("new", 40)
    desk.report()
    assert not desk.known["small"].claimed
    assert desk.known["large"].claimed
    assert desk.engine.table.claimed <= 100


def test_what_runs_keeps_its_claim_however_much_is_sent():
    desk = Desk()
    for n in range(5):
        desk.send(f"p{n}", 40)
    desk.report()
    assert all(desk.known[f"p{n}"].claimed for n in range(5))
    assert desk.memory.room_blocks < 0
    for n in range(5):
        desk.engine.turn_ended(f"t{n + 1}", 40 * BLOCK, desk.now)
    desk.report()
    assert desk.engine.table.claimed <= 100
    assert sum(told.resident_blocks for told in desk.known.values()) <= 100


def test_residency_shrinks_as_others_are_computed_and_with_it_goes_the_claim():
    desk = Desk()
    desk.run("old", 40)
    desk.report()
    desk.engine.request_sent("r1", 80 * BLOCK, desk.now)
    desk.engine.turn_ended("r1", 80 * BLOCK, desk.now)
    told = desk.report()["old"]
    assert (told.resident_blocks, told.claimed) == (20, True)
    desk.engine.request_sent("r2", 100 * BLOCK, desk.now)
    desk.engine.turn_ended("r2", None, desk.now)
    told = desk.report()["old"]
    assert (told.resident_blocks, told.claimed) == (0, False)
    assert desk.memory.room_blocks == pytest.approx(95)


def test_requests_without_a_program_take_room_while_they_run():
    desk = Desk()
    desk.run("p", 40)
    desk.engine.request_sent("r", 100 * BLOCK, desk.now)
    desk.report()
    assert desk.memory.room_blocks <= 0
    assert not desk.known["p"].claimed
    desk.engine.turn_ended("r", 100 * BLOCK, desk.now)
    desk.report()
    assert desk.memory.room_blocks == pytest.approx(95)


def test_a_turn_that_failed_before_its_first_byte_leaves_what_was_there():
    desk = Desk()
    desk.run("p", 10)
    turn = desk.send("p", 30)
    desk.engine.turn_ended(turn, None, desk.now)
    desk.report()
    assert desk.known["p"].resident_blocks == 10
    assert desk.known["p"].context_tokens == 10 * BLOCK + 1
    turn = desk.send("p", 30)
    desk.engine.first_byte(turn, desk.now)
    desk.engine.turn_ended(turn, None, desk.now)  # a client that read enough: it is computed
    desk.report()
    assert desk.known["p"].resident_blocks == 29


@pytest.mark.parametrize("final", [True, False])
def test_a_program_that_ended_is_told_as_gone_once_its_turns_have(final):
    desk = Desk()
    turn = desk.send("p", 10, final=final)
    if not final:
        desk.engine.release("p")
    assert desk.report()["p"].turns_in_flight == 1
    desk.engine.turn_ended(turn, 10 * BLOCK, desk.now)
    assert desk.report() == {"p": None}
    assert desk.engine.table.released == 1
    desk.engine.release("p")
    assert desk.report() == {}
    desk.run("p", 10)
    assert desk.report()["p"].context_tokens == 10 * BLOCK + 1


def test_programs_expire_at_the_deadline_and_their_blocks_are_reused():
    desk = Desk(retention=10.0)
    desk.run("p", 100)
    desk.report()
    while desk.known:
        assert desk.now < desk.engine.deadline <= 10.0
        desk.now = desk.engine.deadline
        desk.report()
    assert desk.now == 10.0
    assert desk.engine.table.expired == 1
    desk.run("q", 100)
    desk.report()
    assert desk.known["q"].resident_blocks == 100


def test_ids_that_change_on_every_call_take_bounded_memory():
    desk = Desk(max_programs=50)
    for n in range(10_000):
        desk.run(f"p{n}", 2)
        if n % 100 == 0:
            desk.report()
    desk.report()
    assert len(desk.known) == len(desk.engine.table) == 50
    assert desk.engine.table.evicted == 9_950


def test_a_turn_that_fans_out_ends_with_its_one_answer():
    desk = Desk()
    desk.run("p", 10, fans_out=True)
    assert desk.report()["p"].turns_in_flight == 0


def test_overlapping_turns_end_one_by_one():
    desk = Desk()
    turns = [desk.send("p", 10) for _ in range(8)]
    for ended, turn in enumerate(turns):
        assert desk.report()["p"].turns_in_flight == 8 - ended
        desk.engine.turn_ended(turn, 10 * BLOCK + 1, desk.now)
    told = desk.report()["p"]
    assert (told.turns_in_flight, told.resident_blocks) == (0, 10)
    assert desk.engine.cache.free_blocks == 100


def test_a_side_call_leaves_the_context_and_two_in_a_row_replace_it():
    desk = Desk()
    desk.run("p", 40)
    desk.run("p", 10)
    desk.report()
    assert desk.known["p"].context_tokens == 40 * BLOCK + 1
    assert desk.known["p"].resident_blocks == 40
    desk.run("p", 41)
    desk.run("p", 10)
    desk.report()
    assert desk.known["p"].context_tokens == 41 * BLOCK + 1
    desk.run("p", 11)
    desk.report()
    assert desk.known["p"].context_tokens == 11 * BLOCK + 1
    assert desk.known["p"].resident_blocks == 11


def test_an_estimate_just_below_the_context_is_not_taken_for_a_shorter_one():
    desk = Desk()
    desk.run("p", 40)
    desk.engine.turn_sent(Turn("p", "next"), 37 * BLOCK, desk.now)
    assert desk.report()["p"].resident_blocks == 40
    desk.engine.turn_ended("next", 42 * BLOCK + 1, desk.now)
    told = desk.report()["p"]
    assert (told.context_tokens, told.resident_blocks) == (42 * BLOCK + 1, 42)
    assert desk.engine.cache.free_blocks == 100


def test_one_offs_never_change_the_context():
    desk = Desk()
    desk.run("p", 40)
    for _ in range(3):
        desk.run("p", 40, one_off=True)
    desk.report()
    assert desk.known["p"].context_tokens == 40 * BLOCK + 1


def test_an_emptied_cache_takes_residency_and_programs_go_on():
    desk = Desk()
    desk.run("p", 40)
    desk.report()
    desk.engine.cache_reset()
    told = desk.report()["p"]
    assert (told.resident_blocks, told.claimed) == (0, False)
    desk.run("p", 41)
    assert desk.report()["p"].resident_blocks == 41


def test_without_a_prefix_cache_nothing_is_ever_resident():
    desk = Desk(keeps_prefixes=False)
    desk.run("p", 40)
    assert desk.report()["p"].resident_blocks == 0


def test_seats_are_those_told_and_none_while_requests_wait_in_the_engine():
    desk = Desk(seats=2)
    desk.report()
    assert desk.memory.free_seats == 2
    desk.send("p", 1)
    desk.engine.request_sent("r", BLOCK, desk.now)
    desk.send("q", 1)
    desk.report()
    assert desk.memory.free_seats == 0
    desk = Desk()
    desk.report()
    assert desk.memory.free_seats == 100
    desk.engine.queue_told(3)
    desk.report()
    assert desk.memory.free_seats == 0
    desk.engine.queue_told(0)
    desk.report()
    assert desk.memory.free_seats == 100


def test_what_is_told_twice_or_of_unknown_turns():
    desk = Desk()
    turn = desk.send("p", 10)
    with pytest.raises(ThunderError, match=turn):
        desk.engine.turn_sent(Turn("other", turn), 10, desk.now)
    with pytest.raises(ThunderError, match=turn):
        desk.engine.request_sent(turn, 10, desk.now)
    assert desk.report().keys() == {"p"}
    desk.engine.first_byte("unknown", desk.now)
    desk.engine.turn_ended("unknown", 10, desk.now)
    assert desk.report() == {}


@pytest.mark.parametrize("wrong", ["capacity_blocks", "block_size", "seats"])
def test_sizes_are_at_least_one(wrong):
    sizes = {"capacity_blocks": 1, "block_size": 1, "seats": 1, wrong: 0}
    with pytest.raises(ThunderError, match=wrong):
        LogicalEngine(ThunderConfig(), **sizes)


def test_tools_are_learned_by_name():
    desk = Desk()
    desk.run("p", 40)
    desk.engine.tool_began("p", "shell")
    desk.engine.tool_began("unknown", "shell")
    assert desk.engine.table.get("p").tool == "shell"


def test_the_cost_of_an_event_does_not_grow_with_the_programs():
    spent = {}
    for programs in (200, 4_000):
        desk = Desk(blocks=100_000)
        for n in range(programs):
            desk.run(f"p{n}", 10)
        desk.report()
        began = time.process_time()
        for n in range(200):
            desk.run(f"p{n}", 10)
            desk.engine.report(desk.now)
        spent[programs] = time.process_time() - began
    assert spent[4_000] < 5 * spent[200] + 0.01
