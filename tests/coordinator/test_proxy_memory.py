"""What a request took is free when it is over, not when the garbage collector comes to it."""

import gc

import pytest

from tests.coordinator.fake_engine import FakeEngine, chunked, whole
from tests.coordinator.front import CHAT, Client, post, running_front

CALLS = 10


@pytest.fixture
def garbage():
    """Tells the types of what has become unreachable in cycles since ``gc.collect()``."""

    def found():
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        gc.set_debug(0)
        types = {type(each).__qualname__ for each in gc.garbage}
        gc.garbage.clear()
        return types

    gc.disable()
    yield found
    gc.set_debug(0)
    gc.enable()


@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
@pytest.mark.parametrize("held", [False, True], ids=["at once", "held"])
@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
async def test_a_request_that_is_over_is_no_garbage(garbage, stream, held, path):
    async with running_front() as front:
        engine = FakeEngine(chunked(b"data: 1\n\n") if stream else whole(b"{}"))
        backend = await front.add(engine)
        client = await Client.to(front.port)
        gc.collect()
        for number in range(CALLS):
            front.report(backend, 0 if held else 1000)
            client.send(post({"stream": stream, "program_id": f"p{number}"}, path))
            if held and path == CHAT:
                await front.until(lambda: front.fleet.queue.held_turns)
            front.report(backend, 1000)
            assert (await client.answer()).status == 200
        await front.until(lambda: not len(front.proxy.ongoing))
        assert garbage() == set()
        client.leave()
