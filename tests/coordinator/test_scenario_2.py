"""Pauses, restores, moves and turns that race each other, through the whole coordinator."""

import asyncio
import random
from collections import Counter

from benchmarks.crowded_engine import CrowdedEngine, answer_of, events_of
from tests.coordinator.front import Client, ask, post
from tests.coordinator.program_engine import coordinator, delete, launch, turn, until, until_up
from vllm_thunder.coordinator.config import CoordinatorConfig

PROGRAMS = 64
ENGINES = 4
#: KV blocks of an engine: of 16 programs a few fit.
MEMORY = 150
EVENT_SECONDS = 0.01


class Agents:
    """Programs that take one turn after the other, every second one streamed, and what they got."""

    def __init__(self, port, turns):
        self.port = port
        self.turns = turns
        self.sent = 0
        self.answered = Counter()
        self.problems = []

    async def run(self):
        await asyncio.gather(*(self.program(number) for number in range(PROGRAMS)))

    async def program(self, number):
        program_id, filling = f"p{number}", "word " * (60 + 10 * number)
        client = await Client.to(self.port)
        for n in range(self.turns):
            name, stream = f"{program_id} turn {n}", n % 2 == 0
            messages = [{"role": "user", "content": text} for text in (filling, name)]
            self.sent += 1
            client.send(turn(program_id, messages=messages, stream=stream))
            answer = await client.answer()
            events = answer.body.split(b"\n\n")
            body = b"\n\n".join(event for event in events if not event.startswith(b":"))
            expected = b"".join(events_of(name)) if stream else answer_of(name)
            if answer.status == 200 and answer.whole and body == expected:
                self.answered[name] += 1
            else:
                self.problems.append((name, answer))
        client.leave()


class Unrest:
    """Every 10 ms something happens to engines and to the programs on them, until it is told to
    stop. ``engines``: those that run; ``left``: those that were taken out and ended."""

    def __init__(self, port, control, engines, seed):
        self.port = port
        self.control = control
        self.engines = engines
        self.left = []
        self.chance = random.Random(seed)
        self.happened = Counter()
        self.over = False

    async def run(self):
        kinds = [self.pause] * 8 + [self.restore] * 8 + [self.room] * 4 + [self.freeze]
        while not self.over:
            await asyncio.sleep(EVENT_SECONDS)
            kind = self.chance.choice(kinds)
            if self.happened.total() % 40 == 39:
                kind = self.replace
            self.happened[kind.__name__] += 1
            await kind()
            self.control.fleet.check_integrity()

    async def pause(self):
        """What acts on an engine loses its claim, one of them or all."""
        engine = self.chance.choice(self.engines)
        acting = sorted(engine.acting)
        for program_id in acting if self.chance.random() < 0.5 else acting[:1]:
            engine.acting.discard(program_id)
            engine.tell(program_id)

    async def restore(self):
        """A program that an engine knows gets a claim there, room or not."""
        engine = self.chance.choice(self.engines)
        if engine.context_tokens:
            program_id = self.chance.choice(sorted(engine.context_tokens))
            engine.acting.add(program_id)
            engine.tell(program_id)

    async def room(self):
        """An engine has less memory, or more."""
        engine = self.chance.choice(self.engines)
        engine.capacity_blocks = self.chance.choice([1, MEMORY, 2 * MEMORY])
        engine.tell()

    async def freeze(self):
        """Weights are updated."""
        assert (await ask(self.port, post({}, "/weight_sync/begin"))).status == 200
        await asyncio.sleep(EVENT_SECONDS)
        assert (await ask(self.port, post({}, "/weight_sync/end"))).status == 200

    async def replace(self):
        """A new engine comes, an old one is taken out and ends when its turns have."""
        new = CrowdedEngine(MEMORY, 0.002)
        await new.start()
        assert (await ask(self.port, post({"url": new.url}, "/engines"))).status == 200
        self.engines.append(new)
        old = self.engines.pop(self.chance.randrange(ENGINES))
        self.left.append(old)
        assert (await ask(self.port, delete(f"/engines/{old.url}"))).status == 200
        await until(lambda: old.url not in self.control.fleet.backends)
        await old.stop()


async def test_scenario_2_pauses_restores_and_moves_race_10000_turns():
    engines = [CrowdedEngine(MEMORY, 0.002) for _ in range(ENGINES)]
    for engine in engines:
        await engine.start()
    config = CoordinatorConfig(
        max_wait=2.0, stickiness=0.05, keepalive=0.05, interval=0.1, engine_timeout=5.0
    )
    async with coordinator(launch(engines, config)) as (port, control):
        fleet = control.fleet
        await until_up(control, ENGINES)
        agents = Agents(port, turns=157)
        unrest = Unrest(port, control, engines, seed=2)
        racing = asyncio.create_task(unrest.run())
        async with asyncio.timeout(240):
            await agents.run()
        unrest.over = True
        await racing
        assert agents.sent >= 10_000
        assert agents.problems == []
        assert agents.answered.total() == len(agents.answered) == agents.sent
        ran = sum((engine.ran for engine in [*engines, *unrest.left]), Counter())
        assert ran == agents.answered
        assert fleet.counts.moves > 100
        assert min(unrest.happened[kind] for kind in ("pause", "restore", "room", "freeze")) > 10
        assert len(unrest.left) > 5
        for number in range(PROGRAMS):
            released = await ask(port, post({"program_id": f"p{number}"}, "/programs/release"))
            assert released.json()["released"] is True
        await until(lambda: not control._background)
        await until(lambda: not any(engine.context_tokens for engine in engines))
        await until(lambda: not len(fleet))
        assert fleet.queue.held_turns == 0
        assert not any(b.running or b.residents or b.placed for b in fleet.backends.values())
        assert not any(engine.running or engine.claimed_blocks for engine in engines)
    for engine in engines:
        await engine.stop()
