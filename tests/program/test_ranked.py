from hypothesis import given
from hypothesis import strategies as st

from vllm_thunder.program.ranked import Ranked

ITEMS = st.integers(0, 9)
STEPS = st.lists(
    st.tuples(st.sampled_from(["put", "discard"]), ITEMS, st.integers(-5, 5)), max_size=60
)


@given(STEPS, st.integers(-6, 6))
def test_it_is_a_sorted_dictionary(steps, probe):
    ranked, model = Ranked(), {}
    for step, item, rank in steps:
        if step == "discard":
            ranked.discard(item)
            model.pop(item, None)
            continue
        if model.get(item) != rank:
            model.pop(item, None)  # moved: it comes after others of its rank
        ranked.put(item, rank)
        model[item] = rank
    expected = sorted(model, key=model.__getitem__)  # stable: equal ranks as they came
    assert list(ranked) == expected
    assert list(ranked.items()) == [(model[item], item) for item in expected]
    assert len(ranked) == len(model)
    assert [ranked.position(item) for item in expected] == list(range(len(expected)))
    assert all(ranked.rank_of(item) == model[item] for item in expected)
    assert [item in ranked for item in range(10)] == [item in model for item in range(10)]
    assert ranked.first_rank(None) == min(model.values(), default=None)
    assert list(ranked.until(probe)) == [item for item in expected if model[item] <= probe]
    assert ranked.next_rank(probe, None) == min(
        (rank for rank in model.values() if rank > probe), default=None
    )
