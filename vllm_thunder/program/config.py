"""Settings of the program scheduler: the only place for defaults and ranges."""

from dataclasses import dataclass, fields
from typing import Any

from vllm_thunder.program.errors import ConfigError
from vllm_thunder.program.settings import check_ranges, setting

__all__ = ["CONFIG_KEY", "POLICIES", "ThunderConfig", "flag_of"]

#: Where the settings travel inside vLLM's ``additional_config``.
CONFIG_KEY = "vllm_thunder"

#: Names for ``--thunder-policy``.
POLICIES = ("thunder", "paper", "fcfs")


@dataclass(frozen=True, slots=True)
class ThunderConfig:
    """Every field is a flag: ``max_wait`` is ``--thunder-max-wait``."""

    policy: str = setting(
        "thunder",
        "thunder: hold, pause and restore programs by what memory allows; "
        "paper: ThunderAgent's plain rule, every --thunder-interval seconds; "
        "fcfs: stock vLLM order, nothing is held or paused",
    )
    max_wait: float = setting(
        60.0,
        "seconds; a turn that has waited half of it goes before all others, "
        "and programs yield to it when their turns end",
        low=0.1,
    )
    high_watermark: float = setting(
        1.0,
        "share of the KV cache that active programs may fill before one is paused",
        low=0.05,
        high=1.0,
    )
    low_watermark: float = setting(
        0.95,
        "share of the KV cache below which waiting programs are restored",
        low=0.05,
        high=1.0,
    )
    pause_target: float = setting(
        1.0,
        "share of the KV cache that active programs may still fill after some were paused; "
        "no more than the high watermark counts",
        low=0.05,
        high=1.0,
    )
    acting_weight: float = setting(
        1.0, "weight of the memory that acting programs claim", low=0.01, high=100.0
    )
    buffer_tokens: int = setting(
        0, "tokens that every program claims beyond its expected context", low=0
    )
    interval: float = setting(
        5.0, "seconds between two decisions of the paper's rule (its delta t)", low=0.01
    )
    acting_half_life: float = setting(
        1.0, "seconds in which an acting program's decay score f(t) = 2^-t/h halves", low=0.001
    )
    idle_grace: float = setting(
        0.25,
        "seconds for which a turn may be held while the engine has nothing to run",
        low=0.0,
        high=1.0,
    )
    retention: float = setting(
        1800.0, "seconds without a turn after which a program is released", low=0.01
    )
    max_programs: int = setting(
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
        check_ranges(self, flag_of(""))
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
