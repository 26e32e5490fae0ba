"""What stock engines say of themselves, right and wrong."""

import json

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from vllm_thunder.coordinator.engines.stock_metrics import (
    EngineFacts,
    FactsError,
    sglang_facts,
    vllm_facts,
)


def vllm_text(engines=1, without=(), labels=None, configs=None, names=("m",)):
    """The metrics of a vLLM server, in the text that its own library writes."""
    registry = CollectorRegistry()
    config = {
        "block_size": "16",
        "cache_dtype": "auto",
        "enable_prefix_caching": "True",
        "kv_cache_size_tokens": "16000",
        "mamba_block_size": "None",
        "num_gpu_blocks": str(1001 * engines),
        **(labels or {}),
    }
    if "vllm:cache_config_info" not in without:
        gauge = Gauge("vllm:cache_config_info", "Config", [*config, "engine"], registry=registry)
        for engine in range(engines):
            for each in configs or [{}]:
                gauge.labels(**config | each, engine=str(engine)).set(1)
    for offset, name in enumerate(("num_requests_running", "num_requests_waiting")):
        if f"vllm:{name}" not in without:
            gauge = Gauge(f"vllm:{name}", "Requests", ["engine", "model_name"], registry=registry)
            for engine in range(engines):
                for model in names:
                    gauge.labels(engine=str(engine), model_name=model).set(engine + offset)
    if "vllm:kv_cache_usage_perc" not in without:
        gauge = Gauge(
            "vllm:kv_cache_usage_perc", "Usage", ["engine", "model_name"], registry=registry
        )
        for engine in range(engines):
            gauge.labels(engine=str(engine), model_name='a "quoted"\nname').set(0.25)
    Counter("vllm:prompt_tokens", "Others", registry=registry).inc(5)
    Histogram("vllm:request_prefill_time_seconds", "Others", registry=registry).observe(1.0)
    return generate_latest(registry).decode()


def test_one_engine():
    assert vllm_facts(vllm_text()) == {
        0: EngineFacts(
            capacity_blocks=1000,  # vLLM keeps one empty
            block_size=16,
            keeps_prefixes=True,
            seats=None,
            running=0,
            waiting=1,
            usage=0.25,
        )
    }


def test_ranks_of_one_server_share_the_blocks_that_it_adds_up():
    facts = vllm_facts(vllm_text(engines=3, names=("m", "adapter")))
    assert list(facts) == [0, 1, 2]
    assert [each.capacity_blocks for each in facts.values()] == [1000] * 3
    assert [each.running for each in facts.values()] == [0, 1, 2]
    assert [each.waiting for each in facts.values()] == [1, 2, 3]


def test_a_context_in_several_groups_takes_more_than_the_blocks_suggest():
    facts = vllm_facts(vllm_text(labels={"kv_cache_size_tokens": "8000"}))
    assert facts[0].capacity_blocks == 500
    facts = vllm_facts(vllm_text(labels={"kv_cache_size_tokens": "None"}))
    assert facts[0].capacity_blocks == 1000


@pytest.mark.parametrize("blocks", ["None", "0", "1"])
def test_an_unknown_capacity_is_none(blocks):
    facts = vllm_facts(vllm_text(labels={"num_gpu_blocks": blocks}))
    assert facts[0].capacity_blocks is None
    assert facts[0].block_size == 16


def test_prefix_caching_off():
    assert not vllm_facts(vllm_text(labels={"enable_prefix_caching": "False"}))[0].keeps_prefixes


@pytest.mark.parametrize("known_first", [True, False])
def test_an_api_server_that_did_not_know_the_blocks_yet_says_nothing(known_first):
    configs = [{}, {"num_gpu_blocks": "None"}]
    text = vllm_text(configs=configs if known_first else configs[::-1])
    assert vllm_facts(text)[0].capacity_blocks == 1000


def test_two_samples_of_an_engine_that_disagree():
    with pytest.raises(FactsError, match="engine 0 disagree"):
        vllm_facts(vllm_text(configs=[{}, {"num_gpu_blocks": "500"}]))


@pytest.mark.parametrize(
    "name",
    [
        "vllm:cache_config_info",
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
    ],
)
def test_a_missing_family_is_named(name):
    with pytest.raises(FactsError, match=name):
        vllm_facts(vllm_text(without=[name]))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"block_size": "None"}, "block_size"),
        ({"block_size": "16.5"}, "block_size"),
        ({"num_gpu_blocks": "many"}, "num_gpu_blocks"),
        ({"kv_cache_size_tokens": "-3"}, "kv_cache_size_tokens"),
    ],
)
def test_a_wrong_label_is_named(wrong, message):
    with pytest.raises(FactsError, match=message):
        vllm_facts(vllm_text(labels=wrong))


