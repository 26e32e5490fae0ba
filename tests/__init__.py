"""Tests mirror the package. The package comes first: it patches vLLM as vLLM is imported."""

import vllm_thunder  # noqa: F401
