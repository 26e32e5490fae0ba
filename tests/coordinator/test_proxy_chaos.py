"""Everything at once, in any order: whatever happened, nothing is left."""

import asyncio
import random

import pytest
import uvloop

from tests.coordinator.fake_engine import FakeEngine, chunked, hang, raw, reset, whole
from tests.coordinator.front import CHAT, Client, post, running_front
from vllm_thunder.coordinator.fleet.backend import Health

EVENTS = [b"data: %d\n\n" % n for n in range(5)]


def abort(wire):
    wire.reset()


BEHAVIOURS = [
    whole(b"{}"),
    whole(b"{}"),
    chunked(*EVENTS),
    chunked(*EVENTS, delay=0.005),
    chunked(*EVENTS, delay=0.02),
    chunked(*EVENTS, end=abort),
    raw(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf", abort),
    whole(b"{}", b"500 Oh"),
    whole(b"{}", b"400 No"),
    reset,
    hang,
]


async def storm(seed):
    chance = random.Random(seed)

    async def any_of_them(request, wire):
        await chance.choice(BEHAVIOURS)(request, wire)

    async def client(number):
        connection = await Client.to(front.port)
        for _ in range(4):
            body = {"stream": chance.random() < 0.5}
            if chance.random() < 0.8:
                body["program_id"] = f"p{number % 12}"
            path = CHAT if chance.random() < 0.9 else "/tokenize"
            connection.send(post(body, path))
            try:
                async with asyncio.timeout(chance.choice([0.001, 0.02, 0.2, 0.5])):
                    if not (await connection.answer()).whole:
                        break
            except (TimeoutError, ConnectionError, asyncio.IncompleteReadError):
                break
        connection.leave()

    async def killer():
        for _ in range(6):
            await asyncio.sleep(0.05)
            backend = chance.choice(list(front.engines))
            engine = front.engines[backend]
            if chance.random() < 0.5:
                await engine.kill()
                await asyncio.sleep(0.02)
                await engine.start()
            if backend.health is not Health.DOWN:
                front.down(backend)
            await asyncio.sleep(0.02)
            front.dispatcher.came_up(backend)
            front.report(backend, chance.choice([50, 1000]))

    async with running_front(keepalive_seconds=0.03) as front:
        for _ in range(3):
            await front.add(FakeEngine(any_of_them))
        await asyncio.gather(killer(), *(client(number) for number in range(60)))
        for backend in front.engines:
            front.report(backend, 1000)
        await front.until(lambda: not len(front.proxy.ongoing))
    assert len(front.done) >= 60
    assert {done.outcome for done in front.done} > {"ok", "client_gone"}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_a_storm_leaves_nothing(run, seed):
    run(storm(seed))
