"""The package's version and the one vLLM version that its patches fit."""

__version__ = "0.1.0"
VLLM_VERSION = "0.32.0"
