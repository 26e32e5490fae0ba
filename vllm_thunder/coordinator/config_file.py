"""The YAML configuration file: our settings, and those of Dynamo's program scheduler by its names.

    Dynamo's name                   means here
    pause_threshold                 high_watermark of engines that do not know programs
    pause_target                    pause_target of these
    resume_hysteresis               their low_watermark is pause_threshold less this
    acting_token_weight             acting_weight of these
    acting_decay_tau_seconds        acting_half_life of these: Dynamo's decay is 2^(-t/tau), too
    buffer_per_program              buffer_tokens of these
    resume_timeout_seconds          half of max_wait: a turn is sent when it has waited that long
    session_retention_seconds       retention, here and of these
    scheduler_interval_seconds      interval, here and of these
    max_tracked_requests            max_held_turns
    soft_demote_threshold, soft_demote_priority_jump, resume_priority_boost    the same names

Engines that know programs have flags of their own for what concerns their memory.
A setting may be named once, under one of its names.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, fields
from math import inf
from pathlib import Path
from typing import Any

import yaml

from vllm_thunder.coordinator.config import CoordinatorConfig
from vllm_thunder.program.config import ThunderConfig
from vllm_thunder.program.errors import ConfigError

__all__ = ["Settings", "read_config"]

#: Dynamo's own defaults, where one of its names refers to another.
_PAUSE_THRESHOLD, _RESUME_HYSTERESIS = 0.95, 0.10


@dataclass(frozen=True, slots=True)
class Settings:
    """``coordinator``: values of CoordinatorConfig by name; ``engines``: of ThunderConfig, for
    engines that do not know programs."""

    coordinator: dict[str, Any] = field(default_factory=dict)
    engines: dict[str, Any] = field(default_factory=dict)


def read_config(path: Path | None) -> Settings:
    """What the file sets; nothing without a file. Raises ConfigError that names the key."""
    if path is None:
        return Settings()
    try:
        values = yaml.load(path.read_text(), _UniqueNames)
    except OSError as error:
        raise ConfigError(f"--config: {path} cannot be read: {error.strerror}") from error
    # ValueError: no UTF-8, a date that there is not, an integer of thousands of digits.
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"--config: {path} is no YAML: {error}") from error
    if values is None:
        return Settings()
    if not isinstance(values, dict):
        raise ConfigError(f"--config: {path} must hold names with values")
    return _settings(values, path)


class _UniqueNames(yaml.SafeLoader):
    """Refuses a name that is given twice, as YAML itself does."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        names: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in names:
                    problem = f"{key.value!r} is named twice"
                    raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
                names.add(key.value)
        return super().construct_mapping(node, deep)


def _settings(values: dict[Any, Any], path: Path) -> Settings:
    own = {each.name for each in fields(CoordinatorConfig)}
    settings = Settings()
    for name, value in values.items():
        told = Settings()
        if name in own:
            told.coordinator[name] = _number_like_default(value, CoordinatorConfig, name)
        elif name in _DYNAMO:
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ConfigError(f"{path}: {name}: {value!r} is not a number")
            _DYNAMO[name](told, value)
        else:
            known = ", ".join(sorted({*own, *_DYNAMO}))
            raise ConfigError(f"{path}: {name!r} is no setting; known: {known}")
        if twice := told.coordinator.keys() & settings.coordinator.keys():
            raise ConfigError(f"{path}: {name}: another name has set {min(twice)} already")
        settings.coordinator.update(told.coordinator)
        settings.engines.update(told.engines)
    if "resume_hysteresis" in values or "pause_threshold" in values:
        threshold = _float(values.get("pause_threshold", _PAUSE_THRESHOLD))
        low = threshold - _float(values.get("resume_hysteresis", _RESUME_HYSTERESIS))
        if low <= 0:
            raise ConfigError(f"{path}: resume_hysteresis: must be below pause_threshold")
        settings.engines["high_watermark"] = threshold
        settings.engines["low_watermark"] = low
    try:
        engines = ThunderConfig(**settings.engines)
        CoordinatorConfig(**settings.coordinator)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    for name in ("pause_target", "soft_demote_threshold"):
        if name in values and values[name] > engines.high_watermark:
            raise ConfigError(
                f"{path}: {name}: must not be above pause_threshold ({engines.high_watermark})"
            )
    return settings


def _number_like_default(value: Any, config: type, name: str) -> Any:
    """YAML writes 60 where a setting is 60.0."""
    kind = next(each.type for each in fields(config) if each.name == name)
    return _float(value) if kind is float and type(value) is int else value


def _engines(name: str, kind: type) -> Callable[[Settings, Any], None]:
    def put(settings: Settings, value: Any) -> None:
        settings.engines[name] = _as(kind, value)

    return put


def _coordinator(name: str, kind: type, times: float = 1) -> Callable[[Settings, Any], None]:
    def put(settings: Settings, value: Any) -> None:
        settings.coordinator[name] = _as(kind, value * times)

    return put


def _both(name: str) -> Callable[[Settings, Any], None]:
    def put(settings: Settings, value: Any) -> None:
        settings.coordinator[name] = settings.engines[name] = _float(value)

    return put


def _as(kind: type, value: float) -> float:
    """Whole numbers stay as they are where a whole number is wanted: 1.5 is refused then."""
    if kind is int:
        return int(value) if type(value) is float and value.is_integer() else value
    return _float(value)


def _float(value: float) -> float:
    """Infinity for what is larger than any float: outside of every range."""
    try:
        return float(value)
    except OverflowError:
        return inf if value > 0 else -inf


def _together(settings: Settings, value: Any) -> None:
    """Two names make one setting: see ``_settings``."""


_DYNAMO: dict[str, Callable[[Settings, Any], None]] = {
    "pause_threshold": _together,
    "resume_hysteresis": _together,
    "pause_target": _engines("pause_target", float),
    "acting_token_weight": _engines("acting_weight", float),
    "acting_decay_tau_seconds": _engines("acting_half_life", float),
    "buffer_per_program": _engines("buffer_tokens", int),
    "resume_timeout_seconds": _coordinator("max_wait", float, 2),
    "session_retention_seconds": _both("retention"),
    "scheduler_interval_seconds": _both("interval"),
    "max_tracked_requests": _coordinator("max_held_turns", int),
}
