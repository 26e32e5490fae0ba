"""Several coordinators of one set, on real sockets in front of the same engines."""

import asyncio
import socket
from collections.abc import Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import uvicorn

from tests.coordinator.program_engine import launch, page, until, until_up
from vllm_thunder.coordinator.client_protocol import ClientProtocol
from vllm_thunder.coordinator.config import CoordinatorConfig
from vllm_thunder.coordinator.control import Control
from vllm_thunder.coordinator.proxy.proxy import Proxy
from vllm_thunder.coordinator.replicas.rendezvous import Rendezvous
from vllm_thunder.coordinator.server import running_coordinator


class Node:
    """One coordinator: ``proxy`` and ``control`` are its inside."""

    def __init__(self) -> None:
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.control: Control
        self.proxy: Proxy
        self._stack = AsyncExitStack()
        self._server: uvicorn.Server | None = None

    async def start(self, started: Any) -> None:
        app, self.control = await self._stack.enter_async_context(running_coordinator(started))
        self.proxy = app._proxy
        config = uvicorn.Config(
            app,
            http=ClientProtocol,
            log_config=None,
            lifespan="off",
            server_header=False,
            date_header=False,
        )
        self._server = uvicorn.Server(config)
        self._serving = asyncio.create_task(self._server.serve([self.socket]))
        await until(lambda: self._server.started)

    async def stop(self) -> None:
        """As SIGTERM: it takes nothing new, and ends when what it has begun has ended."""
        server, self._server = self._server, None
        assert server is not None
        server.should_exit = True
        await self._serving
        await self._stack.aclose()

    async def kill(self) -> None:
        """As kill -9 for all others: nothing listens, every connection is reset."""
        server, self._server = self._server, None
        if server is None:
            return
        for listening in server.servers:
            listening.close()
        self.socket.close()
        for connection in list(server.server_state.connections):
            connection.transport.abort()
        server.should_exit = server.force_exit = True
        await self._serving
        self.control.fleet.check_integrity()
        await self._stack.aclose()

    @property
    def held(self) -> int:
        return self.control.fleet.queue.held_turns

    async def health(self) -> dict[str, str]:
        """Of all replicas by their URLs, as it says."""
        listed = (await page(self.port, "/status"))["replicas"]
        return {each["url"]: each["health"] for each in listed}


class Nodes(list[Node]):
    def id_of(self, node: Node, number: int = 0) -> str:
        """The id of a program that is this node's while all are alive; another ``number``, another
        id."""
        urls = [each.url for each in self]
        rendezvous = Rendezvous(urls)
        ids = (f"p{n}" for n in range(1_000_000))
        own = (name for name in ids if rendezvous.owner(name, urls) == node.url)
        return [next(own) for _ in range(number + 1)][number]


@asynccontextmanager
async def replica_set(
    count: int,
    engines: Any,
    *,
    config: CoordinatorConfig | None = None,
    extra: Any = (),
    **settings: Any,
):
    """``engines``: of all, or a function that gives those of a node by its number; ``extra``: more
    URLs of replicas, or such a function."""
    nodes = Nodes(Node() for _ in range(count))
    engines_of: Callable[[int], Any] = engines if callable(engines) else lambda number: engines
    extra_of: Callable[[int], Any] = extra if callable(extra) else lambda number: extra
    try:
        for number, node in enumerate(nodes):
            urls = [*(each.url for each in nodes), *extra_of(number)]
            own = engines_of(number)
            shared = {"replica": node.url, "replicas": urls[number:] + urls[:number]}
            await node.start(launch(own, config, **{**shared, **settings}))
        for number, node in enumerate(nodes):
            await until_up(node.control, len(engines_of(number)))
        yield nodes
        for node in nodes:
            if node._server is not None:
                await until(lambda node=node: not node.proxy.ongoing)
                assert node.held == 0
    finally:
        for node in nodes:
            await node.kill()


async def all_alive(nodes: Nodes) -> None:
    """Wait until all say that all are."""
    for node in nodes:
        others = node.proxy.replicas.others.values()
        await until(lambda others=others: all(each.alive for each in others))
