"""Settings as fields of a dataclass, each with its help text and the range of its values."""

from dataclasses import Field, field, fields
from math import inf
from typing import Any

from vllm_thunder.program.errors import ConfigError

__all__ = ["check_ranges", "range_text", "setting"]


def setting(default: Any, help: str, *, low: float | None = None, high: float | None = None) -> Any:
    """A field; numbers lie in [``low``, ``high``], None: without bound."""
    return field(default=default, metadata={"help": help, "low": low, "high": high})


def check_ranges(settings: Any, prefix: str) -> None:
    """Raise ConfigError for a number of ``settings`` that is out of its range or no number; it
    names the flag, which is ``prefix`` and the field's name with dashes."""
    for each in fields(settings):
        if each.type not in (int, float):
            continue
        value, low, high = getattr(settings, each.name), *_bounds(each)
        flag = prefix + each.name.replace("_", "-")
        kinds = (int, float) if each.type is float else (int,)
        if type(value) not in kinds:
            kind = "number" if each.type is float else "whole number"
            raise ConfigError(f"{flag}: {value!r} is not a {kind}")
        too_low = low is not None and not value >= low  # not: NaN is in no range
        if too_low or value == inf or (high is not None and value > high):
            raise ConfigError(f"{flag}: {value} is outside {range_text(each)}")


def range_text(each: "Field[Any]") -> str:
    """The values that a field may have, for people; empty: any."""
    low, high = _bounds(each)
    if low is None and high is None:
        return ""
    return f"[{low}, {'infinity)' if high is None else f'{high}]'}"


def _bounds(each: "Field[Any]") -> tuple[float | None, float | None]:
    return each.metadata["low"], each.metadata["high"]
