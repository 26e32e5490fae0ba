"""What is learned of prompts from the calls that pass, whatever kinds of calls these are."""

import asyncio
import json
import random

import pytest

from vllm_thunder.coordinator.calls import Calls
from vllm_thunder.coordinator.config import CoordinatorConfig
from vllm_thunder.coordinator.dispatcher import Dispatcher
from vllm_thunder.coordinator.engines.stock import StockEngines
from vllm_thunder.coordinator.engines.stock_metrics import EngineFacts
from vllm_thunder.coordinator.fleet.backend import Backend
from vllm_thunder.coordinator.fleet.fleet import Fleet
from vllm_thunder.coordinator.prompts.usage import AnswerTokens
from vllm_thunder.program.config import ThunderConfig
from vllm_thunder.program.report import EngineReport, MemoryReport, ProgramReport
from vllm_thunder.program.turn import Turn

#: Of the texts here, everything that is not prompt included.
BYTES_PER_TOKEN = 3.0
KINDS = ("goes on", "one-off", "side call", "fans out", "stored", "cut")


def body_of(tokens, **others):
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], **others}
    room = round(tokens * BYTES_PER_TOKEN) - len(json.dumps(body))
    body["messages"][0]["content"] += "x" * room
    return json.dumps(body).encode()


class Traffic:
    """Turns of one program after the other, through an engine that counts as ours or as none."""

    def __init__(self, *, stock):
        clock = asyncio.get_running_loop().time
        self.fleet = Fleet(CoordinatorConfig(max_programs=50))
        self.dispatcher = Dispatcher(self.fleet, clock)
        self.stock = StockEngines(self.dispatcher, ThunderConfig(), 0, clock)
        self.calls = Calls(self.fleet, self.dispatcher.prompts, self.stock, clock)
        self.backend = Backend("e", stock=stock)
        self.fleet.joined(self.backend)
        self.contexts = {}
        self.count = 0
        if stock:
            self.stock._books_of(self.backend, EngineFacts(100_000, 16, seats=64))
            self.stock._report(self.backend)
        else:
            self.tell()

    def tell(self, *programs):
        memory = MemoryReport(100_000, 90_000.0, 64, [(16, None)])
        report = EngineReport("c", False, True, memory, list(programs), [])
        self.dispatcher.reported(self.backend, report)

    def estimate(self, tokens):
        return self.calls.look(None, body_of(tokens)).tokens

    async def turn(self, program_id, kind, prompt, output, *, usage=True):
        self.count += 1
        kinds = {"one_off": kind == "one-off", "fans_out": kind == "fans out"}
        turn = Turn(program_id, f"t{self.count}", **kinds)
        others = {"previous_response_id": "r"} if kind == "stored" else {}
        parts = 4 if kind in ("stored", "side call", "one-off") else 1
        look = self.calls.look(turn, body_of(prompt // parts, **others))
        dispatch = await self.dispatcher.place(turn, look.tokens, look.cached)
        self.calls.sent(self.backend, turn, turn.turn_id, look)
        counts = kind in ("goes on", "stored")
        counted = prompt if kind == "stored" else prompt // parts
        answer = None if kind == "cut" else answer_of(counted, output, usage=usage)
        self.calls.ended(self.backend, turn.turn_id, look, answer)
        self.dispatcher.ended(dispatch)
        context = self.contexts.get(program_id, 0)
        if counts or kind == "fans out":
            context = self.contexts[program_id] = prompt + output
        if not self.backend.stock:
            # Of a call that fans out the last request's prompt.
            told = prompt if counts else prompt // 8 if kind == "fans out" else 0
            self.tell(ProgramReport(program_id, context, context // 16, True, 0, told))
        await asyncio.sleep(0)


def answer_of(prompt, output, *, usage):
    answer = AnswerTokens()
    for _ in range(output):
        answer.feed(b'data: {"choices": [{"delta": {"content": "a"}}]}\n\n')
    if usage:
        answer.feed(
            b'data: {"choices": [], "usage": {"prompt_tokens": %d, "completion_tokens": %d}}\n\n'
            % (prompt, output)
        )
    return answer


@pytest.mark.parametrize("stock", [False, True], ids=["ours", "stock"])
@pytest.mark.parametrize("seed", range(4))
async def test_after_any_mix_of_turns_an_estimate_is_what_an_engine_counts(stock, seed):
    rng = random.Random(seed)
    traffic = Traffic(stock=stock)
    weights = [1.0, *(rng.choice([0.0, 0.2, 3.0]) for _ in KINDS[1:])]
    longest = rng.choice([20, 2000])
    for _ in range(1000):
        (kind,) = rng.choices(KINDS, weights)
        prompt = rng.randrange(1000, 8000)
        output = rng.randrange(1, longest)
        usage = rng.random() < 0.5
        await traffic.turn(f"p{rng.randrange(5)}", kind, prompt, output, usage=usage)
    for tokens in (1000, 20_000):
        assert traffic.estimate(tokens) == pytest.approx(tokens, rel=0.1)


async def test_without_counts_an_estimate_stays_what_it_was():
    traffic = Traffic(stock=True)
    before = traffic.estimate(2000)
    for _ in range(1000):
        await traffic.turn("p", "goes on", 2000, 500, usage=False)
    assert traffic.estimate(2000) == before


async def test_what_an_engine_says_of_the_turn_before_is_not_of_the_one_that_runs():
    traffic = Traffic(stock=False)
    before = traffic.estimate(2000)
    for number, prompt in enumerate((500, 8000)):
        turn = Turn("p", f"late{number}")
        look = traffic.calls.look(turn, body_of(prompt))
        dispatch = await traffic.dispatcher.place(turn, look.tokens)
        traffic.calls.sent(traffic.backend, turn, turn.turn_id, look)
        if not number:
            traffic.dispatcher.ended(dispatch)
    traffic.tell(ProgramReport("p", 600, 40, True, 0, 500))
    assert traffic.estimate(2000) == before
    traffic.dispatcher.ended(dispatch)
    traffic.tell(ProgramReport("p", 8100, 500, True, 0, 8000))
    assert traffic.estimate(2000) == pytest.approx(2000, rel=0.02)


async def test_turns_of_one_program_at_once_teach_nothing():
    traffic = Traffic(stock=False)
    before = traffic.estimate(2000)
    placed = []
    for number, prompt in enumerate((500, 8000)):
        turn = Turn("p", f"t{number}")
        look = traffic.calls.look(turn, body_of(prompt))
        placed.append(await traffic.dispatcher.place(turn, look.tokens))
        traffic.calls.sent(traffic.backend, turn, turn.turn_id, look)
    for dispatch in placed:
        traffic.dispatcher.ended(dispatch)
    traffic.tell(ProgramReport("p", 600, 40, True, 0, 500))
    assert traffic.estimate(2000) == before


async def test_bodies_that_are_mostly_something_else_do_not_make_all_prompts_nothing():
    traffic = Traffic(stock=True)
    look = traffic.calls.look(None, body_of(2000, metadata={"log": "x" * 1_000_000}))
    for _ in range(100):
        traffic.dispatcher.prompts.counted(look.size, 2000)
    assert traffic.estimate(2000) > 2000 / 25
