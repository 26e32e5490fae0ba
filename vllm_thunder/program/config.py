"""Settings of the program scheduler: the only place for defaults and ranges."""

from dataclasses import dataclass, field, fields
from math import inf
from typing import Any

from vllm_thunder.program.errors import ConfigError

__all__ = ["CONFIG_KEY", "POLICIES", "ThunderConfig", "flag_of"]

#: Where the settings travel inside vLLM's ``additional_config``.
CONFIG_KEY = "vllm_thunder"

#: Names for ``--thunder-policy``.
POLICIES = ("thunder", "paper", "fcfs")


def _setting(
    default: Any, help: str, *, low: float | None = None, high: float | None = None
) -> Any:
    return field(default=default, metadata={"help": help, "low": low, "high": high})


@dataclass(frozen=True, slots=True)
class ThunderConfig:
    """Every field is a flag: ``max_wait`` is ``--thunder-max-wait``."""

    policy: str = _setting(
        "thunder",
        "thunder: hold, pause and restore programs by what memory allows; "
        "paper: ThunderAgent's plain rule, every --thunder-interval seconds; "
        "fcfs: stock vLLM order, nothing is held or paused",
    )
    max_wait: float = _setting(
        60.0,
        "seconds; a turn that has waited half of it goes before all others, "
        "and programs yield to it when their turns end",
        low=0.1,
    )
    high_watermark: float = _setting(
        1.0,
        "share of the KV cache that active programs may fill before one is paused",
        low=0.05,
        high=1.0,
    )
    low_watermark: float = _setting(
        0.95,
        "share of the KV cache below which waiting programs are restored",
        low=0.05,
        high=1.0,
    )
    interval: float = _setting(
        5.0, "seconds between two decisions of the paper's rule (its delta t)", low=0.01
    )
    acting_half_life: float = _setting(
        1.0, "seconds in which an acting program's decay score f(t) = 2^-t/h halves", low=0.001
    )
    idle_grace: float = _setting(
        0.25,
        "seconds for which a turn may be held while the engine has nothing to run",
        low=0.0,
        high=1.0,
    )
    retention: float = _setting(
        1800.0, "seconds without a turn after which a program is released", low=0.01
    )
    max_programs: int = _setting(
        100_000,
        "programs tracked at most, those with turns in flight apart; "
        "the one idle longest is released for a new one",
        low=1,
    )

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ConfigError(
                f"--thunder-policy: {self.policy!r} is not one of {', '.join(POLICIES)}"
            )
        for f in fields(self):
            if f.name == "policy":
                continue
            flag = flag_of(f.name)
            value, low, high = getattr(self, f.name), f.metadata["low"], f.metadata["high"]
            kinds = (int, float) if f.type is float else (int,)
            if type(value) not in kinds:
                kind = "number" if f.type is float else "whole number"
                raise ConfigError(f"{flag}: {value!r} is not a {kind}")
            too_low = low is not None and not value >= low  # not: NaN is in no range
            if too_low or value == inf or (high is not None and value > high):
                raise ConfigError(f"{flag}: {value} is outside {_range_text(low, high)}")
        if self.low_watermark > self.high_watermark:
            raise ConfigError(
                f"--thunder-low-watermark: {self.low_watermark} is above "
                f"--thunder-high-watermark ({self.high_watermark})"
            )

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "ThunderConfig":
        """Build from ``additional_config[CONFIG_KEY]``; unknown names raise ConfigError."""
        known = {f.name for f in fields(cls)}
        for name in values:
            if name not in known:
                raise ConfigError(
                    f"{CONFIG_KEY}.{name}: unknown setting; known: {', '.join(sorted(known))}"
                )
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}


def flag_of(name: str) -> str:
    """The command-line flag of a setting."""
    return "--thunder-" + name.replace("_", "-")


def _range_text(low: float | None, high: float | None) -> str:
    if high is None:
        return f"[{low}, infinity)"
    return f"[{low}, {high}]"
