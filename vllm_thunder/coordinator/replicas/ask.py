"""One request, asked of the replica that its program belongs to."""

from vllm_thunder.coordinator.proxy.connection import EngineLost
from vllm_thunder.coordinator.proxy.heads import RequestHead
from vllm_thunder.coordinator.proxy.upstream import PERHAPS_DOWN, Upstream
from vllm_thunder.coordinator.replicas.replicas import Replica, Replicas

__all__ = ["first_of_answer"]


async def first_of_answer(
    replicas: Replicas, replica: Replica, upstream: Upstream, head: RequestHead, body: bytes
) -> bytes:
    """The first bytes of the answer's body, b"" for none; the rest is at ``upstream.connection``.

    ``head`` says who passes it on. Raises EngineLost where not a byte came, or where the replica
    says that it cannot serve turns: then it is to be served here.
    """
    await upstream.ask(replica, head, body, 0.0)
    connection = upstream.connection
    assert connection is not None
    if connection.status in PERHAPS_DOWN and not await replicas.still_well(replica):
        raise EngineLost(f"it answered {connection.status} and cannot serve")
    return await connection.chunk()
