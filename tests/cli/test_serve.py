import dataclasses
import json
import pickle
import subprocess
import sys

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs

from vllm_thunder.cli.serve import MIDDLEWARE, SCHEDULER, build_parsers, configure
from vllm_thunder.program.config import CONFIG_KEY, ThunderConfig, flag_of
from vllm_thunder.program.errors import ConfigError

FIELDS = dataclasses.fields(ThunderConfig)


@pytest.fixture(scope="module")
def parsers():
    return build_parsers()


@pytest.fixture
def parse(parsers):
    def parsed(*flags):
        args = parsers[0].parse_args(["serve", "some/model", *flags])
        configure(args)
        return args

    return parsed


def config_of(args) -> ThunderConfig:
    return ThunderConfig.from_dict(args.additional_config[CONFIG_KEY])


def test_without_flags_of_ours_the_defaults_reach_the_engine(parse):
    args = parse("--max-model-len", "1k", "--port", "8123")
    assert config_of(args) == ThunderConfig()
    assert args.scheduler_cls == SCHEDULER
    assert args.middleware == [MIDDLEWARE]
    engine_args = AsyncEngineArgs.from_cli_args(args)
    assert engine_args.additional_config == {CONFIG_KEY: ThunderConfig().to_dict()}
    assert engine_args.scheduler_cls == SCHEDULER
    assert engine_args.max_model_len == 1000
    assert (args.model_tag, args.port) == ("some/model", 8123)


OTHER_VALUES = {
    "policy": "fcfs",
    "max_wait": 12.5,
    "high_watermark": 0.99,
    "low_watermark": 0.5,
    "pause_target": 0.75,
    "acting_weight": 0.5,
    "buffer_tokens": 100,
    "interval": 2.0,
    "acting_half_life": 3.0,
    "idle_grace": 0.125,
    "retention": 99.0,
    "max_programs": 17,
}


def test_every_setting_has_a_flag(parse):
    assert OTHER_VALUES.keys() == {field.name for field in FIELDS}
    flags = [text for name, value in OTHER_VALUES.items() for text in (flag_of(name), str(value))]
    assert config_of(parse(*flags)) == ThunderConfig(**OTHER_VALUES)
    for name, value in OTHER_VALUES.items():
        for flags in ([f"{flag_of(name)}={value}"], [flag_of(name).replace("-", "_"), str(value)]):
            flags[0] = "--" + flags[0].lstrip("_-")
            assert config_of(parse(*flags)) == ThunderConfig(**{name: value})


def test_what_serve_workers_get_can_be_pickled(parse):
    args = parse("--thunder-max-wait", "5")
    assert pickle.loads(pickle.dumps(args)).additional_config == args.additional_config


def test_a_users_own_values_are_kept(parse):
    own = {"x": 1, CONFIG_KEY: {"max_wait": 5.0, "retention": 9.0}}
    args = parse(
        *("--additional-config", json.dumps(own), "--middleware", "a.B", "--middleware", "c.D"),
        *("--thunder-retention", "7", "--scheduler-cls", SCHEDULER),
    )
    assert args.additional_config["x"] == 1
    assert config_of(args) == ThunderConfig(max_wait=5.0, retention=7.0)
    assert args.middleware == ["a.B", "c.D", MIDDLEWARE]


def test_parsing_twice_does_not_add_the_middleware_twice(parse):
    assert parse().middleware == parse().middleware == [MIDDLEWARE]


def test_a_config_file(parsers, tmp_path):
    file = tmp_path / "serve.yaml"
    file.write_text("model: some/model\nport: 8124\nthunder-max-wait: 5\nthunder_policy: fcfs\n")
    args = parsers[0].parse_args(["serve", "--config", str(file), "--thunder-max-wait", "6"])
    configure(args)
    assert config_of(args) == ThunderConfig(max_wait=6.0, policy="fcfs")
    assert (args.model, args.port) == ("some/model", 8124)


