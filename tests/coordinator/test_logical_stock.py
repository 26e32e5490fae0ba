"""The books of a real stock vLLM, beside what it says itself."""

import json
import random
import time
import urllib.request

import pytest

from vllm_thunder.coordinator.engines.stock_metrics import vllm_facts
from vllm_thunder.coordinator.logical.cache import PrefixCache
from vllm_thunder.coordinator.logical.engine import LogicalEngine
from vllm_thunder.program.config import ThunderConfig
from vllm_thunder.program.program import Program
from vllm_thunder.program.turn import Turn
from vllm_thunder.replay.server import MODEL_NAME, ServerSpec, running_server
from vllm_thunder.replay.tiny_model import TinyModel, build_tiny_model

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

BLOCKS, BLOCK = 100, 32


@pytest.fixture(scope="module")
def stock_url(tmp_path_factory):
    shape = TinyModel(hidden_size=64, intermediate_size=128, num_hidden_layers=2)
    folder = tmp_path_factory.mktemp("stock")
    spec = ServerSpec(
        "stock",
        build_tiny_model(folder / "model", shape),
        usable_blocks=BLOCKS,
        block_size=BLOCK,
        kv_bytes_per_token=shape.kv_bytes_per_token,
        max_num_seqs=8,
    )
    with running_server(spec, folder / "server.log") as url:
        yield url


def facts_of(url):
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
        return vllm_facts(answer.read().decode())


def complete(url, ids, max_tokens):
    """Output ids, and how many tokens of the prompt were in the prefix cache."""
    body = {
        "model": MODEL_NAME,
        "prompt": ids,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    request = urllib.request.Request(
        f"{url}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        told = json.load(answer)
    details = told["usage"].get("prompt_tokens_details") or {}
    return told["choices"][0]["token_ids"], details.get("cached_tokens") or 0


def test_what_it_says_of_itself(stock_url):
    facts = facts_of(stock_url)
    assert list(facts) == [0]
    assert facts[0].capacity_blocks == BLOCKS
    assert facts[0].block_size == BLOCK
    assert facts[0].keeps_prefixes
    assert (facts[0].running, facts[0].waiting, facts[0].usage) == (0, 0, 0.0)


def test_what_is_cached_there_is_what_the_books_expect(stock_url):
    """Ten programs whose contexts do not fit, one turn at a time: to the token where prompts are
    counted, nearly so where they are estimated."""
    facts = facts_of(stock_url)[0]
    cache = PrefixCache(facts.capacity_blocks, facts.block_size)
    books = LogicalEngine(
        ThunderConfig(), capacity_blocks=facts.capacity_blocks, block_size=facts.block_size
    )
    rng = random.Random(4)
    contexts = {f"p{n}": [] for n in range(10)}
    programs = {name: Program(name, created_at=0.0) for name in contexts}
    found = []
    for turn in range(90):
        name, turn_id = rng.choice(sorted(contexts)), f"t{turn}"
        prompt = [*contexts[name], *(rng.randrange(10, 500) for _ in range(rng.randint(20, 300)))]
        if len(prompt) > 0.6 * BLOCKS * BLOCK:
            cache.forget(programs[name])
            programs[name] = Program(name, created_at=0.0)
            books.release(name)
            contexts[name] = []
            continue
        exact = cache.cached_tokens(programs[name], len(prompt))
        use = cache.begin(programs[name], len(prompt), continues=True)
        estimate = round(len(prompt) * rng.uniform(0.92, 1.08))
        program = books.table.get(name)
        expected = 0 if program is None else books.cache.cached_tokens(program, estimate)
        books.turn_sent(Turn(name, turn_id), estimate, time.monotonic())
        output, cached = complete(stock_url, prompt, rng.randint(1, 40))
        contexts[name] = prompt + output
        cache.end(use, len(contexts[name]))
        books.turn_ended(turn_id, len(contexts[name]), time.monotonic(), len(output))
        books.report(time.monotonic())
        books.check_integrity()
        found.append((cached, exact, expected))
    assert [cached for cached, _, _ in found] == [exact for _, exact, _ in found]
    assert sum(cached > 0 for cached, _, _ in found) > 20
    assert sum(cached == 0 for cached, _, _ in found) > 20
    wrong = sum(abs(cached - expected) for cached, _, expected in found)
    assert wrong < 0.1 * sum(cached for cached, _, _ in found)
