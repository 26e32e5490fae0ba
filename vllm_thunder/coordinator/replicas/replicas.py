"""The coordinators beside this one: which of them is alive, and which program is whose."""

import asyncio
import errno
import logging
from collections.abc import Callable, Sequence
from typing import Any

import aiohttp
import msgspec

from vllm_thunder.coordinator.engines.engines import engine_url
from vllm_thunder.coordinator.replicas.rendezvous import Rendezvous
from vllm_thunder.program.errors import ConfigError

__all__ = ["Replica", "Replicas", "replica_urls"]

logger = logging.getLogger(__name__)

#: Seconds between two looks at whether a replica is alive.
_LOOK_SECONDS = 1.0

_MACHINE_GONE = frozenset({errno.EHOSTUNREACH, errno.ENETUNREACH})


class Replica:
    """Another coordinator. ``alive``: it said last that it can serve turns, so programs are its
    own; ``problem``: why not, for people."""

    __slots__ = ("alive", "problem", "rank", "url")

    def __init__(self, url: str):
        self.url = url
        self.rank: int | None = None
        self.alive = False
        self.problem: str | None = "it was not asked yet"


class _Health(msgspec.Struct):
    """What a replica says of itself at ``/health``."""

    replica: str | None = None
    replica_urls: list[str] | None = None


_decoder = msgspec.json.Decoder(_Health)


class Replicas:
    """Programs belong to the replicas that are alive, by :class:`Rendezvous`.

    ``own``: the URL of this one, one of ``urls``. ``serves()``: whether this one can serve turns;
    while it cannot it is dead like any other that says so. ``seconds``: without an answer after
    which a replica is taken for dead. ``on_down(replica)``: it hangs, or its machine is gone, so
    what it was asked is lost.
    """

    def __init__(
        self,
        own: str,
        urls: Sequence[str],
        session: aiohttp.ClientSession,
        *,
        serves: Callable[[], bool],
        seconds: float,
        on_down: Callable[[Replica], None],
    ):
        self.own = own
        self.others = {url: Replica(url) for url in urls if url != own}
        self._rendezvous = Rendezvous(urls)
        self._session = session
        self._serves = serves
        self._seconds = seconds
        self._on_down = on_down
        self._looks: dict[Replica, asyncio.Task[None]] = {}
        self._tasks: list[asyncio.Task[None]] = []

    def owner(self, program_id: str) -> Replica | None:
        """The replica that the program belongs to now; None: this one."""
        alive = [url for url, replica in self.others.items() if replica.alive]
        if not alive:
            return None
        if self._serves():
            alive.append(self.own)
        return self.others.get(self._rendezvous.owner(program_id, alive))

    def look(self, replica: Replica) -> "asyncio.Task[None]":
        """Ask the replica now how it is; the task ends when ``alive`` says it."""
        task = self._looks.get(replica)
        if task is None:
            task = self._looks[replica] = asyncio.create_task(self._look(replica))
            task.add_done_callback(lambda _: self._looks.pop(replica))
        return task

    async def still_well(self, replica: Replica) -> bool:
        """Something went wrong there: is it alive?"""
        await asyncio.wait({self.look(replica)})
        return replica.alive

    def start(self) -> None:
        """Follow the others. Until one has answered, its programs belong to the rest."""
        self._tasks = [asyncio.create_task(self._follow(each)) for each in self.others.values()]

    async def stop(self) -> None:
        """End all tasks."""
        tasks = [*self._tasks, *self._looks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def urls(self) -> list[str]:
        """All of them, this one included, in an order that is the same on each."""
        return sorted([self.own, *self.others])

    def describe(self) -> dict[str, Any]:
        """Which one this is, and how all of them are."""
        states = {url: (each.alive, each.problem) for url, each in self.others.items()}
        serves = self._serves()
        states[self.own] = (serves, None if serves else "no engine can be used")
        return {
            "replica": self.own,
            "replicas": [
                {
                    "url": url,
                    "health": "up" if states[url][0] else "down",
                    "problem": states[url][1],
                }
                for url in self.urls()
            ],
        }

    # -- inside ------------------------------------------------------------------------

    async def _follow(self, replica: Replica) -> None:
        while True:
            await asyncio.wait({self.look(replica)})
            await asyncio.sleep(_LOOK_SECONDS)

    async def _look(self, replica: Replica) -> None:
        was_alive, lost = replica.alive, False
        try:
            replica.problem = await self._problem_of(replica)
        except TimeoutError:
            replica.problem, lost = f"no answer within {self._seconds:g} s", True
        except (aiohttp.ClientError, OSError, ValueError) as error:
            replica.problem = str(error) or repr(error)
            # One that is being stopped refuses too, and still ends what it has begun; when it is
            # gone its connections break by themselves. Those to a machine that is gone do not.
            lost = getattr(error, "errno", None) in _MACHINE_GONE
        replica.alive = replica.problem is None
        if replica.alive is not was_alive:
            logger.warning("Replica %s: %s", replica.url, replica.problem or "is alive")
        if lost:
            self._on_down(replica)

    async def _problem_of(self, replica: Replica) -> str | None:
        async with self._session.get(
            replica.url + "/health",
            timeout=aiohttp.ClientTimeout(total=self._seconds),
            allow_redirects=False,
        ) as answer:
            status, body = answer.status, await answer.read()
        if status != 200:
            return f"it says that it cannot serve ({status})"
        try:
            told = _decoder.decode(body)
        except msgspec.DecodeError:
            told = _Health()
        if told.replica != replica.url:
            return f"who answers there is {told.replica or 'no replica'}"
        if told.replica_urls != self.urls():
            return "it was started with other --replicas"
        return None


def replica_urls(listed: str | None, own: str | None) -> tuple[str | None, list[str]]:
    """What ``--replica`` and ``--replicas`` say: which one this is, and all of them.

    (None, []) without both. Raises ConfigError.
    """
    if listed is None and own is None:
        return None, []
    if listed is None or own is None:
        raise ConfigError("--replicas, all of them, and --replica, this one, go together")
    urls = [_url(text, "--replicas") for text in listed.split(",") if text.strip()]
    if repeated := {url for url in urls if urls.count(url) > 1}:
        raise ConfigError(f"--replicas: {', '.join(sorted(repeated))} is named twice")
    this = _url(own, "--replica")
    if this not in urls:
        known = ", ".join(urls) or "none"
        raise ConfigError(f"--replica: {this} is none of --replicas, which names {known}")
    return this, urls


def _url(text: str, flag: str) -> str:
    try:
        return engine_url(text)
    except ConfigError as error:
        raise ConfigError(f"{flag}: {str(error).removeprefix('engine ')}") from error
