from tests.engine.harness import text


def test_one_turn(make_engine):
    engine = make_engine()
    out = engine.turn(text(1, 40), "p")
    assert len(out) == 41
