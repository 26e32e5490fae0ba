"""Memory in use by requests without a program."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager

__all__ = ["UnlabelledBlocks"]

#: Blocks are counted one by one at most this often (seconds): it takes a look at each.
_RECOUNT_SECONDS = 1.0


class UnlabelledBlocks:
    """Counts distinct blocks, so that a prefix which several requests share counts once.

    Between two full counts the sum over requests is corrected by the share of it that was
    distinct at the last one.
    """

    def __init__(self, managers: Sequence[SingleTypeKVCacheManager]):
        self._managers = managers
        self._requests: dict[str, None] = {}
        self._distinct_share = 1.0
        self._counted_at: float | None = None

    def __len__(self) -> int:
        """Requests, those that wait included."""
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def add(self, request_id: str) -> None:
        self._requests[request_id] = None

    def remove(self, request_id: str) -> None:
        del self._requests[request_id]
        if not self._requests:
            self._counted_at = None

    def blocks(self, now: float) -> int:
        """Blocks in use at ``now``, seconds."""
        if not self._requests:
            return 0
        used = [blocks for manager in self._managers for blocks in self._used(manager)]
        total = sum(len(blocks) - _passed(blocks) for blocks in used)
        if total == 0 or len(used) < 2:
            return total
        if self._counted_at is None or now - self._counted_at >= _RECOUNT_SECONDS:
            distinct = {b.block_id for blocks in used for b in blocks if not b.is_null}
            self._distinct_share = len(distinct) / total
            self._counted_at = now
        return round(total * self._distinct_share)

    def _used(self, manager: SingleTypeKVCacheManager) -> Iterator[Sequence[KVCacheBlock]]:
        """Of the requests that have blocks; a backlog of those that wait costs nothing."""
        known, blocks_of = self._requests, manager.req_to_blocks
        ids = known if len(known) < len(blocks_of) else [r for r in blocks_of if r in known]
        return (blocks for r in ids if (blocks := blocks_of.get(r)))


def _passed(blocks: Sequence[KVCacheBlock]) -> int:
    """Blocks in front that a sliding window has passed: null blocks stand where they were."""
    if not blocks[0].is_null:
        return 0
    return bisect_left(blocks, True, key=lambda block: not block.is_null)
