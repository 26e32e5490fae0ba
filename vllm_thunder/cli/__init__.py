"""The ``vllm_thunder`` command."""
