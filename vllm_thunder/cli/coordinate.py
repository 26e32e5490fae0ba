"""``vllm_thunder coordinate``: one program-aware queue in front of several engines."""

import argparse
import asyncio
import dataclasses
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_thunder.coordinator.config import CoordinatorConfig, flag_of
from vllm_thunder.program.config import ThunderConfig
from vllm_thunder.program.errors import ConfigError
from vllm_thunder.program.settings import range_text

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from vllm_thunder.coordinator.server import Launch

__all__ = ["add_parser", "launch_of", "run"]

#: Where keys may come from, so that they are in no process list.
_KEY_VARIABLE, _ENGINE_KEY_VARIABLE = "VLLM_THUNDER_API_KEY", "VLLM_THUNDER_ENGINE_API_KEY"

#: Seconds for which a connection without a request is kept: longer than proxies' usual 60.
_KEEP_ALIVE_SECONDS = 75


def add_parser(subparsers: "_SubParsersAction[Any]") -> None:
    parser = subparsers.add_parser(
        "coordinate",
        help="one waiting queue over many engines",
        description=(
            "An OpenAI-compatible server in front of vllm_thunder engines, and of stock vLLM or "
            "SGLang servers. Programs wait here until an engine has room for them, and go where "
            "their KV is, or where they fit best."
        ),
    )
    parser.add_argument(
        "--engines",
        "--backends",
        default="",
        metavar="URL,URL,...",
        help="servers; each data-parallel rank of one is an engine",
    )
    parser.add_argument(
        "--engines-file",
        type=Path,
        metavar="FILE",
        help="a file with the URL of a server in each line, watched for changes",
    )
    parser.add_argument("--host", default="0.0.0.0", help="address to listen on (%(default)s)")
    parser.add_argument("--port", type=_port, default=8300, help="(%(default)s)")
    parser.add_argument(
        "--api-key",
        action="append",
        default=[],
        help=f"clients must have it; may be repeated; also ${_KEY_VARIABLE}. Without one the "
        "clients' keys are passed on, and engines refuse",
    )
    parser.add_argument(
        "--engine-api-key",
        help="what engines are shown with the coordinator's own questions, and in place of keys "
        f"that --api-key has checked; also ${_ENGINE_KEY_VARIABLE}; else the first --api-key. "
        "Without --api-key the coordinator's own routes want it, too",
    )
    parser.add_argument(
        "--replicas",
        metavar="URL,URL,...",
        help="all coordinators that share the programs, this one included; the same on each. "
        "A program's requests go to the one that it belongs to",
    )
    parser.add_argument("--replica", metavar="URL", help="which of --replicas this one is")
    parser.add_argument("--ssl-keyfile", type=Path, help="serve HTTPS with this key")
    parser.add_argument("--ssl-certfile", type=Path, help="and this certificate")
    parser.add_argument("--root-path", default="", help="path that a proxy in front takes away")
    parser.add_argument(
        "--shutdown-timeout",
        type=_seconds,
        default=30.0,
        metavar="SECONDS",
        help="for which requests in flight may go on after SIGTERM (%(default)s)",
    )
    parser.add_argument(
        "--log-level",
        default="warning",
        choices=("debug", "info", "warning", "error"),
        help="of the log, lines of JSON on stderr; info: one for every model call, warning: for "
        "those that did not end well (%(default)s)",
    )
    parser.add_argument(
        "--otlp-traces-endpoint",
        metavar="URL",
        help="send OpenTelemetry spans of model calls there; engines with the same flag make "
        "children of them",
    )
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="YAML with the settings below by their names, with dashes as underscores, and with "
        "those of Dynamo's program scheduler; flags come before it",
    )
    settings = parser.add_argument_group("settings")
    for field in dataclasses.fields(CoordinatorConfig):
        allowed = range_text(field)
        text = f"{field.metadata['help']} (default: {field.default}, range: {allowed})"
        kind: Any = int if field.type is int else float
        settings.add_argument(
            flag_of(field.name),
            type=kind,
            default=argparse.SUPPRESS,
            help=text.replace("%", "%%"),
            metavar="N" if field.type is int else "X",
        )


def run(args: argparse.Namespace) -> int:
    """Serve until stopped; 1 when the engines do not fit together. Raises ConfigError."""
    import uvicorn

    from vllm_thunder.coordinator.client_protocol import ClientProtocol
    from vllm_thunder.coordinator.json_log import JsonLines
    from vllm_thunder.coordinator.server import serve

    launch = launch_of(args)
    log = logging.StreamHandler()
    log.setFormatter(JsonLines())
    logging.basicConfig(level=args.log_level.upper(), handlers=[log])
    if (args.ssl_keyfile is None) is not (args.ssl_certfile is None):
        raise ConfigError("--ssl-keyfile and --ssl-certfile go together")
    server = uvicorn.Config(
        app="",
        host=args.host,
        port=args.port,
        http=ClientProtocol,
        ws="none",
        lifespan="off",
        interface="asgi3",
        root_path=args.root_path,
        log_config=None,
        access_log=False,
        # Answers are the engines', headers included.
        proxy_headers=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=max(round(args.shutdown_timeout), 1),
        ssl_keyfile=args.ssl_keyfile,
        ssl_certfile=args.ssl_certfile,
    )
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(serve(launch, server))
    return 0


def launch_of(args: argparse.Namespace) -> "Launch":
    """What the flags, the configuration file and the environment say. Raises ConfigError, and
    EngineError for an address that is none."""
    from vllm_thunder.coordinator.config_file import read_config
    from vllm_thunder.coordinator.engines.engines import engine_url
    from vllm_thunder.coordinator.replicas.replicas import replica_urls
    from vllm_thunder.coordinator.server import Launch

    given = {
        field.name: getattr(args, field.name)
        for field in dataclasses.fields(CoordinatorConfig)
        if hasattr(args, field.name)
    }
    settings = read_config(args.config)
    config = CoordinatorConfig(**{**settings.coordinator, **given})
    keys = args.api_key or [key for key in [os.environ.get(_KEY_VARIABLE)] if key]
    engine_key = args.engine_api_key or os.environ.get(_ENGINE_KEY_VARIABLE)
    urls = [engine_url(text) for text in args.engines.split(",") if text.strip()]
    if repeated := {url for url in urls if urls.count(url) > 1}:
        raise ConfigError(f"--engines: {', '.join(sorted(repeated))} is named twice")
    if args.engines_file is not None and not args.engines_file.is_file():
        raise ConfigError(f"--engines-file: {args.engines_file} is not a file")
    replica, replicas = replica_urls(args.replicas, args.replica)
    return Launch(
        config=config,
        urls=urls,
        engines_file=args.engines_file,
        api_keys=keys,
        engine_api_key=engine_key,
        stock_config=ThunderConfig(**settings.engines),
        replica=replica,
        replicas=replicas,
        otlp_traces_endpoint=args.otlp_traces_endpoint,
    )


def _loop_factory() -> Any:
    """uvloop's where it is installed, as in vLLM's own server."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def _port(text: str) -> int:
    if not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port, a number from 0 to 65535")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 86_400:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0 to 86400")
    return value
