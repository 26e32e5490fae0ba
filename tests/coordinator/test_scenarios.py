"""Faults that users of other systems have met, as scenarios through the whole coordinator."""

import asyncio
import json
from collections import Counter
from contextlib import asynccontextmanager

import pytest

from benchmarks.crowded_engine import answer_of, events_of
from tests.coordinator.fake_engine import chunked, hang, whole
from tests.coordinator.front import CHAT, Client, ask, post
from tests.coordinator.program_engine import (
    ProgramEngine,
    coordinator,
    get,
    launch,
    page,
    turn,
    until,
    until_up,
)
from vllm_thunder.coordinator.config import CoordinatorConfig
from vllm_thunder.program.report import ProgramReport


@asynccontextmanager
async def running(*engines):
    """The engines, started; killed in the end."""
    for engine in engines:
        await engine.start()
    try:
        yield engines
    finally:
        for engine in engines:
            if engine.alive:
                await engine.kill()


def prompt(name):
    return [{"role": "user", "content": name}]


# -- 5: an engine is replaced ------------------------------------------------------------


class Worker(ProgramEngine):
    """Answers with the name of the turn, after a while, and keeps what it knows of programs."""

    def __init__(self):
        super().__init__()
        self.chat = self.work

    async def work(self, request, wire):
        asked = json.loads(request.body)
        name, program_id = asked["messages"][0]["content"], asked["program_id"]
        self.tell(ProgramReport(program_id, 160, 0, True, 1))
        await asyncio.sleep(0.01)
        if asked["stream"]:
            await chunked(*events_of(name), delay=0.005)(request, wire)
        else:
            await whole(answer_of(name))(request, wire)
        self.tell(ProgramReport(program_id, 160, 10, True))

    async def replace(self):
        """Kill it under load, and start another in its place, which knows nothing."""
        await self.kill()
        await asyncio.sleep(0.1)
        self.programs.clear()
        await self.start()


class Runs:
    """Programs whose every turn has to be answered; a stream that breaks is sent again."""

    KILLS = 8

    def __init__(self, port):
        self.port = port
        self.kills = 0
        self.answered = 0
        self.broken = Counter()

    async def program(self, number):
        client = await Client.to(self.port)
        n = 0
        while self.kills < self.KILLS or n < 20:
            name, stream = f"p{number} turn {n}", n % 2 == 0
            client.send(turn(f"p{number}", messages=prompt(name), stream=stream))
            answer = await client.answer()
            assert (answer.status, answer.whole) == (200, True), answer
            if stream and b'"error"' in answer.body:
                assert answer.body.startswith(events_of(name)[0])
                self.broken[number, self.kills] += 1
                continue
            assert answer.body == (b"".join(events_of(name)) if stream else answer_of(name))
            self.answered += 1
            n += 1
        client.leave()


async def test_scenario_5_every_turn_after_a_kill_succeeds_somewhere():
    async with (
        running(Worker(), Worker(), Worker()) as engines,
        coordinator(launch(engines)) as (port, control),
    ):
        await until_up(control, 3)
        runs = Runs(port)
        programs = [asyncio.create_task(runs.program(n)) for n in range(24)]
        for _ in range(runs.KILLS):
            await asyncio.sleep(0.2)
            busiest = max(engines, key=lambda e: len(control.fleet.backends[e.url].running))
            runs.kills += 1
            await busiest.replace()
            await until_up(control, 3)
        await asyncio.gather(*programs)
        assert runs.answered >= 24 * 20
        assert runs.broken.total() > 0
        assert max(runs.broken.values()) == 1  # for each kill, of each client
        for n in range(24):
            await ask(port, post({"program_id": f"p{n}"}, "/programs/release"))
        await until(lambda: not any(engine.programs for engine in engines))
        assert len(control.fleet) == control.fleet.queue.held_turns == 0


# -- 6: data-parallel ranks --------------------------------------------------------------


