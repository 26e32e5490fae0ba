"""Programs that are paused and restored all the time, on a real server."""

import asyncio
import random

from tests.serving.client import Client, words
from tests.serving.conftest import KEY, ServeWith

PROGRAMS = 64
TURNS = 3
#: KV blocks of 32 tokens: room for a sixth of the programs.
MEMORY = 60


async def test_scenario_2_no_pause_races_a_turn_in_flight(serve_with: ServeWith) -> None:
    """Every program runs all its turns, some streamed, and no answer is a server error."""
    rng = random.Random(2)
    reasons: list[str] = []

    async def program(client: Client, number: int) -> None:
        program_id = f"program {number}"
        context = words(rng.randrange(40, 160), program_id)
        for turn in range(TURNS):
            if turn % 2:
                async with client.generating(context, program_id, tokens=4) as stream:
                    choices = [e["choices"][0] for e in await stream.rest() if e["choices"]]
            else:  # anything but 200 raises
                choices = (await client.complete(context, program_id, tokens=4))["choices"]
            reasons.append(choices[-1]["finish_reason"])
            said = "".join(choice["text"] for choice in choices)
            context += said + words(20, f"{program_id} {turn}")
            await asyncio.sleep(rng.choice([0.0, 0.01, 0.05]))

    with serve_with("--thunder-max-wait", "0.5", blocks=MEMORY) as server:
        async with Client(server.url, KEY) as client:
            await asyncio.gather(*(program(client, n) for n in range(PROGRAMS)))
            summary = await client.until_idle()
            assert reasons == ["length"] * (PROGRAMS * TURNS)
            assert summary["turns"] == PROGRAMS * TURNS
            assert summary["pauses"] > PROGRAMS
            await client.leave_clean()
