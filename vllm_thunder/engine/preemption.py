"""Which running turn gives its blocks away when decoding outgrows memory."""

from collections.abc import Iterable, Mapping

from vllm.v1.request import Request

from vllm_thunder.program.program import Program

__all__ = ["cheapest_to_compute_again"]


def cheapest_to_compute_again(
    requests: Iterable[Request], program_of: Mapping[str, Program], block_size: int
) -> Request:
    """Of the lowest priority, turns that were due last; of several the first in ``requests``.

    Costs only grow while a turn runs, so the dearest one is never the victim of another: it ends,
    and two turns cannot push each other out for ever. ``program_of``: programs by the id of their
    requests. ``block_size``: tokens.
    """

    def rank(request: Request) -> tuple[int, bool, int]:
        program = program_of.get(request.request_id)
        if program is None:
            return -request.priority, False, request.num_computed_tokens
        kept = program.shared_resident_blocks * block_size  # others hold these: they stay
        return -request.priority, program.goes_first, max(request.num_computed_tokens - kept, 0)

    return min(requests, key=rank)