class Ranks(ProgramEngine):
    """A server of two ranks: ``books`` says what each of them reports."""

    def __init__(self):
        super().__init__(ranks=2)
        self.books = [ProgramEngine(), ProgramEngine()]
        self.chat = self.work
        self.stuck = set()

    def has_room(self, *rooms):
        for rank, room in zip(self.books, rooms, strict=True):
            rank.room = room
            rank.tell()

    async def _answer(self, path, query, request, wire):
        if path == "/programs/changes":
            rank = self.books[int(query["rank"][0])]
            await rank._answer(path, query, request, wire)
        else:
            await super()._answer(path, query, request, wire)

    async def work(self, request, wire):
        (rank,) = map(int, request.values(b"x-data-parallel-rank"))
        if rank in self.stuck:
            await hang(request, wire)
        program_id = json.loads(request.body)["program_id"]
        self.books[rank].tell(ProgramReport(program_id, 160, 10, True))
        await whole(b"%d" % rank)(request, wire)


async def test_scenario_6_turns_stay_on_their_rank_and_a_rank_that_holds_stalls_no_other():
    async with (
        running(Ranks()) as (server,),
        coordinator(launch([server])) as (port, control),
    ):
        await until_up(control, 2)

        async def rank_of(program_id):
            answer = await ask(port, turn(program_id))
            assert answer.status == 200
            return int(answer.body)

        homes = {f"p{n}": await rank_of(f"p{n}") for n in range(8)}
        assert set(homes.values()) == {0, 1}
        server.has_room(0.0, 0.0)  # but for those who are there
        ranks = list(control.fleet.backends.values())
        await until(lambda: not any(backend.room for backend in ranks))
        async with asyncio.timeout(5):
            for _ in range(5):
                await until(lambda: all(program.claimed for program in control.fleet))
                together = await asyncio.gather(*map(rank_of, homes))
                assert together == list(homes.values())
        server.stuck.add(0)
        on_0 = [program_id for program_id, rank in homes.items() if rank == 0]
        on_1 = [program_id for program_id, rank in homes.items() if rank == 1]
        stuck = [await Client.to(port) for _ in on_0]
        for client, program_id in zip(stuck, on_0, strict=True):
            client.send(turn(program_id))
        server.has_room(-10.0, 1000.0)
        await until(lambda: ranks[1].room > 0 and len(ranks[0].running) == len(on_0))
        async with asyncio.timeout(5):
            for _ in range(5):
                assert await asyncio.gather(*map(rank_of, on_1)) == [1] * len(on_1)
            assert [await rank_of(f"new {n}") for n in range(4)] == [1] * 4
        for client in stuck:
            client.leave()
        await until(lambda: not ranks[0].running)


# -- 7: capacity unknown -----------------------------------------------------------------


async def test_scenario_7_an_engine_that_starts_late_is_seen_and_then_used():
    """Nothing is sent to an engine of which nothing is known, and no more than fits to another."""
    early, late = ProgramEngine(room=10.0), ProgramEngine()
    await late.start()
    await late.kill()  # it has an address
    async with running(early), coordinator(launch([early, late])) as (port, control):
        await until_up(control, 1)
        (backend,) = control.fleet.backends.values()
        backend.unlabelled += 1  # idle, it would be given the first that fits nowhere
        status = await page(port, "/status")
        assert (status["state"], status["capacity_known"]) == ("degraded", False)
        assert list(status["unreachable"]) == [late.url]
        large = "word " * 500  # of the 10 blocks of room it takes more
        waiting = [
            asyncio.create_task(ask(port, turn(f"p{n}", messages=prompt(large)))) for n in "ab"
        ]
        await until(lambda: control.fleet.queue.held_turns == 2)
        metrics = (await ask(port, get("/metrics"))).body.decode()
        assert "vllm_thunder_coordinator:capacity_known 0.0" in metrics
        assert 'vllm_thunder_coordinator:engines{health="unreachable"} 1.0' in metrics
        assert not early.calls
        await late.start()
        assert [answer.status for answer in await asyncio.gather(*waiting)] == [200, 200]
        assert (len(early.calls), len(late.calls)) == (0, 2)
        status = await page(port, "/status")
        assert (status["state"], status["capacity_known"]) == ("ok", True)
        metrics = (await ask(port, get("/metrics"))).body.decode()
        assert "vllm_thunder_coordinator:capacity_known 1.0" in metrics
        await late.kill()


# -- 15: a proxy that cuts what is idle --------------------------------------------------

