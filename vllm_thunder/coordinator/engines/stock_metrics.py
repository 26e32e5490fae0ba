"""What an engine that knows no programs says of itself: stock vLLM's ``/metrics`` and SGLang's
``/get_server_info``.

What it does not say is None: an unknown capacity is never a large one and never a guess.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

import msgspec
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from vllm_thunder.program.errors import ThunderError

__all__ = ["EngineFacts", "FactsError", "sglang_facts", "vllm_facts"]

_CACHE_CONFIG = "vllm:cache_config_info"
_RUNNING = "vllm:num_requests_running"
_WAITING = "vllm:num_requests_waiting"
_USAGE = "vllm:kv_cache_usage_perc"

#: Below this share of what the blocks could hold, contexts take blocks of several KV-cache groups.
_ONE_GROUP_SHARE = 0.75


class FactsError(ThunderError):
    """What an engine says of itself cannot be read; the message names the part."""


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """One engine, or one data-parallel rank of a server.

    ``capacity_blocks``: KV-cache blocks that requests can have, of ``block_size`` tokens each;
    None: unknown, it has to be asked again. ``seats``: requests that it runs at most.
    ``keeps_prefixes``: it has a prefix cache. ``usage``: share of the blocks that running requests
    use. ``running`` and ``waiting``: requests. None: it does not say.
    """

    capacity_blocks: int | None
    block_size: int
    keeps_prefixes: bool = True
    seats: int | None = None
    running: int | None = None
    waiting: int | None = None
    usage: float | None = None


def vllm_facts(text: str) -> dict[int, EngineFacts]:
    """The engines behind a vLLM server by data-parallel rank, from its ``/metrics``.

    vLLM does not tell how many requests it runs at most. Raises FactsError.
    """
    families = _samples(text, {_CACHE_CONFIG, _RUNNING, _WAITING, _USAGE})
    config = families[_CACHE_CONFIG]
    running = _by_engine(families[_RUNNING], _RUNNING)
    waiting = _by_engine(families[_WAITING], _WAITING)
    usage = _by_engine(families[_USAGE], _USAGE)
    labels: dict[int, Mapping[str, str]] = {}
    for sample in config:
        engine = _engine_of(sample, _CACHE_CONFIG)
        if engine in labels and labels[engine] != sample.labels:
            # Several API servers: one that was asked before its engine was ready knows less.
            labels[engine] = _fuller(labels[engine], sample.labels, engine)
        else:
            labels[engine] = sample.labels
    for name, values in ((_RUNNING, running), (_WAITING, waiting), (_USAGE, usage)):
        if missing := labels.keys() - values.keys():
            raise FactsError(f"{name}: no sample of engine {min(missing)}")
    return {
        engine: EngineFacts(
            capacity_blocks=_vllm_capacity(labels[engine], len(labels)),
            block_size=_label_number(labels[engine], "block_size"),
            keeps_prefixes=_label(labels[engine], "enable_prefix_caching") == "True",
            running=round(running[engine]),
            waiting=round(waiting[engine]),
            usage=usage[engine],
        )
        for engine in sorted(labels)
    }


def sglang_facts(body: bytes) -> dict[int, EngineFacts]:
    """The engines behind an SGLang server by data-parallel rank, from its ``/get_server_info``.

    Its pages are the blocks. Raises FactsError.
    """
    try:
        info = msgspec.json.decode(body, type=dict[str, Any])
    except (ValueError, RecursionError) as error:
        raise FactsError(f"server info: not a JSON object: {error}") from error
    page_size = _whole(info, "page_size", "page_size", least=1)
    if page_size is None:
        raise FactsError("page_size: missing from the server info")
    states = info.get("internal_states")
    if not isinstance(states, list) or not states:
        raise FactsError("internal_states: missing from the server info, or empty")
    facts: dict[int, EngineFacts] = {}
    for rank, state in enumerate(states):
        where = f"internal_states[{rank}]"
        if not isinstance(state, dict):
            raise FactsError(f"{where}: must be an object")
        memory = state.get("memory_usage")
        tokens = None
        if isinstance(memory, dict):
            tokens = _whole(memory, "token_capacity", f"{where}.memory_usage.token_capacity")
        if tokens is None:  # older servers tell it once, for each of their ranks
            tokens = _whole(info, "max_total_num_tokens", "max_total_num_tokens")
        seats_name = "effective_max_running_requests_per_dp"
        facts[rank] = EngineFacts(
            capacity_blocks=tokens // page_size or None if tokens else None,
            block_size=page_size,
            keeps_prefixes=info.get("disable_radix_cache") is not True,
            seats=_whole(state, seats_name, f"{where}.{seats_name}", least=1),
        )
    return facts


def _samples(text: str, wanted: set[str]) -> dict[str, list[Sample]]:
    found: dict[str, list[Sample]] = {}
    try:
        for family in text_string_to_metric_families(text):
            if family.name in wanted:
                found.setdefault(family.name, []).extend(family.samples)
    except (ValueError, IndexError, KeyError) as error:
        raise FactsError(f"metrics: not Prometheus text: {error}") from error
    for name in sorted(wanted):
        if not found.get(name):
            raise FactsError(f"{name}: missing from the metrics")
    return found


def _by_engine(samples: list[Sample], name: str) -> dict[int, float]:
    """A server that serves a model under several names has one sample of each: they are alike."""
    if not all(isfinite(sample.value) for sample in samples):
        raise FactsError(f"{name}: must be a number")
    return {_engine_of(sample, name): sample.value for sample in samples}


def _engine_of(sample: Sample, name: str) -> int:
    engine = sample.labels.get("engine")
    if engine is None or not engine.isdecimal():
        raise FactsError(f"{name}: its label engine must be a number, not {engine!r}")
    return int(engine)


def _fuller(one: Mapping[str, str], other: Mapping[str, str], engine: int) -> Mapping[str, str]:
    """The one of two descriptions of an engine that tells its blocks."""
    told = [labels for labels in (one, other) if _optional_number(labels, "num_gpu_blocks")]
    if len(told) == 2 and one["num_gpu_blocks"] != other["num_gpu_blocks"]:
        raise FactsError(f"{_CACHE_CONFIG}: two samples of engine {engine} disagree")
    return told[0] if told else one


def _vllm_capacity(labels: Mapping[str, str], engines: int) -> int | None:
    """Blocks of one engine: the server adds up those of all its engines, each of which keeps one
    block empty. Where a context takes blocks of several KV-cache groups it tells the tokens that
    fit, fewer than the blocks suggest."""
    total = _optional_number(labels, "num_gpu_blocks")
    if not total:
        return None
    blocks = total // engines - 1
    tokens = _optional_number(labels, "kv_cache_size_tokens")
    block_size = _label_number(labels, "block_size")
    # With one group they differ by the rounding of the longest context only.
    if tokens and tokens < _ONE_GROUP_SHARE * blocks * block_size:
        blocks = tokens // block_size
    return blocks if blocks > 0 else None


def _label(labels: Mapping[str, str], name: str) -> str:
    value = labels.get(name)
    if value is None:
        raise FactsError(f"{_CACHE_CONFIG}: its label {name} is missing")
    return value


def _optional_number(labels: Mapping[str, str], name: str) -> int | None:
    """None where vLLM says "None", or nothing."""
    value = labels.get(name, "None")
    if value == "None":
        return None
    if not value.isdecimal():
        raise FactsError(f"{_CACHE_CONFIG}: its label {name} must be a number, not {value!r}")
    return int(value)


def _label_number(labels: Mapping[str, str], name: str) -> int:
    _label(labels, name)
    number = _optional_number(labels, name)
    if not number:
        raise FactsError(f"{_CACHE_CONFIG}: its label {name} must be at least 1")
    return number


def _whole(values: Mapping[str, Any], name: str, where: str, least: int = 0) -> int | None:
    value = values.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise FactsError(f"{where}: must be a whole number of at least {least}, not {value!r}")
    return value
