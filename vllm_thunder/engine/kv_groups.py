"""What vLLM's KV-cache groups make of a context."""

from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    get_kv_cache_spec_sliding_window,
)

__all__ = ["group_sizes"]


def group_sizes(config: KVCacheConfig) -> list[tuple[int, int | None]]:
    """For every group its block size and the tokens that it keeps (None: all)."""
    return [_size(group.kv_cache_spec) for group in config.kv_cache_groups]


def _size(spec: KVCacheSpec) -> tuple[int, int | None]:
    if isinstance(spec, MambaSpec):
        return spec.block_size, spec.block_size
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return spec.block_size, spec.attention_chunk_size
    return spec.block_size, get_kv_cache_spec_sliding_window(spec)
