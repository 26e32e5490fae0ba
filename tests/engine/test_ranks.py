"""Where the turns of a program go when a server has several data-parallel ranks."""

import random

from vllm_thunder.engine.ranks import RankBooks
from vllm_thunder.program.report import EngineReport, MemoryReport, ProgramReport

BLOCK = 16


def report(room, *programs, gone=(), reset=False, complete=True):
    memory = MemoryReport(1000, room, 64, [(BLOCK, None)])
    return EngineReport("c", reset, complete, memory, list(programs), list(gone))


def there(program_id, blocks=10, turns=0, claimed=False):
    return ProgramReport(program_id, blocks * BLOCK, blocks, claimed, turns)


def books(*rooms):
    made = RankBooks(len(rooms))
    for rank, room in enumerate(rooms):
        made.reported(rank, report(room))
    return made


def test_nothing_is_chosen_before_all_ranks_have_reported():
    made = RankBooks(2)
    made.reported(0, report(100))
    assert made.choose("p", 100) is None
    made.reported(1, report(50))
    assert made.choose("p", 100) == 0


def test_what_was_sent_counts_before_it_is_reported():
    made = books(100, 90)
    assert [made.choose(f"p{n}", 50 * BLOCK) for n in range(4)] == [0, 1, 0, 1]


def test_a_program_stays_while_its_kv_is_there_and_moves_when_it_is_not():
    made = books(100, 90)
    assert made.choose("p", 10 * BLOCK) == 0
    made.reported(0, report(-50, there("p", turns=1)))
    assert made.choose("p", 10 * BLOCK) == 0
    made.reported(0, report(-50, there("p", blocks=0)))
    assert made.choose("p", 10 * BLOCK) == 1


def test_a_client_that_names_a_rank_takes_its_program_along():
    made = books(100, 100)
    made.reported(0, report(100, there("p")))
    made.reported(1, report(100, there("p", turns=1)))
    assert made.choose("p", BLOCK) == 1
    made.reported(0, report(100, gone=["p"]))  # the other rank's word is of no use any more
    assert made.choose("p", BLOCK) == 1


def test_a_rank_that_tells_from_the_beginning_has_forgotten_what_it_does_not_tell():
    made = books(10, 0)
    made.reported(0, report(10, there("kept"), there("lost")))
    made.reported(0, report(10, there("kept"), reset=True, complete=False))
    made.reported(0, report(10))
    made.reported(1, report(50))
    assert made.choose("kept", BLOCK) == 0
    assert made.choose("lost", BLOCK) == 1


def test_what_was_sent_survives_a_report_from_before_it():
    made = books(100, 90)
    assert made.choose("p", BLOCK) == 0
    made.reported(0, report(10, reset=True))
    assert made.choose("p", BLOCK) == 0


def test_while_a_rank_is_lost_vllm_balances_new_programs():
    made = books(100, 90)
    made.reported(1, report(90, there("p")))
    made.lost(0)
    assert made.choose("q", BLOCK) is None
    assert made.choose("p", BLOCK) == 1


def test_random_histories_leave_nothing_behind():
    chance = random.Random(1)
    made = books(100, 100, 100)
    for _ in range(5000):
        name, rank = f"p{chance.randrange(30)}", chance.randrange(3)
        action = chance.randrange(4)
        if action == 0:
            assert made.choose(name, chance.randrange(1000)) in range(3)
        elif action == 1:
            told = there(name, chance.randrange(3), chance.randrange(2), chance.random() < 0.3)
            made.reported(rank, report(chance.randrange(-10, 100), told))
        elif action == 2:
            made.reported(rank, report(50, gone=[name]))
        else:
            made.reported(rank, report(50, reset=True, complete=chance.random() < 0.5))
    for rank in range(3):
        made.reported(rank, report(100, gone=[f"p{n}" for n in range(30)]))
    assert not made._homes
    assert not any(made._at)
    assert not any(made._sent)
