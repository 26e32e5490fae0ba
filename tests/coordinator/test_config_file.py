"""The YAML configuration: our names, Dynamo's names, and what is neither."""

from dataclasses import fields

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
        ("pause_threshold: 0.9\npause_target: 0.95", "pause_target"),
        ("resume_hysteresis: 0.1\npause_target: 0.97", "pause_target"),
        ("pause_threshold: 0.7\nsoft_demote_threshold: 0.8", "soft_demote_threshold"),
        ("buffer_per_program: 1.5", "buffer-tokens"),
        ("acting_token_weight: -1", "acting-weight"),
        ("- a list", "names with values"),
        ("a: [", "no YAML"),
        ("[" * 5000, "no YAML"),
        ("max_wait: 2020-13-45", "no YAML"),
        ("max_wait: " + "9" * 5000, "no YAML"),
        ("max_wait: 30\ninterval: 3\nmax_wait: 40", "'max_wait' is named twice"),
        ("max_wait: 30\nresume_timeout_seconds: 10", "resume_timeout_seconds.*max_wait"),
        ("session_retention_seconds: 10\nretention: 20", "retention: another name"),
        ("interval: 1\nscheduler_interval_seconds: 1", "scheduler_interval_seconds.*interval"),
        ("max_tracked_requests: 5\nmax_held_turns: 5", "max_held_turns: another name"),
        ("7: 8", "7"),
    ],
)
def test_what_cannot_be_used_refuses_to_start_and_is_named(read, text, named):
    with pytest.raises(ConfigError, match=named):
        CoordinatorConfig(**read(text).coordinator)


NUMBERS = {each.name for each in fields(CoordinatorConfig)}
NUMBERS |= {line.split(":")[0] for line in DYNAMO.split() if ":" in line}
#: They may be as large as anybody likes.
COUNTS = {each.name for each in fields(CoordinatorConfig) if each.type is int}
COUNTS |= {"buffer_per_program", "max_tracked_requests"}
HUGE = "1" + "0" * 400


@pytest.mark.parametrize("value", [".inf", "-.inf", ".nan", "-" + HUGE])
@pytest.mark.parametrize("name", sorted(NUMBERS))
def test_a_number_outside_of_every_range_is_refused_under_every_name(read, name, value):
    with pytest.raises(ConfigError, match=r"settings\.yaml"):
        read(f"{name}: {value}")


@pytest.mark.parametrize("name", sorted(NUMBERS - COUNTS))
def test_a_number_that_no_float_can_hold(read, name):
    with pytest.raises(ConfigError, match=r"settings\.yaml"):
        read(f"{name}: {HUGE}")


@pytest.mark.parametrize("name", sorted(COUNTS))
def test_a_count_that_no_float_can_hold(read, name):
    settings = read(f"{name}: {HUGE}")
    assert list((settings.coordinator or settings.engines).values()) == [10**400]


def test_what_pause_target_and_soft_demotion_are_compared_with_is_what_holds(read):
    assert read("pause_target: 0.97").engines == {"pause_target": 0.97}
    assert read("soft_demote_threshold: 0.97").coordinator == {"soft_demote_threshold": 0.97}
    engines = read("pause_threshold: 0.9\npause_target: 0.9\nsoft_demote_threshold: 0.9").engines
    assert (engines["high_watermark"], engines["pause_target"]) == (0.9, 0.9)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read_config(tmp_path / "none")
