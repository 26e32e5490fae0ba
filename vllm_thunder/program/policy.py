"""Policies by name."""

from vllm_thunder.program.config import ThunderConfig
from vllm_thunder.program.cost import ContextBlocks
from vllm_thunder.program.errors import ConfigError
from vllm_thunder.program.fcfs import FcfsPolicy
from vllm_thunder.program.paper import PaperPolicy
from vllm_thunder.program.table import ProgramTable
from vllm_thunder.program.thunder import ThunderPolicy

__all__ = ["make_policy"]


def make_policy(config: ThunderConfig, table: ProgramTable, blocks_of: ContextBlocks) -> FcfsPolicy:
    """The policy that ``config.policy`` names, for a model with contexts of ``blocks_of``."""
    match config.policy:
        case "fcfs":
            return FcfsPolicy(config, table)
        case "paper":
            return PaperPolicy(config, table, blocks_of)
        case "thunder":
            return ThunderPolicy(config, table, blocks_of)
        case name:
            raise ConfigError(f"--thunder-policy: no policy is called {name!r}")
