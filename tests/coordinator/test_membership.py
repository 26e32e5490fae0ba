"""Which servers are engines: however they are added and taken out, each is one of them once."""

import asyncio
import random
from contextlib import asynccontextmanager

import pytest

from tests.coordinator.front import until
from vllm_thunder.coordinator.config import CoordinatorConfig
from vllm_thunder.coordinator.dispatcher import Dispatcher
from vllm_thunder.coordinator.engines import engines as engines_module
from vllm_thunder.coordinator.engines import feed as feed_module
from vllm_thunder.coordinator.engines.client import EngineError, ServerFacts
from vllm_thunder.coordinator.engines.engines import Engines
from vllm_thunder.coordinator.engines.stock import StockEngines
from vllm_thunder.coordinator.fleet.dispatch import Unavailable
from vllm_thunder.coordinator.fleet.fleet import Fleet
from vllm_thunder.program.config import ThunderConfig
from vllm_thunder.program.report import EngineReport, MemoryReport
from vllm_thunder.program.turn import Turn

MEMORY = MemoryReport(1000, 500.0, 64, [(16, None)])


class Server:
    """What an engine's server answers, without one; each answer takes a moment."""

    def __init__(self, name, moments, ranks):
        self.url = f"http://{name}"
        self.up = True
        self._moments = moments
        self._ranks = ranks

    async def facts(self):
        await self._moment()
        return ServerFacts(("m",), 4096, (1, 2), [(16, None)], True, self._ranks)

    async def healthy(self, seconds):
        return self.up

    async def changes(self, rank, cursor, wait, seconds):
        await self._moment()
        while cursor and self.up:  # noqa: ASYNC110 - tests flip it
            await asyncio.sleep(0.01)
        await self._moment()
        return EngineReport("1", not cursor, True, MEMORY, [], [])

    async def _moment(self):
        await asyncio.sleep(next(self._moments))
        if not self.up:
            raise EngineError(f"{self.url}: is down")


class World(Engines):
    """Engines on such servers, and the turns that they run."""

    def __init__(self, servers, **settings):
        loop = asyncio.get_running_loop()
        config = CoordinatorConfig(max_wait=5.0, **settings)
        self.dispatcher = Dispatcher(Fleet(config), loop.time)
        super().__init__(
            self.dispatcher,
            None,
            config,
            stock=StockEngines(self.dispatcher, ThunderConfig(), 0, loop.time),
            api_key=None,
            on_down=self._lost,
        )
        self.fleet = self.dispatcher.fleet
        self.servers = {server.url: server for server in servers}
        self.running = []
        self.sent = 0

    def client(self, url):
        return self.servers[url]

    def urls(self):
        return sorted({backend.url for backend in self.fleet.backends.values()})

    def well(self, *urls):
        """Whether the engines are those of these servers, and all can be used."""
        backends = self.fleet.backends.values()
        return self.urls() == sorted(urls) and all(backend.usable for backend in backends)

    async def turn(self):
        self.sent += 1
        dispatch = await self.dispatcher.place(Turn(f"p{self.sent}", f"t{self.sent}"), 10)
        self.running.append(dispatch)
        return dispatch

    def end_turns(self, backend=None):
        ended = [d for d in self.running if backend in (None, d.backend)]
        self.running = [d for d in self.running if d not in ended]
        for dispatch in ended:
            self.dispatcher.ended(dispatch)

    def take_out(self, url):
        """As a request does."""
        self.remove(self.at(url))
        self.give_up(url)

    def check(self):
        self.check_integrity()
        self.fleet.check_integrity()

    def _lost(self, backend):
        self.end_turns(backend)


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    for module, name, seconds in (
        (engines_module, "_FILE_SECONDS", 0.01),
        (engines_module, "_LEAVING_SECONDS", 0.002),
        (engines_module, "_TRY_SECONDS", 0.005),
        (feed_module, "_FIRST_RETRY", 0.005),
        (feed_module, "_LAST_RETRY", 0.01),
        (feed_module, "_PAUSE_IDLE", 0.005),
    ):
        monkeypatch.setattr(module, name, seconds)


@asynccontextmanager
async def world(names="a", *, moments=None, ranks=1, **settings):
    moments = moments or iter(lambda: 0.002, None)
    made = World([Server(name, moments, ranks) for name in names], **settings)
    try:
        yield made
        made.check()
    finally:
        made.end_turns()
        await made.stop()


def listing(path, *urls):
    path.write_text("".join(url + "\n" for url in urls))


@pytest.mark.parametrize("file_first", [True, False])
async def test_a_server_that_is_named_twice_is_one_engine(tmp_path, file_first):
    listed = tmp_path / "engines"
    listing(listed, "http://a")
    async with world() as engines:
        if file_first:
            engines.watch(listed)
        await engines.start(["http://a"])
        if not file_first:
            engines.watch(listed)
        await until(lambda: engines.well("http://a"))
        await asyncio.sleep(0.1)
        engines.check()
        assert not engines.unreachable


@pytest.mark.parametrize("ranks", [1, 3])
async def test_a_server_that_is_added_twice_at_once_is_added_once(ranks):
    async with world(ranks=ranks) as engines:
        asked = [engines.add("http://a") for _ in range(3)]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        assert [isinstance(answer, EngineError) for answer in answers] == [False, True, True]
        assert len(engines.fleet.backends) == ranks
        engines.check()


