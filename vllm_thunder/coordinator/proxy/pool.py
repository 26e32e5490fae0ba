"""Connections to engines that can be used again."""

import asyncio
import re
import ssl
from collections import deque
from functools import lru_cache
from typing import NamedTuple
from urllib.parse import urlsplit

from vllm_thunder.coordinator.proxy.connection import Connection, EngineLost
from vllm_thunder.program.errors import ConfigError

__all__ = ["ConnectionPool", "Origin", "origin_of"]


#: A URL that can stand in a request as it is.
_PLAIN = re.compile(r"[!-~]+")


class Origin(NamedTuple):
    """Where a server is. ``host_header`` as a request names it; ``prefix`` comes before its paths,
    and has no slash at its end."""

    host: str
    port: int
    tls: bool
    host_header: bytes
    prefix: bytes


@lru_cache(maxsize=4096)
def origin_of(url: str) -> Origin:
    """The server at ``url``; ConfigError if it is not an absolute http or https URL."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigError(f"engine {url!r}: {error}") from None
    if parts.scheme not in ("http", "https") or not host or not _PLAIN.fullmatch(url):
        raise ConfigError(f"engine {url!r}: must be http://HOST[:PORT] or https://HOST[:PORT]")
    if parts.username is not None or parts.query or parts.fragment:
        raise ConfigError(f"engine {url!r}: may hold a path, but no user, query or fragment")
    tls = parts.scheme == "https"
    prefix = parts.path.rstrip("/")
    return Origin(host, port or (443 if tls else 80), tls, parts.netloc.encode(), prefix.encode())


class ConnectionPool:
    """Idle connections by server, the one used last first.

    ``idle_seconds``: for how long one is kept; servers close theirs too, vLLM after 5 seconds, and
    what is sent in that moment is lost. ``tls``: how https engines are verified; None: by the
    system's authorities.
    """

    def __init__(self, *, idle_seconds: float = 4.0, tls: ssl.SSLContext | None = None):
        self._idle_seconds = idle_seconds
        self._tls = tls
        self._idle: dict[Origin, deque[Connection]] = {}
        self._sweep: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return sum(map(len, self._idle.values()))

    def take(self, origin: Origin) -> Connection | None:
        """An idle connection, no longer in here; None if there is none."""
        idle = self._idle.get(origin)
        while idle:
            connection = idle.pop()
            if connection.reusable:
                return connection
            connection.transport.close()
        return None

    async def connect(self, origin: Origin) -> Connection:
        """A new connection; EngineLost if the server cannot be reached."""
        loop = asyncio.get_running_loop()
        if origin.tls and self._tls is None:
            self._tls = ssl.create_default_context()
        context = self._tls if origin.tls else None
        try:
            _, connection = await loop.create_connection(
                lambda: Connection(loop, origin), origin.host, origin.port, ssl=context
            )
        except OSError as error:
            raise EngineLost(f"no connection to {origin.host}:{origin.port}: {error}") from None
        return connection

    def give_back(self, connection: Connection) -> None:
        """The exchange on it is over, or given up: keep it, or close it at once."""
        if not connection.reusable:
            connection.abort("given up")
            return
        loop = asyncio.get_running_loop()
        connection.rest(loop.time())
        self._idle.setdefault(connection.origin, deque()).append(connection)
        if self._sweep is None:
            self._sweep = loop.call_later(self._idle_seconds, self._close_old)

    def close(self) -> None:
        """Close all that are idle."""
        if self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None
        for idle in self._idle.values():
            for connection in idle:
                connection.transport.close()
        self._idle.clear()

    def _close_old(self) -> None:
        self._sweep = None
        loop = asyncio.get_running_loop()
        oldest = loop.time() - self._idle_seconds
        for origin, idle in list(self._idle.items()):
            while idle and (idle[0].idle_since <= oldest or not idle[0].reusable):
                idle.popleft().transport.close()
            if not idle:
                del self._idle[origin]
        if self._idle:
            first = min(idle[0].idle_since for idle in self._idle.values())
            self._sweep = loop.call_at(first + self._idle_seconds, self._close_old)
