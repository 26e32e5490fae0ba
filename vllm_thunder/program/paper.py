"""ThunderAgent's plain rule (arXiv 2602.13692, section "Policy"), to compare ours with."""

from math import inf

from vllm_thunder.program.config import ThunderConfig
from vllm_thunder.program.cost import ContextBlocks, decay
from vllm_thunder.program.decisions import Action, ActionKind, Memory, Wait
from vllm_thunder.program.errors import IntegrityError
from vllm_thunder.program.fcfs import FcfsPolicy
from vllm_thunder.program.program import Phase, Program, Status
from vllm_thunder.program.ranked import Ranked
from vllm_thunder.program.table import ProgramTable

__all__ = ["PaperPolicy"]


class PaperPolicy(FcfsPolicy):
    """Every Δt: pause while decayed use is above λ_max C, restore while it is below λ_min C.

    Use is the sum over reasoning programs of c plus that over acting ones of c * f(t); Δt is
    ``interval``, λ_max and λ_min the watermarks, f(t) = 2^-(t/``acting_half_life``). c counts
    blocks, those that several programs share once. Turns of paused and new programs wait. An
    engine that has nothing to run does not wait for the end of Δt; nothing else is added.
    """

    holds = True

    def __init__(self, config: ThunderConfig, table: ProgramTable, blocks_of: ContextBlocks):
        super().__init__(config, table)
        self.blocks_of = blocks_of
        self._next_tick = 0.0
        #: Programs with held turns, the shortest context first.
        self._order: Ranked[Program] = Ranked()

    def admit(self, program: Program, now: float) -> bool:
        overlaps = program.yields and program.requests_running > 1
        return program.status is Status.ACTIVE and not overlaps

    def waits(self, program: Program, now: float) -> None:
        self._order.put(program, self._blocks(program))

    def waits_no_more(self, program: Program) -> None:
        self._order.discard(program)

    def acts(self, program: Program, now: float) -> list[Action]:
        return self.drained(program)

    def drained(self, program: Program) -> list[Action]:
        if not program.yields or program.status is not Status.ACTIVE:
            return []
        return [self._pause(program)]

    def withdraw(self, program: Program) -> list[Action]:
        return [self._pause(program)]

    def reconcile(self, now: float, memory: Memory) -> list[Action]:
        actions = self.expire(now)
        stuck = bool(self.table.waiting) and not memory.busy
        if now >= self._next_tick or stuck:
            self._next_tick = now + self.config.interval
            use = self._use(now, memory)
            limit = self.config.high_watermark * memory.capacity_blocks
            if use > limit:
                target = self.config.pause_target * memory.capacity_blocks
                actions += self._shed(use - min(limit, target), now)
            if use <= limit or stuck:
                actions += self._restore(use, now, memory)
        if self.table.waiting or self.table.active:
            self.deadline = min(self.deadline, self._next_tick)
        return actions

    def newcomer_room(self, now: float, memory: Memory) -> float:
        """What is missing to λ_max C while programs are restored, else what is above λ_min C."""
        use = self._use(now, memory)
        low = self.config.low_watermark * memory.capacity_blocks
        high = self.config.high_watermark * memory.capacity_blocks
        waiting = sum(float(blocks) for blocks, _ in self._order.items())
        return (high - use if use < low else low - use) - waiting

    def newcomer_room_changes_at(self, now: float) -> float:
        # Use decays all the time; what follows from it is decided once per Δt.
        acting = any(program.phase is Phase.ACTING for program in self.table.active)
        return self._next_tick if acting and self._next_tick > now else inf

    def check_integrity(self) -> None:
        if set(self._order) != set(self.table.waiting):
            raise IntegrityError(f"{set(self.table.waiting)} wait, {self._order} are in order")

    def why_held(self, program: Program, now: float, memory: Memory) -> Wait:
        short = (
            self._use(now, memory)
            + self._blocks(program)
            - (self.config.high_watermark * memory.capacity_blocks)
        )
        return Wait(
            blocks_needed=self._blocks(program),
            blocks_short=max(round(short), 0),
            position=self._order.position(program),
            expected_seconds=None,
            reason="is restored at a tick of the interval, the shortest context first",
        )

    def _blocks(self, program: Program) -> int:
        tokens = max(program.context_tokens, program.prompt_tokens) + self.config.buffer_tokens
        return max(self.blocks_of(tokens) - program.shared_resident_blocks, 1)

    def _decayed(self, program: Program, now: float) -> float:
        if program.phase is Phase.REASONING:
            return self._blocks(program)
        acted = now - program.idle_since
        weight = self.config.acting_weight * decay(acted, self.config.acting_half_life)
        return self._blocks(program) * weight

    def _use(self, now: float, memory: Memory) -> float:
        active = sum(self._decayed(program, now) for program in self.table.active)
        return active + memory.shared_blocks + memory.unlabelled_blocks

    def _shed(self, blocks: float, now: float) -> list[Action]:
        """By S_pause = 1/c + [acting], the highest first; running turns end first."""
        actions: list[Action] = []
        active = sorted(
            self.table.active, key=lambda p: (p.phase is Phase.REASONING, self._blocks(p))
        )
        for program in active:
            if blocks <= 0:
                break
            blocks -= self._decayed(program, now)
            if program.phase is Phase.ACTING:
                actions.append(self._pause(program))
            else:
                self.table.set_yields(program, True)
        return actions

    def _restore(self, use: float, now: float, memory: Memory) -> list[Action]:
        """By S_restore = 1/c + [reasoning], the highest first."""
        actions: list[Action] = []
        low = self.config.low_watermark * memory.capacity_blocks
        high = self.config.high_watermark * memory.capacity_blocks
        slots = memory.free_slots
        for program in self._order:
            need = self._blocks(program)
            stuck = not memory.busy and not actions  # else a context above C waits for ever
            if slots <= 0 or (not stuck and (use >= low or use + need > high)):
                break
            self.activate(program, now)
            program.restores += 1
            actions.append(Action(ActionKind.RESTORE, program, "use is below λ_min C"))
            use += need
            slots -= len(program.held)
        return actions

    def _pause(self, program: Program) -> Action:
        self.table.pause(program)
        return Action(ActionKind.PAUSE, program, "use is above λ_max C")
