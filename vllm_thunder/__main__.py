"""``python -m vllm_thunder``: the console command without its script on PATH."""

import sys

from vllm_thunder.cli.main import main

if __name__ == "__main__":
    # A spawned engine core must import this package before vLLM, and does so when it re-runs
    # the main module. Spawn skips a package's __main__ by name; without a spec it goes by path.
    __spec__ = None
    sys.exit(main())
