"""Who a model call belongs to: the one field that vllm_thunder adds to an engine request."""

import msgspec

__all__ = ["Turn"]


class Turn(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """One model call of a program, as the front end resolved it.

    It travels to the engine core inside ``EngineCoreRequest.program`` (msgpack, positional:
    append fields, never reorder).
    """

    program_id: str
    #: Names the model call. Every engine request that the call fans out into (n > 1, list
    #: prompts, beams) carries the same turn id, so that the program counts the call once.
    turn_id: str
    #: The program that started this one, when a sub-agent makes the call.
    parent_id: str | None = None
    #: The client said that this is the program's last turn: release it when the turn ends.
    final: bool = False
    #: Lower runs earlier, as vLLM's own request priority.
    priority: int = 0
    #: Names the RL prompt group of the program: turns of one group share a prefix and are
    #: admitted together.
    group: str | None = None
    #: The tool whose run ended with this turn; its run time is learned under this name.
    tool: str | None = None
    #: Seconds without a turn after which the program is released; None: the configured default.
    retention_seconds: float | None = None
    #: The call fans out into several engine requests; the front end tells when it is over.
    fans_out: bool = False
    #: Seconds after its arrival by which the turn should have its first token; None: no deadline.
    deadline_seconds: float | None = None
    #: The context will not be sent again: its KV blocks are reused first when the turn ends, and
    #: the program's own context stays what it was.
    one_off: bool = False
    #: Seconds for which the call has waited in front of this engine: its order counts from then.
    #: Negative: it is to be treated as one that comes so much later.
    waited_seconds: float = 0.0
