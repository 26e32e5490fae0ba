"""Who may use KV-cache memory: the decisions, as a pure function of the table and of memory.

A decision reads as named steps: :meth:`ThunderPolicy.admit` when a turn arrives, and
:meth:`ThunderPolicy.reconcile` (expire, shed, restore, rescue) whenever something changed or a
deadline that the policy itself named has come.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from math import inf

from vllm_thunder.program.config import ThunderConfig
from vllm_thunder.program.cost import ContextBlocks, PrefillRate
from vllm_thunder.program.errors import ConfigError
from vllm_thunder.program.program import Phase, Program, Status
from vllm_thunder.program.table import ProgramTable

__all__ = [
    "Action",
    "ActionKind",
    "FcfsPolicy",
    "Memory",
    "ThunderPolicy",
    "hold_seconds",
    "make_policy",
]


class ActionKind(StrEnum):
    PAUSE = "pause"
    RESTORE = "restore"
    RELEASE = "release"


@dataclass(frozen=True, slots=True)
class Action:
    """What the scheduler has to carry out; ``reason`` is for people."""

    kind: ActionKind
    program: Program
    reason: str


@dataclass(frozen=True, slots=True)
class Memory:
    """What the engine's memory and queues look like at one instant.

    ``capacity_blocks``: blocks of the pool. ``unlabelled_blocks``: blocks in use by requests
    without a program. ``shared_blocks``: resident blocks that several programs hold.
    ``free_blocks``: blocks that no running request references. ``free_slots``: turns that the
    engine may run beside those it runs. ``busy``: the engine runs something now.
    ``borrowed_blocks(program)``: blocks of a waiting program's prompt that are in memory and that
    others' claims pay for already; asked only for programs whose turn to be restored it is.
    """

    capacity_blocks: int
    unlabelled_blocks: int
    shared_blocks: int
    free_blocks: int
    free_slots: int
    busy: bool
    borrowed_blocks: Callable[[Program], int]


#: Seconds for which an acting program keeps its claim before any prefill rate is known.
_HOLD_PRIOR_SECONDS = 5.0
#: While turns are held a decision is made at least this often (the paper's Δt is 5 s).
_TICK_SECONDS = 1.0
#: A turn that has waited this share of ``max_wait`` displaces programs at their turn ends. On the
#: ``thrash`` load with ``max_wait`` 60 a third instead of a half costs a sixth of the throughput
#: (a simulation with measured step times, four seeds).
_OVERDUE_SHARE = 0.5
#: How fast waiting makes up for size in the order of restores. In the same simulation 0, plain
#: shortest-first, loses a tenth of the throughput and a fifth of the p99; 1 to 5 are alike.
_AGEING_EXPONENT = 3


class FcfsPolicy:
    """Stock order: every turn is admitted as it arrives, programs are only accounted."""

    #: Whether a turn may ever be held: only then does :meth:`reconcile` restore one.
    holds = False

    def __init__(self, config: ThunderConfig, table: ProgramTable):
        self.config = config
        self.table = table
        self.prefill_rate = PrefillRate()
        #: When :meth:`reconcile` must be called although nothing happens; inf: never.
        self.deadline = inf

    def admit(self, program: Program, now: float) -> bool:
        """Whether a turn that has just arrived goes straight to the engine's queue."""
        if program.status is not Status.ACTIVE:
            self.table.activate(program, now)
        return True

    def activate(self, program: Program, now: float) -> None:
        """Give the program a claim now, whatever memory says."""
        self.table.activate(program, now)

    def acts(self, program: Program) -> None:
        """The program's last turn in flight ended."""

    def lost_blocks(self, program: Program) -> list[Action]:
        """The last free block of an active program was reused by somebody else."""
        return []

    def reconcile(self, now: float, memory: Memory) -> list[Action]:
        """The actions due at ``now``; sets ``deadline``.

        The table is already changed when it returns: the caller carries the actions out.
        """
        return self.expire(now)

    def expire(self, now: float) -> list[Action]:
        """Release programs whose retention ended: all that happens while the engine is paused."""
        expired = self.table.expired_programs(now)
        self.deadline = self.table.next_expiry
        self.table.expired += len(expired)
        return [Action(ActionKind.RELEASE, program, "retention ended") for program in expired]

    def why_held(self, now: float, memory: Memory) -> dict[Program, str]:
        """For people: what each program with held turns waits for."""
        return dict.fromkeys(self.table.waiting, "admitted at the next step")


