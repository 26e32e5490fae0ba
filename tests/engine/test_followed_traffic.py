"""Random traffic on engines that are followed: in the end everybody knows what there is."""

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule, run_state_machine_as_test
from vllm.v1.core.sched.interface import PauseState

from tests.engine.following import Follower
from tests.engine.traffic import Traffic, Variant
from vllm_thunder.engine import feed


class FollowedTraffic(Traffic):
    """Two who follow, ask whenever they like and sometimes go away."""

    def __init__(self, model, variant):
        super().__init__(model, variant)
        self.scheduler.table.changes._most_gone = 3
        self.followers = [Follower(self.engine) for _ in range(2)]

    @rule(who=st.integers(0, 1), wait=st.sampled_from([0.0, 0.3, 5.0]))
    def follow(self, who, wait):
        follower = self.followers[who]
        if follower.watch is None or follower.told():
            follower.ask(wait)

    @rule(who=st.integers(0, 1))
    def look_closely(self, who):
        follower = self.followers[who]
        follower.catch_up()
        follower.check()

    @rule()
    def a_step_tells_everything(self):
        self._step()
        if self.engine.outstanding:
            assert self.scheduler.feed.due_at() > self.engine.now

    @invariant()
    def who_is_told_nothing_is_told_in_time(self):
        self.scheduler.idle_timeout()
        for follower in self.followers:
            follower.told()
        assert self.scheduler.feed.due_at() > self.engine.now

    def teardown(self):
        self.scheduler.set_pause_state(PauseState.UNPAUSED)
        self._run_out()
        for follower in self.followers:
            follower.catch_up()
            follower.check()
        super().teardown()
        for follower in self.followers:
            follower.catch_up()
            assert follower.programs == {}


VARIANTS = {
    "thunder": Variant(engine={"max_wait": 5.0}),
    "paper": Variant(engine={"policy": "paper", "max_wait": 5.0}),
    "fcfs": Variant(engine={"policy": "fcfs"}),
    "tight memory": Variant(blocks=14, engine={"max_num_batched_tokens": 48, "max_num_seqs": 4}),
    "few programs": Variant(engine={"max_programs": 2, "idle_grace": 0.0}),
}


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("page", [1, 2000])
def test_who_follows_random_traffic_knows_what_there_is(tiny_model, monkeypatch, name, page):
    monkeypatch.setattr(feed, "_PAGE", page)
    run_state_machine_as_test(
        lambda: FollowedTraffic(tiny_model, VARIANTS[name]),
        settings=settings(
            max_examples=12,
            stateful_step_count=60,
            deadline=None,
            derandomize=True,
            database=None,
            report_multiple_bugs=False,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )
