"""Books of an engine that knows no programs: what it would report if it did.

Stock vLLM and SGLang take every turn as it comes and say nothing of who owns what. The coordinator
sees all turns that go there, so it keeps the books itself, in tokens and with the policy that our
engines run. Memory is what :class:`~vllm_thunder.coordinator.logical.cache.PrefixCache` follows.

Nothing is held here: what waits, waits in the coordinator's queue. A turn that was sent runs, so
its program has a claim from then on; programs that act lose theirs when claims outgrow memory, as
the policy chooses. What cannot be known from outside stays unknown: prefixes that programs share
are counted once per program, and traffic that does not come through the coordinator is not seen.
"""

from dataclasses import dataclass
from math import inf

from vllm_thunder.coordinator.logical.cache import PrefixCache, Use
from vllm_thunder.coordinator.logical.prefill import PrefillTimes
from vllm_thunder.program.config import ThunderConfig
from vllm_thunder.program.cost import ContextBlocks
from vllm_thunder.program.decisions import Action, ActionKind, Memory
from vllm_thunder.program.errors import IntegrityError, ThunderError
from vllm_thunder.program.policy import make_policy
from vllm_thunder.program.program import Program, Status
from vllm_thunder.program.report import EngineReport, MemoryReport, ProgramReport
from vllm_thunder.program.table import ProgramTable
from vllm_thunder.program.turn import Turn

__all__ = ["LogicalEngine"]

#: A turn with a prompt below this share of its program's context does not continue it: a side
#: call, or the first turn after the context was summarised.
_CONTINUING_SHARE = 0.5
#: Estimates of a prompt's tokens are off by this share of them.
_ESTIMATE_ERROR = 0.15
#: Programs in one report.
_MOST_PROGRAMS = 1000


@dataclass(slots=True, eq=False)
class _Sent:
    """A request that is in the engine; ``turn`` is None for one without a program."""

    prompt_tokens: int
    use: Use
    program: Program | None = None
    turn: Turn | None = None


class LogicalEngine:
    """One engine's programs and memory, by what was sent to it and what came back.

    ``capacity_blocks`` blocks of ``block_size`` tokens. ``seats``: requests that it runs at most;
    None: it does not say. ``keeps_prefixes``: whether it has a prefix cache. Tell it everything
    that happens, then ask for a :meth:`report`, and ask again at :attr:`deadline`.
    """

    def __init__(
        self,
        config: ThunderConfig,
        *,
        capacity_blocks: int,
        block_size: int,
        seats: int | None = None,
        keeps_prefixes: bool = True,
    ):
        for name, value in (
            ("capacity_blocks", capacity_blocks),
            ("block_size", block_size),
            ("seats", seats),
        ):
            if value is not None and value < 1:
                raise ThunderError(f"{name}: must be at least 1, not {value}")
        self.table = ProgramTable(config)
        self.policy = make_policy(config, self.table, ContextBlocks([(block_size, None)]))
        self.cache = PrefixCache(capacity_blocks, block_size, keeps=keeps_prefixes)
        self._context_groups: list[tuple[int, int | None]] = [(block_size, None)]
        self._seats = seats
        self._queue_length = 0
        self._prefill = PrefillTimes(self.policy.prefill)
        self._sent: dict[str, _Sent] = {}
        #: The last change that was reported; None: there was no report.
        self._reported: int | None = None
        self._changed = False
        #: When :meth:`report` has something new although nothing happened; inf: never.
        self.deadline = inf

    # -- what happens ------------------------------------------------------------------

    def turn_sent(self, turn: Turn, prompt_tokens: int, now: float) -> None:
        """A turn went to the engine; ``prompt_tokens`` may be an estimate.

        Raises ThunderError if it is there already.
        """
        self._refuse_twice(turn.turn_id)
        table = self.table
        if turn.program_id not in table and len(table) >= table.config.max_programs:
            idle = table.idle_longest()
            if idle is not None:
                table.evicted += 1
                self._release(idle)
        prompt_tokens = self._likely_tokens(turn.program_id, prompt_tokens)
        program = table.turn_arrived(turn, prompt_tokens, now)
        if not self.policy.admit(program, now):
            self._give_claim(program, turn.turn_id, now)
        table.request_runs(program, turn.turn_id)
        short_of_context = prompt_tokens < _CONTINUING_SHARE * program.context_tokens
        continues = not turn.one_off and not short_of_context
        cached = self.cache.cached_tokens(program, prompt_tokens) if continues else None
        if prompt_tokens < program.context_tokens:
            cached = None  # it was changed somewhere: nobody knows how much of it is there
        use = self.cache.begin(program, prompt_tokens, continues=continues)
        self._start(turn.turn_id, cached, _Sent(prompt_tokens, use, program, turn), now)

    def request_sent(self, request_id: str, prompt_tokens: int, now: float) -> None:
        """A request without a program went to the engine. Raises as :meth:`turn_sent`."""
        self._refuse_twice(request_id)
        use = self.cache.begin(None, prompt_tokens, continues=False)
        self._start(request_id, 0, _Sent(prompt_tokens, use), now)

    def first_byte(self, request_id: str, now: float) -> None:
        """The first byte of a streamed answer came; of a turn ``request_id`` is the turn id.

        Answers that come whole say nothing of prefill: do not tell it of them.
        """
        sent = self._sent.get(request_id)
        if sent is not None and not sent.use.computed:
            self._prefill.first_byte(request_id, now)
            self.cache.computed(sent.use)

    def turn_ended(
        self,
        request_id: str,
        context_tokens: int | None,
        now: float,
        output_tokens: int | None = None,
    ) -> None:
        """A turn, or a request without a program, ended.

        ``context_tokens``: prompt and output; None: it failed, was cut, or its answer does not
        tell. ``output_tokens``: None: what is not the prompt that was estimated. One that is not
        in the engine is ignored: the engine was started again since it was sent.
        """
        sent = self._sent.pop(request_id, None)
        if sent is None:
            return
        self._changed = True
        self._prefill.failed(request_id, now)
        left = context_tokens
        if left is None and sent.use.computed:
            left = sent.prompt_tokens
        if sent.program is None or sent.turn is None:
            self.cache.end(sent.use, left)
            return
        program = sent.program
        replaces = self._replaces(sent) if context_tokens is not None else False
        self.cache.end(sent.use, left, replaces=replaces)
        if context_tokens is not None and (sent.use.continues or replaces):
            program.side_calls = 0
            if output_tokens is None:
                output_tokens = max(context_tokens - sent.prompt_tokens, 0)
            self.table.learn_context(program, context_tokens, output_tokens)
        acts = self.table.request_ended(program, request_id, now)
        if acts or self.table.fan_ended(program, request_id, now):
            self._acts(program, now)

    def release(self, program_id: str) -> None:
        """The client says that the program has ended: forget it, or when its turns have ended."""
        program = self.table.get(program_id)
        if program is None:
            return
        if program.in_flight:
            program.release_when_turn_ends = True
        else:
            self.table.released += 1
            self._release(program)

    def tool_began(self, program_id: str, tool_name: str) -> None:
        """The client says which tool a program has begun to run."""
        program = self.table.get(program_id)
        if program is not None:
            program.tool = tool_name
            self.policy.tool_known(program)
            self._changed = True

    def queue_told(self, requests: int) -> None:
        """The engine says how many requests wait there: while any does it has no free seat."""
        self._queue_length = requests

    def cache_reset(self) -> None:
        """The engine's prefix cache was emptied: new weights, or somebody asked for it."""
        self.cache.reset()
        self._changed = True

    # -- what it comes to --------------------------------------------------------------

    def report(self, now: float, *, whole: bool = False) -> EngineReport:
        """What has changed since the last report; all there is in the first, or if ``whole``."""
        if self._changed or self.cache.is_short or now >= self.policy.deadline:
            self._reconcile(now)
        changes = self.table.changes
        for program in self.cache.take_changed():
            changes.changed(program.program_id)
        after = self._reported
        if whole or after is None or not changes.reaches_back_to(after):
            whole, after = True, 0
        page = changes.page(after, _MOST_PROGRAMS, gone_after=changes.sequence if whole else 0)
        self._reported = page.reached
        told = (self.table.get(program_id) for program_id in page.changed)
        memory = self._memory_report(now)
        self.deadline = min(self.policy.deadline, self.policy.newcomer_room_changes_at(now))
        return EngineReport(
            cursor=str(page.reached),
            reset=whole,
            complete=page.complete,
            memory=memory,
            programs=[_report_of(program) for program in told if program is not None],
            gone=page.gone,
        )

    def check_integrity(self) -> None:
        """Raise IntegrityError where the books disagree."""
        self.table.check_integrity()
        self.policy.check_integrity()
        self.cache.check_integrity()
        turns = {turn_id for program in self.table for turn_id in program.turns}
        sent = {name for name, each in self._sent.items() if each.program is not None}
        if turns != sent:
            raise IntegrityError(f"{sorted(turns ^ sent)} are sent or in flight, not both")
        if idle := [p for p in self.table if p.in_flight and p.status is not Status.ACTIVE]:
            raise IntegrityError(f"{idle} run without a claim")

    # -- inside ------------------------------------------------------------------------

    def _refuse_twice(self, request_id: str) -> None:
        if request_id in self._sent:
            raise ThunderError(f"turn {request_id!r} is in the engine already")

    def _likely_tokens(self, program_id: str, estimate: int) -> int:
        """Of a prompt: an estimate that is as near to the program's context as it may be off says
        only that the turn goes on, so it is the context and what turns usually add."""
        program = self.table.get(program_id)
        context = 0 if program is None else program.context_tokens
        if program is None or abs(estimate - context) > _ESTIMATE_ERROR * context:
            return estimate
        growth = program.growth or self.table.growth.value
        added = max(round(growth - self.table.output_tokens.value), 1)
        return context + added if growth else max(estimate, context)

    def _start(self, request_id: str, cached: int | None, sent: _Sent, now: float) -> None:
        no_seat = self._seats is not None and len(self._sent) >= self._seats
        if no_seat or self._queue_length or self.cache.is_short:
            cached = None  # it waits there before it is computed
        self._prefill.sent(request_id, cached, sent.prompt_tokens, now)
        self._sent[request_id] = sent
        self._changed = True

    def _give_claim(self, program: Program, turn_id: str, now: float) -> None:
        """The policy restores it beside the others or in the place of claims that have lapsed; if
        not, it runs all the same, and the policy sheds."""
        self.table.request_held(program, turn_id, now)
        self.policy.waits(program, now)
        self._reconcile(now)
        if program.held:
            self._unhold(program, now)
        if program.status is not Status.ACTIVE:
            self.policy.activate(program, now)

    def _unhold(self, program: Program, now: float) -> None:
        for turn_id in list(program.held):
            self.table.request_unheld(program, turn_id, now)
        self.policy.waits_no_more(program)

    def _replaces(self, sent: _Sent) -> bool:
        """Whether a turn that did not continue its program's context is its context now. As in our
        engines, the first one is taken for a side call, and a second one for a new context."""
        assert sent.program is not None
        assert sent.turn is not None
        if sent.use.continues or sent.turn.one_off:
            return False
        if sent.program.side_calls:
            return True
        sent.program.side_calls += 1
        return False

    def _acts(self, program: Program, now: float) -> None:
        """Its last turn ended."""
        if program.release_when_turn_ends:
            self.table.released += 1
            self._release(program)
            return
        for action in self.policy.acts(program, now):
            self._carry_out(action, now)

    def _reconcile(self, now: float) -> None:
        self._changed = False
        for program in self.cache.take_changed():
            self.table.changes.changed(program.program_id)
            if not program.resident_blocks and not program.in_flight:
                for action in self.policy.lost_blocks(program):
                    self._carry_out(action, now)
        for action in self.policy.reconcile(now, self._memory()):
            self._carry_out(action, now)

    def _carry_out(self, action: Action, now: float) -> None:
        if action.kind is ActionKind.RELEASE:
            self._release(action.program)
        elif action.kind is ActionKind.RESTORE:
            self._unhold(action.program, now)

    def _release(self, program: Program) -> None:
        self.policy.forget(program)
        self.table.release(program)
        self.cache.forget(program)
        self._changed = True

    def _memory(self) -> Memory:
        return Memory(
            capacity_blocks=self.cache.capacity_blocks,
            unlabelled_blocks=self.cache.unlabelled_blocks,
            shared_blocks=0,
            free_blocks=self.cache.free_blocks,
            free_slots=self._free_seats(),
            busy=bool(self._sent),
            borrowed_blocks=lambda program: 0,
            common_blocks=lambda program, other: 0,
        )

    def _free_seats(self) -> int:
        if self._queue_length:
            return 0
        # An engine that does not say how many it runs can at least not run more than this.
        seats = self.cache.capacity_blocks if self._seats is None else self._seats
        return max(seats - len(self._sent), 0)

    def _memory_report(self, now: float) -> MemoryReport:
        per_token, per_position = self.policy.prefill.fitted or (None, 0.0)
        return MemoryReport(
            capacity_blocks=self.cache.capacity_blocks,
            room_blocks=self.policy.newcomer_room(now, self._memory()),
            free_seats=self._free_seats(),
            context_groups=self._context_groups,
            prefill_seconds_per_token=per_token,
            prefill_seconds_per_position=per_position,
            claimed_blocks=self.cache.unlabelled_blocks + self.table.claimed,
        )


def _report_of(program: Program) -> ProgramReport:
    """Without tokens of prompts: they are learned from the answers that tell them."""
    return ProgramReport(
        program_id=program.program_id,
        context_tokens=program.context_tokens,
        resident_blocks=program.resident_blocks,
        claimed=program.status is Status.ACTIVE,
        turns_in_flight=len(program.turns),
    )