#: As 60 s to the 15 s after which a comment comes, and the 90 s for which a turn is held.
IDLE_SECONDS = 0.4


@asynccontextmanager
async def cutting_proxy(port):
    """The port of a proxy that cuts a connection on which the server says nothing for too long."""

    async def pump(reader, writer, seconds):
        try:
            while data := await asyncio.wait_for(reader.read(65536), seconds):
                writer.write(data)
        finally:
            writer.close()

    async def serve(reader, writer):
        server_reader, server_writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(
            pump(reader, server_writer, None),
            pump(server_reader, writer, IDLE_SECONDS),
            return_exceptions=True,
        )

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


@pytest.mark.parametrize("keepalive", [IDLE_SECONDS / 4, 15.0], ids=["comments", "none in time"])
async def test_scenario_15_a_held_stream_outlives_a_proxys_idle_limit(engines, keepalive):
    config = CoordinatorConfig(engine_timeout=1.0, keepalive=keepalive)
    for engine in engines:
        engine.room = -1.0
        engine.chat = chunked(*events_of("held"))
    async with (
        coordinator(launch(engines, config)) as (port, control),
        cutting_proxy(port) as front,
    ):
        await until_up(control, 2)
        asked = asyncio.create_task(ask(front, turn("p", stream=True)))
        await asyncio.sleep(1.5 * IDLE_SECONDS)
        if keepalive > IDLE_SECONDS:
            with pytest.raises(asyncio.IncompleteReadError):
                await asked  # so the comments it is that hold it open
            await until(lambda: control.fleet.queue.held_turns == 0)
            return
        assert control.fleet.queue.held_turns == 1
        for engine in engines:
            engine.room = 1000.0
            engine.tell()
        answer = await asked
        assert (answer.status, answer.whole) == (200, True)
        assert answer.body.replace(b": keep-alive\n\n", b"") == b"".join(events_of("held"))


def test_scenario_15_comments_come_sooner_than_proxies_cut():
    assert CoordinatorConfig().keepalive <= 60 / 3


# -- 17: a key everywhere ----------------------------------------------------------------

OURS = b"content-type: application/json\r\nauthorization: Bearer key\r\n"
ANOTHER = b"content-type: application/json\r\nauthorization: Bearer other\r\n"


async def test_scenario_17_with_a_key_everything_works_and_with_another_nothing_does():
    async with (
        running(ProgramEngine(key="key"), ProgramEngine(key="key")) as engines,
        coordinator(launch(engines, api_keys=["key"])) as (port, control),
    ):
        await until_up(control, 2)
        requests = {
            "chat": (post, {"model": "m", "program_id": "p"}, CHAT),
            "stream": (post, {"model": "m", "program_id": "p", "stream": True}, CHAT),
            "completions": (post, {"model": "m", "program_id": "p"}, "/v1/completions"),
            "no program": (post, {"model": "m"}, CHAT),
            "tokenize": (post, {"prompt": "x"}, "/tokenize"),
            "tool": (post, {"program_id": "p", "tool_name": "t"}, "/programs/tool"),
            "release": (post, {"program_id": "p"}, "/programs/release"),
            "pause": (post, {}, "/pause"),
            **{path: (get, path) for path in ("/v1/models", "/programs", "/status", "/metrics")},
        }
        for method, *arguments in requests.values():
            refused = await ask(port, method(*arguments, ANOTHER))
            assert refused.status == 401
            assert "key" in refused.json()["error"]["message"]
            assert len(control.fleet) == control.fleet.counts.programs_created == 0
        assert not any(engine.calls or engine.released for engine in engines)
        for name, (method, *arguments) in requests.items():
            answer = await ask(port, method(*arguments, OURS))
            assert answer.status == 200, name
        assert any(engine.released == ["p"] for engine in engines)
        assert len(control.fleet) == 0
        # The probe of an engine that failed an exchange has the key, too.
        engines[0].chat = engines[1].chat = whole(b"{}", b"503 Service Unavailable")
        assert (await ask(port, post({"program_id": "q"}, CHAT, OURS))).status == 503
        assert (await ask(port, get("/health"))).json()["status"] == "ok"
