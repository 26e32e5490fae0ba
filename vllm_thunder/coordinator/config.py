"""Settings of the coordinator: the only place for defaults and ranges."""

from dataclasses import dataclass

from vllm_thunder.program.settings import check_ranges, setting

__all__ = ["CoordinatorConfig", "flag_of"]


@dataclass(frozen=True, slots=True)
class CoordinatorConfig:
    """Every field is a flag: ``max_wait`` is ``--max-wait``, and a key of ``--config``."""

    max_wait: float = setting(
        60.0,
        "seconds; a turn that has waited half of it goes to an engine whether it has room or not, "
        "and counts there as one that has waited",
        low=0.1,
    )
    stickiness: float = setting(
        5.0,
        "seconds; a program waits for the engine that has its KV for as long as computing it "
        "elsewhere would take, at most this",
        low=0.0,
    )
    interval: float = setting(
        5.0,
        "seconds; while turns wait a decision is made at least this often (the paper's delta t); "
        "engines tell of changes as they happen",
        low=0.01,
    )
    retention: float = setting(
        1800.0,
        "seconds without a turn after which a program is forgotten that no engine knows any more, "
        "or whose engine does not know programs",
        low=0.01,
    )
    max_programs: int = setting(
        100_000,
        "programs tracked at most; the one idle longest is forgotten for a new one, and when all "
        "have turns in flight a new one is refused (429)",
        low=1,
    )
    max_held_turns: int = setting(
        10_000, "turns that may wait at once; a further one is refused (429)", low=1
    )
    max_held_bytes: int = setting(
        4 * 1024**3,
        "bytes of the bodies of all turns that wait; a further turn that has to wait is refused "
        "(429), unless no other does",
        low=1,
    )
    max_body_bytes: int = setting(
        64 * 1024 * 1024, "bytes of a request body; a larger one is refused (413)", low=1
    )
    keepalive: float = setting(
        15.0,
        "seconds without a byte after which a stream that is held gets a comment line, so that no "
        "proxy takes it for dead",
        low=0.01,
    )
    engine_timeout: float = setting(
        15.0,
        "seconds without an answer after which an engine is taken for hung; longer than its "
        "longest step",
        low=0.1,
    )
    weight_sync_timeout: float = setting(
        300.0,
        "seconds after POST /weight_sync/begin after which model calls go on although nobody said "
        "that it has ended",
        low=0.1,
    )
    soft_demote_threshold: float = setting(
        0.8,
        "share of an engine's memory that is claimed above which a turn that goes there at once is "
        "demoted by soft_demote_priority_jump",
        low=0.0,
        high=1.0,
    )
    soft_demote_priority_jump: float = setting(
        0.0,
        "seconds by which such a turn counts as having waited longer in its engine's order; "
        "negative: as having come later",
        low=-3600.0,
        high=3600.0,
    )
    resume_priority_boost: float = setting(
        0.0,
        "seconds by which a turn that was held here counts as having waited longer, in its "
        "engine's order",
        low=-3600.0,
        high=3600.0,
    )
    host_cache_tokens: int = setting(
        0,
        "tokens that an engine which does not know programs keeps outside of GPU memory: as "
        "much more may be claimed there",
        low=0,
    )
    max_engines: int = setting(1024, "engines at most, each data-parallel rank is one", low=1)

    def __post_init__(self) -> None:
        check_ranges(self, flag_of(""))


def flag_of(name: str) -> str:
    """The command-line flag of a setting."""
    return "--" + name.replace("_", "-")
