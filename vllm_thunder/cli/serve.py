"""``vllm_thunder serve``: ``vllm serve`` with the program scheduler, its flags and its routes."""

import argparse
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm_thunder.patching.installed import verify
from vllm_thunder.program.config import CONFIG_KEY, POLICIES, ThunderConfig, flag_of
from vllm_thunder.program.errors import ConfigError
from vllm_thunder.program.settings import range_text

if TYPE_CHECKING:
    from vllm.utils.argparse_utils import FlexibleArgumentParser

__all__ = ["MIDDLEWARE", "SCHEDULER", "build_parsers", "configure", "main"]

SCHEDULER = "vllm_thunder.engine.ProgramScheduler"
MIDDLEWARE = "vllm_thunder.engine.http.ProgramMiddleware"

#: Without an underscore: ``--help=GROUP`` turns those into dashes before it compares.
_GROUP = "vllm-thunder"

#: Where the parsed flags keep our settings.
_DEST = "thunder_"


def main(argv: Sequence[str]) -> int:
    """Serve until stopped. ``argv`` starts with ``serve``.

    Exits with 2 for flags that are unknown, invalid, or cannot go together, before any model is
    loaded. Raises PatchError where the installed vLLM is not the one that the patches fit.
    """
    verify()

    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.logger import configure_logging_from_args

    cli_env_setup()
    parser, serve_parser = build_parsers()
    args = parser.parse_args(list(argv))
    try:
        configure(args)
    except ConfigError as error:
        serve_parser.error(str(error))
    configure_logging_from_args(args)
    ServeSubcommand().validate(args)
    ServeSubcommand.cmd(args)
    return 0


def build_parsers() -> tuple["FlexibleArgumentParser", "FlexibleArgumentParser"]:
    """The root parser, which takes ``serve`` and its flags, and the parser of ``serve`` itself.

    Everything that vLLM's parsers do works: ``--help=GROUP``, ``--config FILE``, JSON by dots.
    """
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser(prog="vllm_thunder")
    serve_parser = ServeSubcommand().subparser_init(parser.add_subparsers(dest="subparser"))
    _add_settings(serve_parser)
    return parser, serve_parser


def configure(args: argparse.Namespace) -> None:
    """Make parsed ``vllm serve`` arguments serve programs; settings go to ``additional_config``,
    which reaches every engine core.

    Raises ConfigError for a setting out of range and for flags that bypass the scheduler, our
    routes, or the prefix cache.
    """
    additional = args.additional_config or {}
    if not isinstance(additional, dict):
        raise ConfigError("--additional-config: must be a JSON object")
    settings = additional.get(CONFIG_KEY, {})
    if not isinstance(settings, dict):
        raise ConfigError(f"--additional-config: {CONFIG_KEY} must be a JSON object")
    given = {
        field.name: getattr(args, _DEST + field.name)
        for field in dataclasses.fields(ThunderConfig)
        if hasattr(args, _DEST + field.name)
    }
    config = ThunderConfig.from_dict({**settings, **given})
    _refuse_bypasses(args, config)
    args.additional_config = {**additional, CONFIG_KEY: config.to_dict()}
    args.scheduler_cls = SCHEDULER
    args.middleware = [*args.middleware, MIDDLEWARE]


def _refuse_bypasses(args: argparse.Namespace, config: ThunderConfig) -> None:
    from vllm import envs

    if args.scheduler_cls not in (None, SCHEDULER):
        raise ConfigError(
            f"--scheduler-cls: vllm_thunder serve runs {SCHEDULER}, not {args.scheduler_cls}; "
            "use vllm serve for another scheduler"
        )
    if args.grpc:
        raise ConfigError("--grpc: programs are named over HTTP; the gRPC server bypasses that")
    if envs.VLLM_USE_RUST_FRONTEND:
        raise ConfigError(
            "VLLM_USE_RUST_FRONTEND: the Rust front end bypasses the middleware that names "
            "programs; unset it"
        )
    if args.enable_prefix_caching is False and config.policy != "fcfs":
        raise ConfigError(
            "--no-enable-prefix-caching: programs keep their context in the prefix cache; leave "
            f"it on, or use {flag_of('policy')} fcfs"
        )
    for name in ("kv_transfer_config", "ec_transfer_config", "kv_offloading_size"):
        if getattr(args, name) is not None:
            raise ConfigError(
                f"--{name.replace('_', '-')}: KV connectors and prefill/decode split are not "
                "supported together with program scheduling"
            )


def _add_settings(parser: "FlexibleArgumentParser") -> None:
    """A flag for every field of ThunderConfig, in ``--help`` and in a group of its own."""
    parser.usage = "vllm_thunder serve [model_tag] [options]"
    group = parser.add_argument_group(
        _GROUP, "Settings of the program scheduler: every --thunder-... flag."
    )
    lines = []
    for field in dataclasses.fields(ThunderConfig):
        text = f"{field.metadata['help']} (default: {field.default}{_in_range(field, ', range: ')})"
        lines.append(f"  {flag_of(field.name)}\n      {text}")
        kind: dict[str, Any] = (
            {"choices": POLICIES} if field.name == "policy" else {"type": _parser_of(field)}
        )
        group.add_argument(
            flag_of(field.name),
            dest=_DEST + field.name,
            # Absent unless given: --additional-config may set it instead.
            default=argparse.SUPPRESS,
            help=text.replace("%", "%%"),
            **kind,
        )
    parser.epilog = (
        f"{_GROUP} (also --help={_GROUP}):\n"
        + "\n".join(lines)
        + "\n\nFor full list:            vllm_thunder serve --help=all\n"
        "For a section:            vllm_thunder serve --help=ModelConfig\n"
        "For a flag:               vllm_thunder serve --help=max-model-len\n"
    )


def _parser_of(field: "dataclasses.Field[Any]") -> Any:
    kind = field.type
    assert kind in (int, float), f"no flag type for {field.name}: {kind}"

    def parse(text: str) -> Any:
        try:
            return kind(text)
        except ValueError:
            name = "an integer" if kind is int else "a number"
            raise argparse.ArgumentTypeError(
                f"{text!r} is not {name}{_in_range(field, ' in ')}"
            ) from None

    return parse


def _in_range(field: "dataclasses.Field[Any]", lead: str) -> str:
    allowed = range_text(field)
    return lead + allowed if allowed else ""