def test_a_missing_label_is_named():
    for name in ("block_size", "enable_prefix_caching", "engine"):
        text = vllm_text().replace(f"{name}=", "renamed=")
        with pytest.raises(FactsError, match=name):
            vllm_facts(text)


def test_a_family_without_one_of_the_engines():
    lines = vllm_text(engines=2).splitlines(keepends=True)
    gone = [
        line for line in lines if "num_requests_running{" not in line or 'engine="1"' not in line
    ]
    assert len(gone) == len(lines) - 1
    with pytest.raises(FactsError, match="num_requests_running: no sample of engine 1"):
        vllm_facts("".join(gone))


@pytest.mark.parametrize(
    "text", ["", "<html>not found</html>", '{"detail": "x"}', 'a{b="', "a b c d\n", "a{b} }\n"]
)
def test_what_is_not_prometheus_text(text):
    with pytest.raises(FactsError, match=r"missing from the metrics|not Prometheus text"):
        vllm_facts(text)


def test_text_that_was_cut_anywhere_is_an_error_or_the_truth():
    whole = vllm_text()
    facts = vllm_facts(whole)
    seen_errors = 0
    for end in range(0, len(whole), 7):
        try:
            part = vllm_facts(whole[:end])
        except FactsError:
            seen_errors += 1
        else:
            # Only a number at the very end can be cut without a trace.
            assert part[0].capacity_blocks == facts[0].capacity_blocks
    assert seen_errors


def sglang_info(**changes):
    state = {
        "memory_usage": {"weight": 1.0, "kvcache": 0.2, "token_capacity": 20480},
        "effective_max_running_requests_per_dp": 128,
        "last_gen_throughput": 10.0,
    }
    return {
        "model_path": "m",
        "page_size": 1,
        "dp_size": 1,
        "max_running_requests": None,
        "disable_radix_cache": False,
        "max_total_num_tokens": 20000,
        "internal_states": [state],
        "version": "0.5.9",
        **changes,
    }


def facts_of(**changes):
    return sglang_facts(json.dumps(sglang_info(**changes)).encode())


def test_sglang():
    assert facts_of() == {
        0: EngineFacts(capacity_blocks=20480, block_size=1, keeps_prefixes=True, seats=128)
    }


def test_sglang_pages_ranks_and_radix_cache():
    states = [
        {"memory_usage": {"token_capacity": tokens}, "effective_max_running_requests_per_dp": seats}
        for tokens, seats in ((6400, 8), (6464, 9))
    ]
    facts = facts_of(page_size=64, internal_states=states, disable_radix_cache=True)
    assert [each.capacity_blocks for each in facts.values()] == [100, 101]
    assert [each.seats for each in facts.values()] == [8, 9]
    assert not any(each.keeps_prefixes for each in facts.values())


def test_sglang_that_tells_its_capacity_once_or_not_at_all():
    assert facts_of(internal_states=[{}])[0] == EngineFacts(capacity_blocks=20000, block_size=1)
    for told in (None, 0):
        facts = facts_of(internal_states=[{}], max_total_num_tokens=told)
        assert facts[0].capacity_blocks is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"page_size": None}, "page_size"),
        ({"page_size": 0}, "page_size"),
        ({"page_size": True}, "page_size"),
        ({"internal_states": []}, "internal_states"),
        ({"internal_states": None}, "internal_states"),
        ({"internal_states": ["x"]}, r"internal_states\[0\]"),
        ({"internal_states": [{"memory_usage": {"token_capacity": "x"}}]}, "token_capacity"),
        (
            {"internal_states": [{"effective_max_running_requests_per_dp": 0}]},
            "effective_max_running_requests_per_dp",
        ),
        ({"internal_states": [{}], "max_total_num_tokens": -1}, "max_total_num_tokens"),
    ],
)
def test_a_wrong_part_of_the_server_info_is_named(changes, message):
    with pytest.raises(FactsError, match=message):
        facts_of(**changes)


@pytest.mark.parametrize("body", [b"", b"[]", b"<html>", b"\xff\xfe", b'{"page_size": 1', b"null"])
def test_what_is_no_server_info(body):
    with pytest.raises(FactsError, match="server info"):
        sglang_facts(body)