class ThunderPolicy(FcfsPolicy):
    """Hold, pause and restore programs by what memory allows.

    Each active program *claims* the blocks that its context will need; claims of active
    programs, shared blocks once, stay below the watermarks. A turn of a paused or new program
    is held until its claim fits.
    """

    holds = True

    def __init__(self, config: ThunderConfig, table: ProgramTable, blocks_of: ContextBlocks):
        super().__init__(config, table)
        self.blocks_of = blocks_of

    def admit(self, program: Program, now: float) -> bool:
        if program.status is not Status.ACTIVE:
            return False
        self.table.set_claim(program, self._claim(program))
        return True

    def activate(self, program: Program, now: float) -> None:
        super().activate(program, now)
        self.table.set_claim(program, self._claim(program))

    def acts(self, program: Program) -> None:
        if program.status is Status.ACTIVE:
            self.table.set_claim(program, self._claim(program))

    def lost_blocks(self, program: Program) -> list[Action]:
        # It has nothing left to keep: its return costs what a restore costs.
        if program not in self.table.acting:
            return []
        return [self._pause(program, "its blocks were reused")]

    def reconcile(self, now: float, memory: Memory) -> list[Action]:
        actions = self.expire(now)
        short = -self._room(memory, self.config.high_watermark)
        if short > 0:
            actions += self._shed(short)
        if self.table.waiting:
            actions += self._restore(now, memory)
        if self.table.waiting:
            # Events bring us here sooner; memory that is freed without one must not be missed.
            self.deadline = min(self.deadline, now + _TICK_SECONDS)
        return actions

    def why_held(self, now: float, memory: Memory) -> dict[Program, str]:
        room = max(self._room(memory, self.config.low_watermark), 0.0)
        order = sorted(self.table.waiting, key=lambda p: self._restore_order(p, now))
        return {
            program: f"needs {self._claim(program):.0f} blocks, {room:.0f} are unclaimed; "
            f"{position} programs are restored before it"
            for position, program in enumerate(order)
        }

    def _claim(self, program: Program) -> float:
        """Blocks that the program will use by itself, its next turn included.

        Of a program that acts after its first turn, the part that is likely to be used: many
        clients never come back.
        """
        reasoning = program.phase is Phase.REASONING
        if reasoning:
            ahead = self.table.output_tokens.value
        else:
            ahead = program.growth or self.table.growth.value
        tokens = max(program.context_tokens, program.prompt_tokens) + ahead
        borrowed = max(program.shared_blocks, program.borrowed_blocks)
        blocks = max(self.blocks_of(tokens) - borrowed, 1)
        return blocks if reasoning or program.turns_done > 1 else blocks * self.table.returns.value

    def _room(self, memory: Memory, watermark: float) -> float:
        """Blocks below the watermark that nobody claims; negative: claimed twice."""
        budget = watermark * memory.capacity_blocks - memory.unlabelled_blocks
        return budget - memory.shared_blocks - self.table.claimed

    # -- the steps ---------------------------------------------------------------------

    def _shed(self, blocks: float) -> list[Action]:
        """Claims outgrew memory: pause by S_pause = 1/c + [acting], the highest first.

        (ThunderAgent, section "Policy".) A running turn keeps its blocks: its program leaves
        when the turn ends, and the last one stays.
        """
        actions: list[Action] = []
        for program in sorted(self.table.acting, key=lambda p: p.context_tokens):
            if blocks <= 0:
                return actions
            blocks -= program.claim
            actions.append(self._pause(program, "memory is short"))
        reasoning = [p for p in self.table.active if p.phase is Phase.REASONING]
        for program in sorted(reasoning, key=lambda p: p.context_tokens)[:-1]:
            if blocks <= 0:
                break
            program.pause_when_turn_ends = True
            blocks -= program.claim
        return actions

    def _restore(self, now: float, memory: Memory) -> list[Action]:
        """Restore waiting programs while their claims fit, overdue ones first."""
        actions: list[Action] = []
        room = self._room(memory, self.config.low_watermark)
        slots = memory.free_slots
        free = memory.free_blocks
        hold = hold_seconds(self.blocks_of.tokens_in(memory.capacity_blocks), self.prefill_rate)
        busy = memory.busy
        for program in sorted(self.table.waiting, key=lambda p: self._restore_order(p, now)):
            assert program.waiting_since is not None
            if slots <= 0:
                break
            waited = now - program.waiting_since
            program.borrowed_blocks = memory.borrowed_blocks(program)
            need = self._claim(program)
            prompt = self.blocks_of(program.prompt_tokens) - program.borrowed_blocks
            overdue = waited >= _OVERDUE_SHARE * self.config.max_wait
            # Requests without a program cannot be asked to yield. An overdue turn that they keep
            # out waits in the engine's own queue, where nobody passes it any more.
            queueable = memory.unlabelled_blocks if overdue else 0
            if busy and prompt > free + queueable:
                break  # running turns reference the blocks: only their ends help
            reason = "its claim fits"
            if need > room:
                rescue = not busy and waited >= self.config.idle_grace
                chosen = self._victims(need - room, now, 0.0 if overdue or rescue else hold)
                freed = sum(victim.claim for victim in chosen)
                if need > room + freed + queueable and not rescue:
                    if overdue:
                        self._yield_at_turn_end(need - room - freed)
                    self._set_deadline(program, waited, now, hold, busy)
                    break
                for victim in chosen:
                    actions.append(self._pause(victim, f"makes room for {program.program_id!r}"))
                room += freed
                reason = "overdue" if overdue else "nothing to run" if rescue else "a claim lapsed"
            self.activate(program, now)
            program.restores += 1
            program.goes_first = overdue
            actions.append(Action(ActionKind.RESTORE, program, reason))
            room -= need
            free -= prompt
            slots -= len(program.held)
            busy = True
        return actions

    def _victims(self, blocks: float, now: float, acted_for: float) -> list[Program]:
        """Acting programs with ``blocks`` claimed blocks, the one that has acted longest first.

        Only those that have acted for ``acted_for`` seconds; fewer blocks if there are no more.
        """
        chosen: list[Program] = []
        for program in self.table.acting:
            if blocks <= 0 or now - program.idle_since < acted_for:
                break
            blocks -= program.claim
            chosen.append(program)
        return chosen

    def _yield_at_turn_end(self, blocks: float) -> None:
        """Ask reasoning programs to pause when their turns end, the longest served first."""
        for program in self.table.active:
            if program.pause_when_turn_ends:
                blocks -= program.claim
        reasoning = [p for p in self.table.active if p.phase is Phase.REASONING]
        for program in sorted(reasoning, key=lambda p: p.restored_at):
            if blocks <= 0:
                return
            if not program.pause_when_turn_ends:
                program.pause_when_turn_ends = True
                blocks -= program.claim

    def _restore_order(self, program: Program, now: float) -> tuple[float, ...]:
        """Overdue programs in order of arrival, then by priority and aged S_restore.

        S_restore puts the shortest context first (ThunderAgent, section "Policy"; all that wait
        are reasoning). Waiting shrinks a context in this order, to nothing when it is overdue.
        """
        assert program.waiting_since is not None
        waited = (now - program.waiting_since) / (_OVERDUE_SHARE * self.config.max_wait)
        if waited >= 1:
            return (0, program.waiting_since)
        tokens = max(program.context_tokens, program.prompt_tokens)
        return (1, program.priority, tokens * (1 - waited) ** _AGEING_EXPONENT)

    def _pause(self, program: Program, reason: str) -> Action:
        self.table.pause(program)
        return Action(ActionKind.PAUSE, program, reason)

    def _set_deadline(
        self, first: Program, waited: float, now: float, hold: float, busy: bool
    ) -> None:
        """When does the case of ``first``, who waits, change although nothing happens?"""
        overdue = _OVERDUE_SHARE * self.config.max_wait
        due = [now + overdue - waited]
        for program in self.table.waiting:  # in order of arrival: the next to be overdue
            assert program.waiting_since is not None
            if program.waiting_since + overdue > now:
                due.append(program.waiting_since + overdue)
                break
        if not busy:
            due.append(now + self.config.idle_grace - waited)
        for program in self.table.acting:  # in order of idleness: the next claim to lapse
            if program.idle_since + hold > now:
                due.append(program.idle_since + hold)
                break
        self.deadline = min([self.deadline, *(at for at in due if at > now)])


def hold_seconds(capacity_tokens: float, prefill_rate: PrefillRate) -> float:
    """Seconds after which holding an acting program's KV has cost as much as recomputing it.

    Holding c tokens for t seconds takes the share c/C of the engine's memory for t; recomputing
    takes the whole engine for c/rate. Both are equal at t = C/rate whatever c is, and the rule
    "hold until then" costs at most twice what a clairvoyant would pay (the ski-rental bound),
    for any distribution of tool times.
    """
    rate = prefill_rate.tokens_per_second
    if rate is None:
        return _HOLD_PRIOR_SECONDS
    return capacity_tokens / rate


def make_policy(config: ThunderConfig, table: ProgramTable, blocks_of: ContextBlocks) -> FcfsPolicy:
    """The policy that ``config.policy`` names, for a model with contexts of ``blocks_of``."""
    match config.policy:
        case "fcfs":
            return FcfsPolicy(config, table)
        case "thunder":
            return ThunderPolicy(config, table, blocks_of)
        case name:
            raise ConfigError(f"--thunder-policy: no policy is called {name!r}")
