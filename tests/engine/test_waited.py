"""Turns that have waited in front of the engine."""

import pytest

from tests.engine.harness import BLOCK, text


def crowded_out(engine, name, **turn):
    return engine.send(text(sum(map(ord, name)), 30 * BLOCK), name, **turn)


def waits(engine, name):
    return engine.scheduler.status.get(name)["wait"]


def test_a_turn_that_has_waited_elsewhere_for_half_of_max_wait_is_due_at_once(make_engine):
    engine = make_engine(blocks=64, max_wait=20.0)
    engine.send(text(1, 50 * BLOCK), "busy", max_tokens=100)
    engine.step()
    late = crowded_out(engine, "late", waited_seconds=9.9)
    engine.step()
    assert "due" not in waits(engine, "late")["reason"]
    assert not engine.program("busy").yields
    engine.abort(late)
    due = crowded_out(engine, "due", waited_seconds=10.0)
    engine.step()
    assert "is due" in waits(engine, "due")["reason"]
    assert engine.program("busy").yields
    assert engine.scheduler.status.get("due")["waited_seconds"] == pytest.approx(10.0)
    engine.run(due)
    assert engine.program("due").longest_wait >= 10.0
    assert engine.scheduler.status.longest_wait >= 10.0


def test_order_counts_the_time_in_front_of_the_engine(make_engine):
    engine = make_engine(blocks=64)
    engine.send(text(1, 60 * BLOCK), "busy", max_tokens=200)
    engine.step()
    for name, waited in (("first", 0.0), ("second", 3.0), ("third", 1.0)):
        crowded_out(engine, name, waited_seconds=waited)
        engine.step(0.01)
    assert [waits(engine, name)["position"] for name in ("second", "third", "first")] == [0, 1, 2]
    engine.abort(*engine.scheduler.requests.values())
    engine.step()


def test_a_turn_that_is_admitted_at_once_has_not_waited_here(make_engine):
    engine = make_engine(blocks=64)
    engine.turn(text(1, 40), "p")
    engine.turn(text(1, 60), "p", waited_seconds=50.0)
    assert engine.program("p").longest_wait < 1.0


def test_a_turn_that_counts_as_one_to_come_goes_last_but_an_idle_engine_runs_it(make_engine):
    engine = make_engine(blocks=64)
    busy = engine.send(text(1, 60 * BLOCK), "busy", max_tokens=200)
    engine.step()
    late = crowded_out(engine, "late", waited_seconds=-30.0)
    engine.step(0.01)
    crowded_out(engine, "behind it")
    engine.step()
    assert [waits(engine, name)["position"] for name in ("behind it", "late")] == [0, 1]
    assert engine.scheduler.status.get("late")["waited_seconds"] == 0.0
    engine.abort(*(r for r in engine.scheduler.requests.values() if r is not late))
    fill = engine.send(text(1, 60 * BLOCK), "busy", max_tokens=2)
    engine.run(fill)
    began = engine.now
    while not late.is_finished():
        engine.step(0.05)
        assert engine.now - began < 1.0
    assert engine.scheduler.status.metrics()["histograms"]["wait_seconds"]["sum"] >= 0.0
    assert busy.is_finished()
