"""The engines of a coordinator: found, checked, followed, taken out."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from math import inf
from pathlib import Path

import aiohttp
import msgspec

from vllm_thunder.coordinator.config import CoordinatorConfig
from vllm_thunder.coordinator.dispatcher import Dispatcher
from vllm_thunder.coordinator.engines.client import EngineClient, EngineError, ServerFacts
from vllm_thunder.coordinator.engines.feed import Changes, Feed
from vllm_thunder.coordinator.engines.stock import StockEngines, engine_facts
from vllm_thunder.coordinator.fleet.backend import Backend
from vllm_thunder.coordinator.proxy.pool import origin_of
from vllm_thunder.program.errors import ConfigError, IntegrityError

__all__ = ["Engines", "engine_url"]

logger = logging.getLogger(__name__)

#: Seconds for which a coordinator that starts waits for its engines before it serves.
_START_SECONDS = 3.0
#: Seconds between two attempts to reach a server that has not answered yet.
_TRY_SECONDS = 1.0
#: Seconds between two looks at the file that lists engines.
_FILE_SECONDS = 1.0
#: Seconds between two looks at whether an engine that is taken out has ended its turns.
_LEAVING_SECONDS = 0.05


class Engines:
    """Every engine of the fleet has one :class:`Feed`, in a task of its own.

    ``on_down``: an engine was declared down, what it has in flight is lost.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        session: aiohttp.ClientSession,
        config: CoordinatorConfig,
        *,
        stock: StockEngines,
        api_key: str | None,
        on_down: Callable[[Backend], None],
    ):
        self._dispatcher = dispatcher
        self._fleet = dispatcher.fleet
        self._stock = stock
        self._session = session
        self._config = config
        self._api_key = api_key
        self._on_down = on_down
        self._clients: dict[str, EngineClient] = {}
        self._feeds: dict[Backend, Feed] = {}
        self._tasks: dict[Backend, asyncio.Task[None]] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._leaving: set[Backend] = set()
        #: What all engines have in common, as far as one has told; None: there is none.
        self.facts: ServerFacts | None = None
        #: Servers that did not answer yet, so that it is not known how many engines they are.
        self.unreachable: dict[str, str] = {}

    async def start(self, urls: Iterable[str]) -> None:
        """Add the servers. Those that do not answer are tried again until they do.

        Raises EngineError when two of those that answer cannot serve one fleet.
        """
        asked = {url: asyncio.create_task(self._facts_or_error(url)) for url in urls}
        if asked:
            await asyncio.wait(asked.values(), timeout=_START_SECONDS)
        for url, task in asked.items():
            told = task.result() if task.done() else EngineError(f"{url}: did not answer at once")
            task.cancel()
            if isinstance(told, EngineError):
                logger.warning("%s", told)
                self._try(url, str(told))
            else:
                self._join(url, told)

    async def add(self, url: str) -> list[Backend]:
        """Add a server that answers now; raises EngineError when it does not, does not fit, is one
        of the engines already, or has not been taken out to the end."""
        self._expect_new(url)
        return self._join(url, await self._facts(url))

    def remove(self, backends: Iterable[Backend]) -> None:
        """Take engines out: no further turn goes there, and when its turns have ended it is gone.
        What its programs have there is computed elsewhere."""
        for backend in backends:
            self.give_up(backend.url)  # it may have been leaving, and to come again
            if backend not in self._leaving:
                self._leaving.add(backend)
                self._fleet.left(backend)
                self._dispatcher.changed()
                self._spawn(self._end(backend))

    def at(self, name: str) -> list[Backend]:
        """The engines that ``name`` means: an id, or a server's URL with all its ranks."""
        backends = self._fleet.backends
        if name in backends:
            return [backends[name]]
        url = name.rstrip("/")
        return [backend for backend in backends.values() if backend.url == url]

    def give_up(self, url: str) -> bool:
        """Stop trying to reach a server that has not answered; False: none is called so."""
        return self.unreachable.pop(url.rstrip("/"), None) is not None

    def client(self, url: str) -> EngineClient:
        """To ask the server at ``url``."""
        client = self._clients.get(url)
        if client is None:
            client = self._clients[url] = EngineClient(
                self._session, url, self._api_key, self._config.engine_timeout
            )
        return client

    async def still_well(self, backend: Backend) -> bool:
        """An exchange with the engine failed: is it still to be used?"""
        feed = self._feeds.get(backend)
        return feed is not None and await feed.still_well()

    def watch(self, path: Path) -> None:
        """Add and take out servers as the file says: one URL a line, ``#`` begins a comment."""
        self._spawn(self._watch(path))

    def check_integrity(self) -> None:
        """Raise IntegrityError where what is followed are not the engines of the fleet."""
        found = []
        backends = set(self._fleet.backends.values())
        if set(self._feeds) != backends or set(self._tasks) != backends:
            found.append(f"{set(self._feeds)} are followed, {backends} are the engines")
        if not self._leaving <= backends:
            found.append(f"{self._leaving - backends} leave, and are no engines")
        staying = backends - self._leaving
        found += [f"{b!r} is not followed any more" for b in staying if self._tasks[b].done()]
        ranks: dict[str, set[int | None]] = {}
        for backend in backends:
            ranks.setdefault(backend.url, set()).add(backend.rank)
        found += [f"{url} is one engine and several" for url, of in ranks.items() if {None} < of]
        joined = self.unreachable.keys() & {backend.url for backend in staying}
        found += [f"{url} is an engine, and to become one" for url in joined]
        if found:
            raise IntegrityError("; ".join(found))

    async def stop(self) -> None:
        """End all tasks."""
        tasks = [*self._tasks.values(), *self._background]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- inside ------------------------------------------------------------------------

    def _join(self, url: str, facts: ServerFacts) -> list[Backend]:
        """To be called without a pause after the server has answered, raises EngineError: meanwhile
        it may have joined in another way."""
        self._expect_new(url)
        self._expect_fit(url, facts)
        if len(self._fleet.backends) + facts.ranks > self._config.max_engines:
            raise EngineError(f"{url}: {self._config.max_engines} engines are the limit")
        self.facts = _fuller(self.facts, facts)
        self.unreachable.pop(url, None)
        ranks = [None] if facts.ranks == 1 else list(range(facts.ranks))
        joined = []
        for rank in ranks:
            name = url if rank is None else f"{url}#{rank}"
            longest = facts.longest_context or inf
            backend = Backend(name, url, rank, longest, stock=not facts.knows_programs)
            self._fleet.joined(backend)
            self._follow(backend)
            joined.append(backend)
        logger.info("Engine %s joined with %d ranks", url, facts.ranks)
        return joined

    def _follow(self, backend: Backend) -> None:
        client = self.client(backend.url)
        follow: Callable[[], Awaitable[None]]
        if backend.stock:
            follow = partial(self._stock.follow, backend, client)
        else:
            timeout = self._config.engine_timeout
            follow = Changes(backend, client, self._dispatcher, timeout).follow
        feed = Feed(
            backend,
            client,
            self._dispatcher,
            check=self._check,
            follow=follow,
            on_down=self._on_down,
        )
        self._feeds[backend] = feed
        self._tasks[backend] = asyncio.create_task(feed.run())

    async def _check(self, backend: Backend) -> None:
        """A server that answers again may be another one by now."""
        facts = await self._facts(backend.url)
        self._expect_fit(backend.url, facts)
        self.facts = _fuller(self.facts, facts)
        if backend in self._leaving:  # else it would be used again
            raise EngineError(f"{backend.url}: is taken out, and has not ended its turns")
        if (backend.rank or 0) >= facts.ranks or backend.stock is facts.knows_programs:
            raise EngineError(
                f"{backend.url}: was started again as another kind of server; "
                "take it out and add it again"
            )

    def _expect_new(self, url: str) -> None:
        there = [backend for backend in self._fleet.backends.values() if backend.url == url]
        if any(backend in self._leaving for backend in there):
            raise EngineError(f"{url}: is being taken out, and its turns have not ended yet")
        if there:
            raise EngineError(f"{url}: is one of the engines already")

    def _expect_fit(self, url: str, facts: ServerFacts) -> None:
        known = self.facts
        if known is None:
            return
        differing = [
            f"{what} {theirs!r} where the fleet has {ours!r}"
            for what, ours, theirs in (
                ("serves", known.models, facts.models),
                ("has a longest context of", known.longest_context, facts.longest_context),
            )
            if ours != theirs
        ]
        ours, theirs = known.context_groups, facts.context_groups
        if ours is not None and theirs is not None and ours != theirs:
            differing.append(f"has KV blocks of {theirs} tokens where the fleet has {ours}")
        if known.tokens is not None and facts.tokens is not None and known.tokens != facts.tokens:
            differing.append("has another tokenizer")
        if differing:
            raise EngineError(f"{url}: {'; '.join(differing)}: it cannot serve in one fleet")

    async def _facts(self, url: str) -> ServerFacts:
        client = self.client(url)
        facts = await client.facts()
        if facts.knows_programs:
            return facts
        ranks = await engine_facts(client)
        groups: list[tuple[int, int | None]] = [(next(iter(ranks.values())).block_size, None)]
        return msgspec.structs.replace(facts, ranks=len(ranks), context_groups=groups)

    async def _facts_or_error(self, url: str) -> ServerFacts | EngineError:
        try:
            return await self._facts(url)
        except EngineError as error:
            return error

    def _try(self, url: str, problem: str) -> None:
        """Let the server join as soon as it can, unless it is given up before."""
        if url not in self.unreachable:
            self.unreachable[url] = problem
            self._spawn(self._keep_trying(url))

    async def _keep_trying(self, url: str) -> None:
        while url in self.unreachable:
            await asyncio.sleep(_TRY_SECONDS)
            told = await self._facts_or_error(url)
            if url not in self.unreachable:
                return
            try:
                if isinstance(told, EngineError):
                    raise told
                self._join(url, told)
            except EngineError as error:
                if self.unreachable[url] != str(error):
                    logger.warning("%s", error)
                self.unreachable[url] = str(error)

    async def _end(self, backend: Backend) -> None:
        while backend.running or backend.unlabelled:  # noqa: ASYNC110 - they end in many places
            await asyncio.sleep(_LEAVING_SECONDS)
        task = self._tasks[backend]
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        del self._tasks[backend], self._feeds[backend]
        self._leaving.discard(backend)
        self._dispatcher.removed(backend)
        if not self._fleet.backends:
            self.facts = None
        logger.info("Engine %s left", backend.backend_id)

    async def _watch(self, path: Path) -> None:
        listed: set[str] = set()
        while True:
            try:
                wanted = set(_lines(await asyncio.to_thread(path.read_text)))
            except (OSError, ConfigError, UnicodeDecodeError) as error:
                logger.warning("%s: %s; the engines stay what they were", path, error)
            else:
                for url in wanted - listed:
                    if all(backend in self._leaving for backend in self.at(url)):
                        self._try(url, "not asked yet")
                for url in listed - wanted:
                    self.unreachable.pop(url, None)
                    self.remove(self.at(url))
                listed = wanted
            await asyncio.sleep(_FILE_SECONDS)

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


def _fuller(known: ServerFacts | None, facts: ServerFacts) -> ServerFacts:
    """What is known of the fleet, and what one that fits tells beyond that."""
    if known is None:
        return facts
    return msgspec.structs.replace(
        known,
        tokens=facts.tokens if known.tokens is None else known.tokens,
        context_groups=(
            facts.context_groups if known.context_groups is None else known.context_groups
        ),
    )


def engine_url(text: str) -> str:
    """A server's address as it is kept: with its scheme, and without a slash at the end. Raises
    ConfigError."""
    url = text.strip()
    url = url if "//" in url else f"http://{url}"
    origin_of(url)
    url = url.rstrip("/")
    if url.endswith("/v1"):
        raise ConfigError(f"engine {url!r}: leave /v1 out, it is part of what is asked for")
    return url


def _lines(text: str) -> Iterable[str]:
    for line in text.splitlines():
        entry = line.split("#")[0].strip()
        if entry:
            yield engine_url(entry)