@pytest.mark.parametrize("again", ["file", "request"])
async def test_a_server_that_comes_again_while_it_leaves_waits_until_it_has_left(tmp_path, again):
    listed = tmp_path / "engines"
    listing(listed, "http://a")
    async with world() as engines:
        engines.watch(listed)
        await until(lambda: engines.well("http://a"))
        old = (await engines.turn()).backend
        listing(listed)
        await until(lambda: not old.usable)
        if again == "file":
            listing(listed, "http://a")
            await until(lambda: "taken out" in engines.unreachable.get("http://a", ""))
        else:
            with pytest.raises(EngineError, match="taken out"):
                await engines.add("http://a")
        assert list(engines.fleet.backends.values()) == [old]
        engines.check()
        engines.end_turns()
        if again == "request":
            await until(lambda: not engines.urls())
            await engines.add("http://a")
        await until(lambda: engines.well("http://a"))
        assert (await engines.turn()).backend is not old


async def test_a_server_that_is_taken_out_again_before_it_has_left_does_not_come_again(tmp_path):
    listed = tmp_path / "engines"
    listing(listed, "http://a")
    async with world() as engines:
        engines.watch(listed)
        await until(lambda: engines.well("http://a"))
        await engines.turn()
        engines.take_out("http://a")
        listing(listed)
        await asyncio.sleep(0.05)
        listing(listed, "http://a")
        await until(lambda: engines.unreachable)
        engines.remove(engines.at("http://a"))
        engines.end_turns()
        await until(lambda: not engines.urls())
        await asyncio.sleep(0.05)
        assert not engines.urls()


async def test_a_server_that_is_given_up_while_it_is_asked_is_asked_no_more():
    async with world() as engines:
        engines.servers["http://a"].up = False
        await engines.start(["http://a"])
        for _ in range(20):
            await asyncio.sleep(0.001)
            engines.give_up("http://a")
        await asyncio.sleep(0.05)
        assert not engines.unreachable
        engines.servers["http://a"].up = True
        await asyncio.sleep(0.05)
        assert not engines.urls()


async def test_no_turn_goes_to_an_engine_that_was_taken_out_while_it_was_down():
    async with world() as engines:
        server = engines.servers["http://a"]
        (backend,) = await engines.add("http://a")
        await until(lambda: engines.well("http://a"))
        server.up = False
        await until(lambda: not backend.usable)
        backend.unlabelled += 1  # a call that has not noticed yet
        engines.remove([backend])
        server.up = True
        await asyncio.sleep(0.1)
        assert not backend.usable
        backend.unlabelled -= 1
        await until(lambda: not engines.urls())


async def test_a_server_with_more_ranks_than_there_may_be_engines_does_not_join_in_part():
    async with world("ab", ranks=3, max_engines=5) as engines:
        await engines.add("http://a")
        with pytest.raises(EngineError, match="limit"):
            await engines.add("http://b")
        assert engines.urls() == ["http://a"]


@pytest.mark.parametrize("seed", range(12))
async def test_any_history_leaves_every_server_once_or_not_at_all(seed, tmp_path):
    rng = random.Random(seed)
    urls = [f"http://{name}" for name in "abc"]
    listed = tmp_path / "engines"
    listing(listed)
    moments = iter(lambda: rng.random() * 0.01, None)
    async with world("abc", moments=moments, ranks=1 + seed % 2) as engines:
        adding, turns = [], []
        engines.watch(listed)
        await engines.start(rng.sample(urls, rng.randrange(3)))
        for _ in range(80):
            url = rng.choice(urls)
            what = rng.randrange(7)
            if what == 0:
                adding.append(asyncio.create_task(engines.add(url)))
            elif what == 1:
                engines.take_out(url)
            elif what == 2:
                listing(listed, *rng.sample(urls, rng.randrange(4)))
            elif what == 3:
                engines.servers[url].up = rng.random() < 0.7
            elif what == 4:
                turns.append(asyncio.create_task(engines.turn()))
            elif what == 5 and rng.random() < 0.5:
                engines.end_turns()
            else:
                await asyncio.sleep(rng.random() * 0.03)
            await asyncio.sleep(0)
            engines.check()
        for server in engines.servers.values():
            server.up = True
        listing(listed)

        def emptied():
            for url in urls:
                engines.take_out(url)
            engines.end_turns()
            asked = any(not task.done() for task in adding)
            return not (asked or engines.urls() or engines.unreachable)

        await until(emptied)
        await asyncio.sleep(0.05)
        assert emptied()
        assert not engines._feeds
        assert not len(engines.fleet.rooms)
        listing(listed, *urls)
        await until(lambda: engines.well(*urls))
        engines.check()
        dispatch = await engines.turn()
        assert engines.fleet.backends[dispatch.backend.backend_id] is dispatch.backend
        engines.end_turns()
        ended = await asyncio.gather(*adding, *turns, return_exceptions=True)
        faults = [each for each in ended if isinstance(each, Exception)]
        assert all(isinstance(each, EngineError | Unavailable) for each in faults), faults
