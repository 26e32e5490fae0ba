"""Replicas that die, hang or cannot serve, and replicas that disagree: nothing is lost or stuck."""

import asyncio

import pytest

from tests.coordinator.fake_engine import FakeEngine, chunked, whole
from tests.coordinator.front import Client, ask, post
from tests.coordinator.program_engine import ProgramEngine, get, page, turn, until
from tests.coordinator.replica_set import all_alive, replica_set
from vllm_thunder.coordinator.config import CoordinatorConfig
from vllm_thunder.coordinator.replicas import replicas as replicas_module

COMMENT = b": keep-alive\n\n"


@pytest.fixture(autouse=True)
def _quick_looks(monkeypatch):
    monkeypatch.setattr(replicas_module, "_LOOK_SECONDS", 0.05)


@pytest.fixture
async def engine():
    made = ProgramEngine()
    await made.start()
    yield made
    if made.alive:
        await made.kill()


def make_room(engine, room=1000.0):
    engine.room = room
    engine.tell()


async def without_room(engine, nodes):
    """Turns that arrive from now on are held, by all."""
    make_room(engine, -1.0)
    backends = [next(iter(node.control.fleet.backends.values())) for node in nodes]
    await until(lambda: all(backend.room < 0 for backend in backends))


# -- an owner that dies ----------------------------------------------------------------


@pytest.mark.parametrize("keepalive", [15.0, 0.02], ids=["silent", "with comments"])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "plain"])
async def test_held_turns_of_an_owner_that_dies_are_served_where_they_came(
    engine, stream, keepalive
):
    config = CoordinatorConfig(engine_timeout=1.0, keepalive=keepalive)
    engine.chat = chunked(b"data: 1\n\n", b"data: [DONE]\n\n") if stream else whole(b'{"x": 1}')
    async with replica_set(3, [engine], config=config) as nodes:
        await all_alive(nodes)
        await without_room(engine, nodes)
        dies, *rest = nodes
        name = nodes.id_of(dies)
        turns = [
            asyncio.create_task(ask(node.port, turn(name, stream=stream)))
            for node in rest
            for _ in range(5)
        ]
        await until(lambda: dies.held == 10)
        await asyncio.sleep(0.1)
        await dies.kill()
        await until(lambda: [node.held for node in rest] == [5, 5])
        make_room(engine)
        for answer in await asyncio.gather(*turns):
            assert answer.status == 200
            body = answer.body.replace(COMMENT, b"")
            assert body == (b"data: 1\n\ndata: [DONE]\n\n" if stream else b'{"x": 1}')
            assert answer.whole
        assert len(engine.calls) == 10


async def test_a_turn_at_the_engine_of_an_owner_that_dies_ends_there_and_is_served_again(engine):
    async def first_hangs(request, wire):
        if len(engine.calls) == 1:
            await wire.hang()
        else:
            await whole(b'{"x": 2}')(request, wire)

    engine.chat = first_hangs
    async with replica_set(2, [engine]) as nodes:
        await all_alive(nodes)
        stays, dies = nodes
        asked = asyncio.create_task(ask(stays.port, turn(nodes.id_of(dies))))
        await until(lambda: engine.calls)
        (wire,) = [wire for wire in engine.wires if not wire.gone.is_set()][-1:]
        await dies.kill()
        assert (await asked).body == b'{"x": 2}'
        await asyncio.wait_for(wire.gone.wait(), 20)
        assert len(engine.calls) == 2


async def test_a_stream_that_has_begun_ends_with_an_error_event(engine):
    engine.chat = chunked(*[b"data: %d\n\n" % n for n in range(1000)], delay=0.05)
    async with replica_set(2, [engine]) as nodes:
        await all_alive(nodes)
        stays, dies = nodes
        client = await Client.to(stays.port)
        client.send(turn(nodes.id_of(dies), stream=True))
        await client.head()
        assert await client.piece() == b"data: 0\n\n"
        await dies.kill()
        rest = b""
        while piece := await asyncio.wait_for(client.piece(), 20):
            rest += piece
        assert b"the replica that has the program was lost while it answered" in rest
        assert rest.endswith(b"\n\ndata: [DONE]\n\n")
        assert len(engine.calls) == 1


async def test_a_replica_that_is_stopped_ends_what_it_has_begun(engine):
    pieces = [b"data: %d\n\n" % n for n in range(20)]
    engine.chat = chunked(*pieces, delay=0.05)
    async with replica_set(2, [engine]) as nodes:
        await all_alive(nodes)
        stays, stops = nodes
        client = await Client.to(stays.port)
        client.send(turn(nodes.id_of(stops), stream=True))
        await client.head()
        stopping = asyncio.create_task(stops.stop())
        await until(lambda: not stays.proxy.replicas.others[stops.url].alive)
        rest = b""
        while piece := await asyncio.wait_for(client.piece(), 20):
            rest += piece
        assert rest == b"".join(pieces)
        await stopping


async def test_programs_of_a_dead_replica_are_the_others_until_it_is_back(engine):
    async with replica_set(3, [engine]) as nodes:
        await all_alive(nodes)
        dies, *rest = nodes
        kept = {nodes.id_of(node): node for node in rest}
        name = nodes.id_of(dies)
        await ask(dies.port, turn(name))
        await dies.kill()
        for node in rest:
            await until(lambda node=node: not node.proxy.replicas.others[dies.url].alive)
            assert (await node.health())[dies.url] == "down"
        for node in rest:
            assert (await ask(node.port, turn(name))).status == 200
            for known, owner in kept.items():
                told = (await ask(node.port, turn(known))).status
                assert told == 200
                assert owner.control.fleet.get(known) is not None
        heirs = [node for node in rest if node.control.fleet.get(name) is not None]
        assert len(heirs) == 1  # all turns of it are in one queue again
        assert heirs[0].control.fleet.get(name).profile.turns == 2