def test_data_parallel_and_headless_get_the_same(parse):
    args = parse("--headless", "--data-parallel-size", "2", "--data-parallel-start-rank", "1")
    assert args.scheduler_cls == SCHEDULER
    assert config_of(args) == ThunderConfig()


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--scheduler-cls", "my.Scheduler"], "--scheduler-cls: .*my.Scheduler"),
        (["--grpc"], "--grpc: "),
        (["--no-enable-prefix-caching"], "--no-enable-prefix-caching: .*--thunder-policy fcfs"),
        (["--kv-transfer-config", '{"kv_connector": "X", "kv_role": "kv_both"}'], "--kv-transfer"),
        (["--kv-offloading-size", "1"], "--kv-offloading-size: "),
        (["--additional-config", '{"vllm_thunder": 3}'], "--additional-config: "),
        (["--additional-config", '{"vllm_thunder": {"speed": 3}}'], "vllm_thunder.speed: unknown"),
        (["--thunder-low-watermark", "0.9", "--thunder-high-watermark", "0.8"], "--thunder-low-"),
    ],
)
def test_what_cannot_go_together_is_refused(parse, flags, problem):
    with pytest.raises(ConfigError, match=problem):
        parse(*flags)


def test_without_prefix_caching_programs_can_still_be_counted(parse):
    args = parse("--no-enable-prefix-caching", "--thunder-policy", "fcfs")
    assert config_of(args).policy == "fcfs"


def test_the_rust_front_end_is_refused(parse, monkeypatch):
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
    with pytest.raises(ConfigError, match="VLLM_USE_RUST_FRONTEND"):
        parse()


@pytest.mark.parametrize("field", [f for f in FIELDS if f.name != "policy"], ids=lambda f: f.name)
def test_a_value_out_of_range_names_the_flag_and_the_range(parse, field):
    low, high = field.metadata["low"], field.metadata["high"]
    for value in [low - 1] + ([high + 1] if high is not None else []):
        with pytest.raises(ConfigError) as caught:
            parse(f"{flag_of(field.name)}={field.type(value)}")
        assert str(caught.value).startswith(flag_of(field.name) + ":")
        assert f"[{low}, " in str(caught.value)


@pytest.mark.parametrize("field", FIELDS, ids=lambda f: f.name)
@pytest.mark.parametrize("text", ["soon", "", "1.5x"])
def test_a_value_of_another_type_exits_with_the_flag_and_the_range(parsers, field, text, capsys):
    with pytest.raises(SystemExit) as caught:
        parsers[0].parse_args(["serve", "m", f"{flag_of(field.name)}={text}"])
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert f"argument {flag_of(field.name)}: " in error
    allowed = "fcfs" if field.name == "policy" else f"[{field.metadata['low']}, "
    assert allowed in error


def help_text(parsers, capsys, flag):
    parser_class = type(parsers[0])
    try:
        with pytest.raises(SystemExit) as caught:
            parsers[0].parse_args(["serve", flag])
    finally:
        parser_class._search_keyword = None  # vLLM keeps it on the class
    assert caught.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    "flag",
    ["--help", "--help=all", "--help=vllm-thunder", "--help=vllm_thunder", "--help=thunder"],
)
def test_help_shows_every_flag_with_its_default_and_range(parsers, capsys, flag):
    text = " ".join(help_text(parsers, capsys, flag).split())
    for field in FIELDS:
        assert flag_of(field.name) in text
        assert f"(default: {field.default}" in text
    assert "range: [0.1, infinity)" in text
    assert "range: [0.05, 1.0]" in text


def test_help_of_vllms_own_groups(parsers, capsys):
    assert "--max-model-len" in help_text(parsers, capsys, "--help=ModelConfig")
    assert "vllm_thunder serve [model_tag] [options]" in help_text(parsers, capsys, "--help")


def run(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "vllm_thunder", "serve", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


def test_the_command_refuses_before_it_loads_a_model():
    result = run("no/such/model", "--thunder-max-wait", "0")
    assert result.returncode == 2
    assert "--thunder-max-wait: 0.0 is outside [0.1, infinity)" in result.stderr
    assert "Traceback" not in result.stderr


def test_the_command_refuses_unknown_flags():
    result = run("no/such/model", "--thunder-speed", "3")
    assert result.returncode == 2
    assert "unrecognized arguments: --thunder-speed" in result.stderr


def test_a_model_that_is_not_there_is_vllms_own_error(tmp_path):
    missing = tmp_path / "missing"
    result = run(str(missing), "--port", "0")
    assert result.returncode not in (0, 2)
    assert str(missing) in result.stderr + result.stdout
