"""The YAML configuration: our names, Dynamo's names, and what is neither."""

import pytest

from vllm_thunder.coordinator.config import CoordinatorConfig
from vllm_thunder.coordinator.config_file import read_config
from vllm_thunder.program.config import ThunderConfig
from vllm_thunder.program.errors import ConfigError

#: The defaults of Dynamo's policy.
DYNAMO = """
pause_threshold: 0.95
pause_target: 0.80
resume_hysteresis: 0.10
resume_timeout_seconds: 1800
session_retention_seconds: 1800
scheduler_interval_seconds: 5
acting_token_weight: 1
acting_decay_tau_seconds: 1
buffer_per_program: 100
max_tracked_requests: 10000
"""


@pytest.fixture
def read(tmp_path):
    def read(text):
        path = tmp_path / "settings.yaml"
        path.write_text(text)
        return read_config(path)

    return read


def test_dynamos_ten_parameters_have_their_meaning(read):
    settings = read(DYNAMO)
    engines = ThunderConfig(**settings.engines)
    assert engines.high_watermark == 0.95
    assert engines.low_watermark == pytest.approx(0.85)
    assert engines.pause_target == 0.80
    assert (engines.acting_weight, engines.buffer_tokens) == (1.0, 100)
    assert engines.acting_half_life == 1.0
    coordinator = CoordinatorConfig(**settings.coordinator)
    assert coordinator.max_wait == 3600.0  # a turn goes when it has waited half of it
    assert (coordinator.retention, coordinator.interval) == (1800.0, 5.0)
    assert coordinator.max_held_turns == 10_000
    assert (engines.retention, engines.interval) == (1800.0, 5.0)


def test_the_names_of_its_python_router(read):
    text = (
        "soft_demote_threshold: 0.8\nsoft_demote_priority_jump: -2\nresume_priority_boost: 1\n"
        "host_cache_tokens: 100000\n"
    )
    coordinator = CoordinatorConfig(**read(text).coordinator)
    assert coordinator.soft_demote_threshold == 0.8
    assert coordinator.soft_demote_priority_jump == -2.0
    assert coordinator.resume_priority_boost == 1.0
    assert coordinator.host_cache_tokens == 100_000


def test_our_names_and_an_empty_file(read):
    assert read("max_wait: 30\nmax_programs: 5").coordinator == {
        "max_wait": 30.0,
        "max_programs": 5,
    }
    assert read("").coordinator == {}
    assert read_config(None).coordinator == {}


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("pause_treshold: 0.9", "pause_treshold"),
        ("pause_threshold: high", "pause_threshold"),
        ("pause_threshold: true", "pause_threshold"),
        ("pause_threshold: 1.5", "high-watermark"),
        ("resume_hysteresis: 0.99", "resume_hysteresis"),
        ("pause_target: 0.99", "pause_target"),
        ("buffer_per_program: 1.5", "buffer-tokens"),
        ("acting_token_weight: -1", "acting-weight"),
        ("- a list", "names with values"),
        ("a: [", "no YAML"),
        ("7: 8", "7"),
    ],
)
def test_what_cannot_be_used_refuses_to_start_and_is_named(read, text, named):
    with pytest.raises(ConfigError, match=named):
        CoordinatorConfig(**read(text).coordinator)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read_config(tmp_path / "none")
