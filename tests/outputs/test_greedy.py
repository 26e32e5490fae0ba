"""Scheduling changes no text: stock vLLM and vllm_thunder on a real engine under pressure."""

import random
from itertools import pairwise

import pytest

from benchmarks.outputs import TIE, EngineSpec, Outcome, Script, ScriptedTurn, run_all
from vllm_thunder.replay.tiny_model import TinyModel, build_tiny_model

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

BLOCK_SIZE = 32
SHARED_TOKENS = 2 * BLOCK_SIZE
WORDS = range(300, 2400)  # ids of the tiny model's tokenizer that are no special tokens


def scripts(programs: int) -> list[Script]:
    rng = random.Random("greedy outputs")

    def tokens(low: int, high: int) -> list[int]:
        return rng.choices(WORDS, k=rng.randint(low, high))

    shared = rng.choices(WORDS, k=SHARED_TOKENS)
    return [
        Script(
            f"program {number}",
            [
                ScriptedTurn(
                    (shared + tokens(100, 500)) if step == 0 else tokens(20, 120),
                    rng.randint(8, 20),
                )
                for step in range(rng.randint(3, 5))
            ],
        )
        for number in range(programs)
    ]


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    folder = tmp_path_factory.mktemp("outputs")
    tiny = TinyModel()
    engine = EngineSpec(
        build_tiny_model(folder / "models", tiny),
        usable_blocks=80,
        block_size=BLOCK_SIZE,
        kv_bytes_per_token=tiny.kv_bytes_per_token,
        max_model_len=2048,
    )
    outcome = run_all(engine, scripts(14), folder)
    print(outcome)
    return outcome


def test_the_run_pauses_evicts_and_restores(outcome: Outcome) -> None:
    programs = outcome.thunder.programs
    assert programs is not None
    assert programs["pauses"] > 0
    assert programs["restores_after_a_pause"] > 0
    assert sum(programs["evicted_blocks"].values()) > 0
    lost = [
        before.prompt_tokens + len(before.tokens) - after.cached_tokens
        for turns in outcome.thunder.turns
        for before, after in pairwise(turns)
    ]
    # of its last context, a turn at most recomputes the blocks that its last token began
    assert any(tokens <= BLOCK_SIZE for tokens in lost), "no context was found whole"
    assert any(tokens > 2 * BLOCK_SIZE for tokens in lost), "no context was recomputed"


def test_outputs_differ_no_more_than_stock_outputs_from_themselves(outcome: Outcome) -> None:
    assert outcome.program.turns == sum(len(turns) for turns in outcome.reference.turns)
    assert not outcome.failures()


def test_the_chosen_tokens_keep_their_log_probabilities(outcome: Outcome) -> None:
    """Sharper than the text: a wrong block of keys and values moves every probability."""
    assert outcome.program.largest_drift <= TIE


def test_nothing_is_left_of_the_programs(outcome: Outcome) -> None:
    programs = outcome.thunder.programs
    assert programs is not None
    assert programs["programs_left"] == 0
    assert programs["blocks_not_free"] == 0
