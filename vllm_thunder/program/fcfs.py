"""Stock order, and the interface of every policy."""

from math import inf

from vllm_thunder.program.config import ThunderConfig
from vllm_thunder.program.cost import PrefillCost
from vllm_thunder.program.decisions import Action, ActionKind, Memory, Wait
from vllm_thunder.program.program import Program, Status
from vllm_thunder.program.table import ProgramTable

__all__ = ["FcfsPolicy"]


class FcfsPolicy:
    """Every turn is admitted as it arrives, programs are only accounted.

    A policy changes the table, and returns what the scheduler has to carry out in the engine.
    """

    #: Whether a turn may ever be held: only then does :meth:`reconcile` restore one.
    holds = False

    def __init__(self, config: ThunderConfig, table: ProgramTable):
        self.config = config
        self.table = table
        self.prefill = PrefillCost()
        #: When :meth:`reconcile` must be called although nothing happens; inf: never.
        self.deadline = inf

    # -- events ------------------------------------------------------------------------

    def admit(self, program: Program, now: float) -> bool:
        """Whether a turn that has just arrived goes straight to the engine's queue."""
        if program.status is not Status.ACTIVE:
            self.table.activate(program, now)
        return True

    def activate(self, program: Program, now: float) -> None:
        """Give the program a claim now, whatever memory says."""
        self.table.activate(program, now)

    def waits(self, program: Program, now: float) -> None:
        """A turn of the program is held from now on, or one of several is no longer."""

    def waits_no_more(self, program: Program) -> None:
        """The program has no held turn any more."""

    def acts(self, program: Program, now: float) -> list[Action]:
        """The program's last turn in flight ended."""
        return []

    def drained(self, program: Program) -> list[Action]:
        """The last of the program's running requests ended; others of its turns are held."""
        return []

    def tool_known(self, program: Program) -> None:
        """The client said which tool the acting program runs."""

    def lost_blocks(self, program: Program) -> list[Action]:
        """The last free block of an active program was reused by somebody else."""
        return []

    def withdraw(self, program: Program) -> list[Action]:
        """The engine could not run an active program's turn: it has to be restored again."""
        return []

    def forget(self, program: Program) -> None:
        """The program is about to be released."""

    # -- decisions ---------------------------------------------------------------------

    def reconcile(self, now: float, memory: Memory) -> list[Action]:
        """The actions due at ``now``; sets ``deadline``.

        The table is already changed when it returns: the caller carries the actions out.
        """
        return self.expire(now)

    def expire(self, now: float) -> list[Action]:
        """Release programs whose retention ended: all that happens while the engine is paused."""
        expired = self.table.expired_programs(now)
        self.deadline = self.table.next_expiry(now)
        return [Action(ActionKind.RELEASE, program, "retention ended") for program in expired]

    def newcomer_room(self, now: float, memory: Memory) -> float:
        """Blocks that a program may claim that comes at ``now``, behind all that wait; negative
        when those who are here want more than there is."""
        return memory.free_blocks

    def newcomer_room_changes_at(self, now: float) -> float:
        """When that room will next have changed although nothing happens; inf: never."""
        return inf

    def check_integrity(self) -> None:
        """Raise IntegrityError where what the policy keeps in order is not what the table says."""

    # -- for people --------------------------------------------------------------------

    def why_held(self, program: Program, now: float, memory: Memory) -> Wait:
        """What a program with held turns waits for."""
        return Wait(0, 0, 0, 0.0, "admitted at the next step")
