"""Stock engines behind the global queue: their books are good enough to place by."""

import heapq
import random
from itertools import count

import pytest

from vllm_thunder.coordinator.config import CoordinatorConfig
from vllm_thunder.coordinator.fleet.backend import Backend
from vllm_thunder.coordinator.fleet.fleet import Fleet
from vllm_thunder.coordinator.logical.engine import LogicalEngine
from vllm_thunder.program.config import ThunderConfig
from vllm_thunder.program.turn import Turn

BLOCK = 16
BLOCKS = 100
SECONDS_PER_TOKEN = 0.004


class Site:
    """Clients in closed loops, a fleet, and stock engines that prefill one prompt at a time.

    ``sticky``: every turn goes to the engine of its program as it comes, without the fleet.
    """

    def __init__(self, engines, programs, steps, seed, *, release=True, sticky=False):
        self.rng = random.Random(seed)
        self.now = 0.0
        self.events = []
        self.order = count()
        self.fleet = Fleet(CoordinatorConfig(max_wait=10_000.0))
        self.books = {}
        self.free_at = {}
        for n in range(engines):
            backend = Backend(f"e{n}")
            self.fleet.joined(backend)
            self.books[backend] = LogicalEngine(
                ThunderConfig(retention=300.0), capacity_blocks=BLOCKS, block_size=BLOCK, seats=16
            )
            self.free_at[backend] = 0.0
        self.release = release
        self.sticky = sticky
        self.context = {f"p{n}": self.rng.randint(10, 30) * BLOCK for n in range(programs)}
        self.left = dict.fromkeys(self.context, steps)
        self.finished = {}
        self.computed_tokens = 0
        self.crowded = 0
        for n, program in enumerate(self.context):
            self.at(0.01 * n, self.arrive, program)

    def at(self, when, what, *arguments):
        heapq.heappush(self.events, (when, next(self.order), what, arguments))

    def run(self):
        self.decide()
        while len(self.finished) < len(self.context):
            assert self.events or self.deadline() < 10_000, "nothing will ever happen"
            next_event = self.events[0][0] if self.events else float("inf")
            self.now = max(self.now, min(next_event, self.deadline()))
            while self.events and self.events[0][0] <= self.now:
                _, _, what, arguments = heapq.heappop(self.events)
                what(*arguments)
            self.decide()

    def deadline(self):
        return min(self.fleet.deadline, *(books.deadline for books in self.books.values()))

    def decide(self):
        for backend, books in self.books.items():
            report = books.report(self.now)
            self.fleet.reported(backend, report, self.now)
            books.check_integrity()
            self.crowded += books.cache.is_short
        for dispatch in self.fleet.reconcile(self.now):
            self.sent(dispatch)
        self.fleet.check_integrity()

    def arrive(self, program):
        turn_id = f"{program}.{self.left[program]}"
        if self.sticky:
            backend = list(self.books)[int(program[1:]) % len(self.books)]
            self.send(program, turn_id, backend)
            return
        turn = Turn(program, turn_id)
        dispatch = self.fleet.arrived(turn, self.context[program], {}, self.now)
        if dispatch is not None:
            self.sent(dispatch)

    def sent(self, dispatch):
        self.send(dispatch.program.program_id, dispatch.turn_id, dispatch.backend)

    def send(self, name, turn_id, backend):
        books = self.books[backend]
        tracked = books.table.get(name)
        there = 0 if tracked is None else books.cache.cached_tokens(tracked, self.context[name])
        books.turn_sent(Turn(name, turn_id), self.context[name], self.now)
        self.computed_tokens += self.context[name] - there
        self.free_at[backend] = max(self.free_at[backend], self.now)
        self.free_at[backend] += (self.context[name] - there) * SECONDS_PER_TOKEN
        first = self.free_at[backend]
        self.at(first, books.first_byte, turn_id, first)
        self.at(first + 0.5, self.ended, name, turn_id, books)

    def ended(self, name, turn_id, books):
        self.context[name] += 20
        books.turn_ended(turn_id, self.context[name], self.now, output_tokens=20)
        if not self.sticky:
            self.fleet.ended(self.fleet.get(name), turn_id, self.now)
        self.context[name] += self.rng.randint(10, 40)
        self.left[name] -= 1
        if self.left[name]:
            self.at(self.now + self.rng.lognormvariate(0.3, 0.8), self.arrive, name)
            return
        self.finished[name] = self.now
        if self.release:
            self.fleet.release(name)
            for each in self.books.values():
                each.release(name)


@pytest.mark.parametrize("release", [True, False])
@pytest.mark.parametrize("seed", range(2))
def test_programs_that_do_not_fit_take_turns_and_all_end(seed, release):
    """Forty programs of some 30 blocks on two engines of 100: contexts stay in memory while their
    programs run, so less is computed twice than where every turn is sent as it comes."""
    site = Site(engines=2, programs=40, steps=6, seed=seed, release=release)
    site.run()
    sticky = Site(engines=2, programs=40, steps=6, seed=seed, release=release, sticky=True)
    sticky.run()
    assert site.computed_tokens < 0.75 * sticky.computed_tokens
    assert site.now < 0.85 * sticky.now
    assert site.crowded < 0.1 * sticky.crowded
    for backend, books in site.books.items():
        assert backend.report.prefill_seconds_per_token == pytest.approx(SECONDS_PER_TOKEN, rel=0.2)
        if release:
            books.report(site.now)
            assert not len(books.table)
            assert books.table.claimed == 0.0
            assert books.cache.free_blocks == BLOCKS
    assert release == (not len(site.fleet))
