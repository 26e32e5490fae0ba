"""vLLM's own tests of its scheduler core, run with our scheduler and block pool in their place."""
