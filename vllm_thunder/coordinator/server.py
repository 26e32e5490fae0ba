"""Puts the coordinator together and serves it until it is stopped."""

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp
import uvicorn
from starlette.types import ASGIApp

from vllm_thunder.coordinator.admin import build_admin
from vllm_thunder.coordinator.app import Coordinator
from vllm_thunder.coordinator.broadcast import Broadcast
from vllm_thunder.coordinator.calls import Calls
from vllm_thunder.coordinator.config import CoordinatorConfig
from vllm_thunder.coordinator.control import Control
from vllm_thunder.coordinator.dispatcher import Dispatcher
from vllm_thunder.coordinator.engines.engines import Engines
from vllm_thunder.coordinator.engines.stock import StockEngines
from vllm_thunder.coordinator.fleet.fleet import Fleet
from vllm_thunder.coordinator.json_log import log_call
from vllm_thunder.coordinator.metrics import Metrics
from vllm_thunder.coordinator.proxy.exchange import Exchange
from vllm_thunder.coordinator.proxy.pool import ConnectionPool
from vllm_thunder.coordinator.proxy.proxy import Proxy
from vllm_thunder.coordinator.replicas.replicas import Replicas
from vllm_thunder.coordinator.replicas.routes import ProgramRoutes
from vllm_thunder.program.config import ThunderConfig
from vllm_thunder.program.errors import ConfigError

if TYPE_CHECKING:
    from vllm_thunder.coordinator.tracing import Tracing

__all__ = ["Launch", "running_coordinator", "serve"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Launch:
    """What a coordinator is started with.

    ``urls``: servers of engines. ``engines_file``: a file that lists more of them and is watched.
    ``api_keys``: clients must have one of them. ``engine_api_key``: of the engines; None: the first
    of ``api_keys`` is theirs, too. ``stock_config``: how the books are kept of engines that do not
    know programs. ``replicas``: coordinators that share the programs, and ``replica``: which of
    them this one is; none: it has all programs that come to it. ``otlp_traces_endpoint``: where
    spans of model calls go; None: none are made.
    """

    config: CoordinatorConfig
    urls: Sequence[str] = ()
    engines_file: Path | None = None
    api_keys: Sequence[str] = ()
    engine_api_key: str | None = None
    stock_config: ThunderConfig = field(default_factory=ThunderConfig)
    replica: str | None = None
    replicas: Sequence[str] = ()
    otlp_traces_endpoint: str | None = None

    @property
    def own_key(self) -> str | None:
        """What engines are shown when the coordinator asks for itself."""
        return self.engine_api_key or next(iter(self.api_keys), None)

    @property
    def key_for_clients(self) -> str | None:
        """What they are shown in place of the key of a client, which was checked here then; None:
        it is left to them to check it."""
        return self.own_key if self.api_keys else None


@asynccontextmanager
async def running_coordinator(launch: Launch) -> AsyncIterator[tuple[Coordinator, Control]]:
    """The application and what may be done to it, while its engines are followed.

    Raises EngineError when two of the engines that answer cannot serve one fleet, ConfigError when
    spans cannot be sent where they are to go.
    """
    loop = asyncio.get_running_loop()
    config = launch.config
    fleet = Fleet(config)
    dispatcher = Dispatcher(fleet, loop.time)
    stock = StockEngines(dispatcher, launch.stock_config, config.host_cache_tokens, loop.time)
    pool = ConnectionPool()
    endpoint = launch.otlp_traces_endpoint
    tracing = None if endpoint is None else _tracing_to(endpoint)
    async with aiohttp.ClientSession(
        # vLLM closes connections that are idle for 5 s.
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=3),
        cookie_jar=aiohttp.DummyCookieJar(),
    ) as session:
        engines = Engines(
            dispatcher,
            session,
            config,
            stock=stock,
            api_key=launch.own_key,
            on_down=lambda backend: proxy.abandon(backend),
        )
        metrics = Metrics(dispatcher, engines, loop.time)

        def on_done(exchange: Exchange) -> None:
            metrics.ended(exchange)
            _learn(fleet, exchange)
            log_call(logger, exchange)

        replicas = None
        if launch.replica is not None:
            replicas = Replicas(
                launch.replica,
                launch.replicas,
                session,
                serves=lambda: any(backend.usable for backend in fleet.backends.values()),
                seconds=config.engine_timeout,
                on_down=lambda replica: proxy.abandon(replica),
            )
        proxy = Proxy(
            dispatcher,
            pool,
            calls=Calls(fleet, dispatcher.prompts, stock, loop.time),
            on_failure=engines.still_well,
            on_done=on_done,
            max_body_bytes=config.max_body_bytes,
            keepalive_seconds=config.keepalive,
            connect_seconds=config.engine_timeout,
            engine_key=launch.key_for_clients,
            replicas=replicas,
            tracing=tracing,
        )
        control = Control(dispatcher, engines, metrics, config, loop.time, stock)
        broadcast = Broadcast(fleet, engines, session, control.caches_reset, launch.key_for_clients)
        admin: ASGIApp = build_admin(control, replicas)
        if replicas is not None:
            admin = ProgramRoutes(admin, replicas, proxy)
        app = Coordinator(fleet, proxy, admin, broadcast, launch.api_keys, launch.own_key)
        try:
            await engines.start(launch.urls)
            if launch.engines_file is not None:
                engines.watch(launch.engines_file)
            if replicas is not None:
                replicas.start()
            yield app, control
        finally:
            if replicas is not None:
                await replicas.stop()
            await engines.stop()
            await control.stop()
            pool.close()
            if tracing is not None:
                await tracing.close()


