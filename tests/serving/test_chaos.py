"""Everything at once, at random: nothing hangs, nothing is left, no answer is a 5xx."""

import asyncio
import random
import time
from collections import Counter
from typing import Any

import pytest

from tests.serving.client import Client, completion, words

SECONDS = 12.0
WORKERS = 20
PROGRAMS = 12


class Chaos:
    """Workers that call, cut, release and list, and one operator that pauses and resets."""

    def __init__(self, client: Client, seed: int):
        self.client = client
        self.seed = seed
        self.ends = time.monotonic() + SECONDS
        self.seen: Counter[str] = Counter()
        self.contexts = [words(100 + 150 * n, f"chaos {seed} {n}") for n in range(PROGRAMS)]

    async def run(self) -> None:
        workers = (self.work(random.Random(f"{self.seed} {n}")) for n in range(WORKERS))
        await asyncio.gather(self.operate(random.Random(self.seed)), *workers)

    async def work(self, chance: random.Random) -> None:
        actions = [self.call] * 4 + [self.stream] * 3 + [self.cancel] * 3 + [self.release]
        while time.monotonic() < self.ends:
            await chance.choice(actions)(chance)

    def body(self, chance: random.Random, tokens: int) -> dict[str, Any]:
        number = chance.randrange(PROGRAMS)
        program_id = None if chance.random() < 0.2 else f"chaos {number}"
        fields: dict[str, Any] = {}
        if chance.random() < 0.3:
            fields = {"n": chance.choice((2, 3)), "temperature": 1}
        elif chance.random() < 0.2:
            fields = {"structured_outputs": {"regex": "[a-z ]{3,40}"}, "ignore_eos": False}
        elif chance.random() < 0.2:
            fields = {"stop": ["a", "e"]}
        if program_id and chance.random() < 0.1:
            fields["agentic_context"] = {"is_last_step": True}
        prompt: Any = self.contexts[number] + words(chance.randrange(1, 400), f"{number}")
        if chance.random() < 0.15:
            prompt = [prompt, words(50, f"second {number}")]
        return completion(prompt, program_id, tokens=tokens, **fields)

    async def call(self, chance: random.Random) -> None:
        body = self.body(chance, chance.choice((1, 4, 30)))
        status, text = await self.client.request("POST", "/v1/completions", json=body)
        assert status == 200, text
        self.seen["called"] += 1

    async def stream(self, chance: random.Random) -> None:
        async with self.client.stream("/v1/completions", self.body(chance, 200)) as stream:
            left = chance.randrange(1, 20)
            async for _ in stream:
                left -= 1
                if left == 0:
                    stream.cut()
                    break
        self.seen["cut"] += 1

    async def cancel(self, chance: random.Random) -> None:
        call = asyncio.create_task(self.call(chance))
        await asyncio.sleep(chance.random() ** 3)
        call.cancel()
        await asyncio.wait([call])
        if not call.cancelled() and call.exception():
            raise call.exception()
        self.seen["cancelled"] += 1

    async def release(self, chance: random.Random) -> None:
        answer = await self.client.release(f"chaos {chance.randrange(PROGRAMS)}")
        self.seen["released"] += answer["released"]

    async def operate(self, chance: random.Random) -> None:
        while time.monotonic() < self.ends:
            await asyncio.sleep(chance.random())
            await self.client.programs()
            action = chance.randrange(5)
            if action < 2:
                mode = chance.choice(("keep", "abort", "wait"))
                await self.client.json("POST", "/pause", params={"mode": mode})
                await asyncio.sleep(0.3 * chance.random())
                await self.client.check_integrity()
                await self.client.json("POST", "/resume")
                self.seen[mode] += 1
            elif action == 2:
                running = {"reset_running_requests": "true"}
                await self.client.json("POST", "/reset_prefix_cache", params=running)
                self.seen["reset"] += 1
            await self.client.check_integrity()


@pytest.mark.parametrize("seed", [1, 2])
async def test_everything_at_once(client: Client, seed: int) -> None:
    chaos = Chaos(client, seed)
    async with asyncio.timeout(120):
        await chaos.run()
        summary = await client.until_idle()
    print(f"\n{dict(chaos.seen)}\n{summary}")
    assert min(chaos.seen[name] for name in ("called", "cut", "cancelled", "released")) > 0
    assert summary["free_blocks"] == summary["total_blocks"]
    assert summary["held_turns"] == 0
