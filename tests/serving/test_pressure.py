"""Many programs, programs that are never released, and memory that is all taken."""

import asyncio
import random
import time
from statistics import median

from tests.serving.client import CROWDED_OUT, Client, completion, words
from tests.serving.conftest import BLOCKS, MAX_MODEL_LEN

PROGRAMS = 12
TURNS = 4
AT_ONCE = 6


async def run(client: Client, name: str, *, release: bool) -> tuple[int, float]:
    """A closed loop of programs: prompt tokens that were computed, and seconds."""
    slots = asyncio.Semaphore(AT_ONCE)
    computed = 0

    async def program(number: int) -> None:
        nonlocal computed
        program_id = f"{name} {number}"
        context = words(400, program_id)
        async with slots:
            for turn in range(TURNS):
                answer = await client.complete(context, program_id, tokens=12)
                usage = answer["usage"]
                details = usage["prompt_tokens_details"] or {}
                computed += usage["prompt_tokens"] - (details.get("cached_tokens") or 0)
                context += answer["choices"][0]["text"] + words(150, f"{program_id} {turn}")
                await asyncio.sleep(0.05)
            if release:
                await client.release(program_id)

    start = time.perf_counter()
    await asyncio.gather(*map(program, range(PROGRAMS)))
    return computed, time.perf_counter() - start


async def test_programs_that_are_never_released(client: Client) -> None:
    """Scenario 10, in what the engine had to compute: within 10 % of the released runs. Time on
    a shared machine is no measure for 10 %; a table that clogs takes several times as long."""
    released, kept = [], []
    for number in range(3):
        kept.append(await run(client, f"kept {number}", release=False))
        released.append(await run(client, f"released {number}", release=True))
    print(f"\n(tokens, seconds) released: {released}; never released: {kept}")
    assert (await client.summary())["programs"] == 3 * PROGRAMS
    (tokens, seconds), (tokens_kept, seconds_kept) = (
        (sum(tokens for tokens, _ in runs), median(seconds for _, seconds in runs))
        for runs in (released, kept)
    )
    assert tokens_kept <= 1.1 * tokens
    assert seconds_kept <= 2 * seconds
    longest = max(p["longest_wait_seconds"] for p in await client.programs())
    assert longest < 10


async def test_ids_that_change_on_every_call(client: Client) -> None:
    """Scenario 22."""
    before = await client.summary()
    slots = asyncio.Semaphore(16)
    latencies = []

    async def call(number: int) -> None:
        async with slots:
            start = time.perf_counter()
            await client.complete(words(40, f"once {number}"), f"once {number}", tokens=1)
            latencies.append(time.perf_counter() - start)

    started = time.perf_counter()
    await asyncio.gather(*map(call, range(1000)))
    after = await client.until_idle()
    print(f"\n{time.perf_counter() - started:.1f} s, slowest {max(latencies):.2f} s; {after}")
    assert after["programs"] == 1000
    assert after["turns"] - before["turns"] == 1000
    late = sorted(latencies[500:])[len(latencies) // 4]
    early = sorted(latencies[:500])[len(latencies) // 4]
    assert late < 3 * early + 0.1  # nothing piles up
    assert max(latencies) < 5


async def test_all_memory_belongs_to_acting_programs(client: Client) -> None:
    """Scenario 12: the wait that we add, measured against the same prompt without an id."""
    for number in range(10):
        await client.complete(words(700, f"acting {number}"), f"acting {number}")
    summary = await client.until_idle()
    resident = sum(p["resident_blocks"] for p in await client.programs())
    assert resident > 0.9 * BLOCKS, summary

    async def first_token(name: str, program_id: str | None) -> float:
        start = time.perf_counter()
        async with client.generating(words(2000, name), program_id, tokens=3) as stream:
            await stream.take(1)
            took = time.perf_counter() - start
            await stream.rest()
        return took

    unlabelled = await first_token("unlabelled", None)
    labelled = [await first_token(f"new {n}", f"new {n}") for n in range(3)]
    print(f"\nfirst token: unlabelled {unlabelled:.2f} s, labelled {labelled}")
    assert max(labelled) < unlabelled + 1.0
    for number in range(3):
        assert (await client.program(f"new {number}"))["longest_wait_seconds"] < 1.0


async def test_cached_blocks_that_nobody_claims_are_no_discount(client: Client) -> None:
    """A new program's prompt is in the cache, left by a program that was released and by a
    request without an id: it needs its blocks all the same, beside those that are running."""
    prompt = words(CROWDED_OUT, "left behind")
    await client.complete(prompt, "released")
    await client.release("released")
    await client.complete(prompt)
    async with client.crowd() as crowd:
        held = asyncio.create_task(client.complete(prompt, "new"))
        await client.until(lambda s: s["held_turns"] == 1, 20)
        await asyncio.sleep(0.3)
        assert (await client.summary())["held_turns"] == 1
        crowd[0].cut()
        await held


async def test_contexts_that_overflow(client: Client) -> None:
    """Scenario 11: with an id that is new, and with one that has a context already."""
    await client.complete(words(100, "known"), "known")
    before = await client.until_idle()
    known = await client.program("known")
    ids = random.Random(11)
    too_long = [ids.randrange(300, 2000) for _ in range(MAX_MODEL_LEN + 1)]
    bodies = [completion(too_long, "known"), completion(too_long, "new", n=3, temperature=1)]
    slots = asyncio.Semaphore(8)

    async def call(number: int) -> int:
        async with slots:
            body = bodies[number % 2]
            if number % 10 == 0:
                body = {**body, "stream": True}
            status, text = await client.request("POST", "/v1/completions", json=body)
            assert str(MAX_MODEL_LEN) in text
            return status

    statuses = await asyncio.gather(*map(call, range(1000)))
    assert set(statuses) == {400}
    after = await client.summary()
    changed = {name for name in before if before[name] != after[name]}
    assert not changed, changed
    now = await client.program("known")
    ignored = ("idle_seconds",)
    assert {k: v for k, v in now.items() if k not in ignored} == {
        k: v for k, v in known.items() if k not in ignored
    }