async def serve(launch: Launch, server: uvicorn.Config) -> None:
    """Until SIGTERM or SIGINT, in the main thread. ``server``: where and how; its application is
    replaced."""
    async with running_coordinator(launch) as (app, control):
        server.app = app
        print(_begins(server, control), flush=True)  # stderr is the log's
        # When it has stopped, uvicorn raises the signal again for whoever was there before it: that
        # must not end the process, engines and collectors are still to be told.
        stops = (signal.SIGINT, signal.SIGTERM)
        before = [signal.signal(number, signal.SIG_IGN) for number in stops]
        try:
            await uvicorn.Server(server).serve()
        finally:
            for number, handler in zip(stops, before, strict=True):
                signal.signal(number, handler)


def _begins(server: uvicorn.Config, control: Control) -> str:
    """For whoever has started it by hand."""
    scheme = "https" if server.is_ssl else "http"
    up, unreachable = len(control.fleet.backends), len(control.engines.unreachable)
    text = f"vllm_thunder coordinate: {scheme}://{server.host}:{server.port}, {up} engines"
    if unreachable:
        text += f", {unreachable} servers that do not answer yet"
    return text if up or unreachable else text + ": POST /engines adds one"


def _tracing_to(endpoint: str) -> "Tracing":
    try:
        from vllm_thunder.coordinator.tracing import Tracing, exporter_to
    except ImportError as error:
        raise ConfigError(
            "--otlp-traces-endpoint needs the packages opentelemetry-sdk and "
            f"opentelemetry-exporter-otlp, which come with vLLM: {error}"
        ) from None
    try:
        return Tracing(exporter_to(endpoint))
    except ValueError as error:
        raise ConfigError(f"a variable OTEL_… of the environment cannot be used: {error}") from None


def _learn(fleet: Fleet, exchange: Exchange) -> None:
    """Where the time of the program's turn went."""
    if exchange.replica is not None:
        return
    program = fleet.get(exchange.program_id) if exchange.program_id is not None else None
    if program is not None and exchange.first_byte_seconds is not None:
        before = exchange.read_seconds + exchange.queue_seconds + exchange.first_byte_seconds
        program.profile.turn_ended(
            exchange.queue_seconds,
            exchange.first_byte_seconds,
            max(exchange.total_seconds - before, 0.0),
        )
