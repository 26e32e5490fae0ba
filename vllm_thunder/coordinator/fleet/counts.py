"""What has happened to programs and turns since the start, each event counted where it happens."""

from dataclasses import dataclass, field, fields

__all__ = ["Counts", "meaning_of"]


def _count(meaning: str) -> int:
    count: int = field(default=0, metadata={"meaning": meaning})
    return count


@dataclass(slots=True)
class Counts:
    """They only grow; ``/metrics`` has them by these names. At any time

    programs_created = programs_ended + programs_expired + programs_evicted + those tracked, and

    turns_paused = turns_resumed + turns_cancelled_held + turns_given_up + those that wait and have
    been through a decision.
    """

    programs_created: int = _count("Programs that sent a first turn, or that an engine told of.")
    programs_ended: int = _count(
        "Programs that were released, that sent their last step, or whose only turn was refused."
    )
    programs_expired: int = _count(
        "Programs forgotten because retention ended here, or because their engine has forgotten "
        "them."
    )
    programs_evicted: int = _count("Programs that were forgotten to track a new one.")
    turns_admitted: int = _count("Times that a turn was sent to an engine, at once or later.")
    turns_paused: int = _count("Times that a turn was held here: a decision did not place it.")
    turns_resumed: int = _count("Times that a turn that had been held was sent to an engine.")
    turns_cancelled: int = _count("Turns whose client went away before it had all of the answer.")
    turns_cancelled_held: int = _count("Of these, turns that were held here.")
    turns_given_up: int = _count("Turns that were held until no engine could be used for too long.")
    forced: int = _count("Turns that were sent because they were due, room or not.")
    placements: int = _count("Times that a program without a claim was sent to an engine.")
    moves: int = _count("Of these, times that it was another engine than before.")


#: What each of them counts, for people.
meaning_of: dict[str, str] = {each.name: each.metadata["meaning"] for each in fields(Counts)}