async def test_what_is_asked_about_a_program_of_a_dead_replica_is_answered_here(engine):
    async with replica_set(2, [engine]) as nodes:
        await all_alive(nodes)
        stays, dies = nodes
        name = nodes.id_of(dies)
        await dies.kill()
        stays.proxy.replicas.others[dies.url].alive = True  # nobody has looked yet
        assert (await ask(stays.port, get(f"/programs/{name}"))).status == 404
        stays.proxy.replicas.others[dies.url].alive = True
        released = await ask(stays.port, post({"program_id": name}, "/programs/release"))
        assert released.json() == {"program_id": name, "released": False}
        assert engine.released == [name]


# -- an owner that hangs, or cannot serve ------------------------------------------------


async def test_turns_of_a_replica_that_hangs_are_served_where_they_came(engine):
    hung = FakeEngine()
    await hung.start()
    silent = False

    async def replica(request, wire):
        if silent or not request.target.startswith(b"/health"):
            await wire.hang()
        else:
            urls = b'["%b"]' % b'", "'.join(sorted(url.encode() for url in (node.url, hung.url)))
            told = b'{"replica": "%b", "replica_urls": %b}' % (hung.url.encode(), urls)
            await whole(told)(request, wire)

    hung.answer = replica
    async with replica_set(1, [engine], extra=[hung.url]) as nodes:
        (node,) = nodes
        await all_alive(nodes)
        name = next(f"p{n}" for n in range(99) if node.proxy.replicas.owner(f"p{n}") is not None)
        asked = asyncio.create_task(ask(node.port, turn(name)))
        about = asyncio.create_task(ask(node.port, get(f"/programs/{name}")))
        await until(lambda: sum(b"health" not in r.target for r in hung.requests) == 2)
        assert not engine.calls
        silent = True
        assert (await asked).status == 200
        assert (await about).status in (200, 404)
        problem = next(
            each["problem"]
            for each in (await page(node.port, "/status"))["replicas"]
            if each["url"] == hung.url
        )
        assert problem == "no answer within 1 s"
        assert node.proxy.replicas.owner(name) is None
    await hung.kill()


async def test_a_replica_without_an_engine_leaves_its_programs_to_the_others(engine):
    async with replica_set(2, lambda number: [engine] if number == 0 else []) as nodes:
        first, second = nodes
        await until(lambda: second.proxy.replicas.others[first.url].alive)
        problem = first.proxy.replicas.others[second.url]
        await until(lambda: problem.problem == "it says that it cannot serve (503)")
        name = nodes.id_of(second)
        for node in nodes:
            assert (await ask(node.port, turn(name))).status == 200
        assert first.control.fleet.get(name).profile.turns == 2
        assert second.control.fleet.get(name) is None
        assert await second.health() == {first.url: "up", second.url: "down"}


async def test_an_owner_that_says_that_no_engine_is_there_is_passed_over(engine):
    config = CoordinatorConfig(max_wait=0.3, interval=0.1, engine_timeout=1.0)
    engines = [[engine], []]
    async with replica_set(2, lambda number: engines[number], config=config) as nodes:
        first, second = nodes
        replica = first.proxy.replicas.others[second.url]
        await until(lambda: replica.problem == "it says that it cannot serve (503)")
        first.proxy.replicas.owner = lambda program_id: replica  # it could a moment ago
        asked = asyncio.create_task(ask(first.port, turn("p")))
        await until(lambda: second.held == 1)
        assert (await asked).status == 200
        assert len(engine.calls) == 1
        assert first.control.fleet.get("p").profile.turns == 1


# -- replicas that disagree --------------------------------------------------------------


async def test_replicas_that_each_take_another_for_the_owner_pass_a_call_on_once(engine):
    async with replica_set(3, [engine]) as nodes:
        await all_alive(nodes)
        for node, other in zip(nodes, [*nodes[1:], nodes[0]], strict=True):
            replica = node.proxy.replicas.others[other.url]
            node.proxy.replicas.owner = lambda program_id, replica=replica: replica
        for number, node in enumerate(nodes):
            assert (await ask(node.port, turn(f"p{number}"))).status == 200
            there = nodes[(number + 1) % 3].control.fleet.get(f"p{number}")
            assert there.profile.turns == 1
            told = await ask(node.port, get(f"/programs/p{number}"))
            assert told.json()["replica"] == nodes[(number + 1) % 3].url
        assert len(engine.calls) == 3


async def test_replicas_with_other_lists_share_nothing(engine):
    async with replica_set(
        2, [engine], extra=lambda number: [f"http://127.0.0.1:{number}"]
    ) as nodes:
        for node, other in (nodes, reversed(nodes)):
            replica = node.proxy.replicas.others[other.url]
            await until(lambda replica=replica: "--replicas" in str(replica.problem))
            name = nodes.id_of(other)
            assert (await ask(node.port, turn(name))).status == 200
            assert node.control.fleet.get(name).profile.turns == 1


async def test_another_server_at_a_replicas_address_is_none(engine):
    async with replica_set(1, [engine], extra=[engine.url]) as nodes:
        (node,) = nodes
        replica = node.proxy.replicas.others[engine.url]
        await until(lambda: replica.problem == "who answers there is no replica")
        assert (await ask(node.port, turn("p"))).status == 200
