"""Our policy: who may use KV-cache memory, decided whenever something changed.

A decision reads as named steps: :meth:`ThunderPolicy.admit` when a turn arrives, and
:meth:`ThunderPolicy.reconcile` (expire, shed, restore) whenever something changed or a deadline
that the policy itself named has come. Its cost follows what it does: everything that waits or
lapses is kept in order.
"""

from collections.abc import Iterator
from itertools import chain
from math import inf

from vllm_thunder.program.config import ThunderConfig
from vllm_thunder.program.cost import ContextBlocks, Ewma
from vllm_thunder.program.decisions import Action, ActionKind, Memory, Wait
from vllm_thunder.program.errors import IntegrityError
from vllm_thunder.program.fcfs import FcfsPolicy
from vllm_thunder.program.program import Phase, Program, Status
from vllm_thunder.program.ranked import Ranked
from vllm_thunder.program.table import ProgramTable

__all__ = ["ThunderPolicy"]

#: Seconds for which an acting program keeps its claim before any prefill was measured.
_HOLD_PRIOR_SECONDS = 5.0
#: Tool times that have to be seen before claims lapse by them.
_FEWEST_TOOL_TIMES = 8
#: While turns are held a decision is made at least this often (the paper's Δt is 5 s).
_TICK_SECONDS = 1.0
#: A turn that has waited this share of ``max_wait``, or of its own deadline, is due: it goes
#: before all others and displaces programs at their turn ends. On the ``thrash`` load with
#: ``max_wait`` 60 a third instead of a half costs a sixth of the throughput (a simulation with
#: measured step times, four seeds).
_DUE_SHARE = 0.5


class ThunderPolicy(FcfsPolicy):
    """Hold, pause and restore programs by what memory allows.

    Each active program *claims* the blocks that its context will need; claims of active
    programs, shared blocks once, stay below the watermarks. A turn of a paused or new program
    is held until its claim fits. An acting program keeps its claim for as long as that is
    expected to cost less than computing its context again; then it lapses, and is given up when
    somebody needs the memory.
    """

    holds = True

    def __init__(self, config: ThunderConfig, table: ProgramTable, blocks_of: ContextBlocks):
        super().__init__(config, table)
        self.blocks_of = blocks_of
        #: Active programs that act: the lowest priority first, then the claim that lapses first.
        self.acting: Ranked[Program] = Ranked()
        #: Programs with held turns in the order of their restore.
        self._order: Ranked[Program] = Ranked()
        #: The same by the time at which they are due.
        self._due: Ranked[Program] = Ranked()
        #: What each of them needs beside its claim, in blocks, and the sum of that.
        self._needs: dict[Program, float] = {}
        self._needed = 0.0
        self._capacity_tokens = inf
        #: Since when the engine has had nothing to run; None: it has.
        self._idle_since: float | None = None
        self._restore_gap = Ewma(prior=0.0, weight=0.1)
        self._last_restore: float | None = None

    # -- events ------------------------------------------------------------------------

    def admit(self, program: Program, now: float) -> bool:
        self.acting.discard(program)
        parent = self.table.parent(program)
        if parent is not None and parent in self.acting:
            # It waits for its sub-agent: the first to give its memory to somebody who needs it.
            self.acting.put(parent, (-parent.priority, now))
        if program.status is not Status.ACTIVE:
            return False
        if program.yields and program.requests_running > 1 and self.table.waiting:
            return False  # turns that overlap would keep it from ever yielding
        self._idle_since = None
        self.table.set_claim(program, self._claim(program))
        return True

    def activate(self, program: Program, now: float) -> None:
        super().activate(program, now)
        self.table.set_claim(program, self._claim(program))
        self._set_need(program)
        if program.phase is Phase.ACTING:
            self._rank_acting(program)

    def waits(self, program: Program, now: float) -> None:
        assert program.waiting_since is not None
        self._due.put(program, program.waiting_since + self._due_seconds(program))
        self._order.put(program, self._restore_rank(program))
        self._set_need(program)

    def waits_no_more(self, program: Program) -> None:
        self._due.discard(program)
        self._order.discard(program)
        self._needed -= self._needs.pop(program, 0.0)
        if not self._needs:
            self._needed = 0.0  # rounding does not add up for ever

    def acts(self, program: Program, now: float) -> list[Action]:
        program.borrowed_blocks = 0  # the ledger knows what it shares by now
        if program.status is not Status.ACTIVE:
            return []
        if program.yields and self.table.waiting:
            return self.drained(program)
        self.table.set_yields(program, False)
        self.table.set_claim(program, self._claim(program))
        self._rank_acting(program)
        return []

    def drained(self, program: Program) -> list[Action]:
        if not program.yields or program.status is not Status.ACTIVE:
            return []
        return [self._pause(program, "yields to a program that waits")]

    def tool_known(self, program: Program) -> None:
        if program in self.acting:
            self._rank_acting(program)

    def lost_blocks(self, program: Program) -> list[Action]:
        # It has nothing left to keep: its return costs what a restore costs.
        if program not in self.acting:
            return []
        return [self._pause(program, "its blocks were reused")]

    def withdraw(self, program: Program) -> list[Action]:
        return [self._pause(program, "its turn did not fit")]

    def forget(self, program: Program) -> None:
        self.acting.discard(program)

    # -- decisions ---------------------------------------------------------------------

    def reconcile(self, now: float, memory: Memory) -> list[Action]:
        self._capacity_tokens = self.blocks_of.tokens_in(memory.capacity_blocks)
        if memory.busy:
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = now
        actions = self.expire(now)
        for action in actions:
            self.acting.discard(action.program)
        high = self.config.high_watermark
        if -self._room(memory, high) > self.table.yielding:
            target = min(self.config.pause_target, high)
            actions += self._shed(-self._room(memory, target))
        if self.table.waiting:
            actions += self._restore(now, memory)
        if self.table.waiting:
            # Events bring us here sooner; memory that is freed without one must not be missed.
            self.deadline = min(self.deadline, now + _TICK_SECONDS)
        return actions

    def newcomer_room(self, now: float, memory: Memory) -> float:
        """What nobody claims below the low watermark, and what acting programs give up to anybody
        who waits; without what those need that wait already."""
        room = self._room(memory, self.config.low_watermark) - self._needed
        if not memory.busy and self._idle_since is not None:
            return room + self._spare(now)[0]
        if not self.table.priorities_differ:
            return room + sum(program.claim for program in self.acting.until((0, now)))
        return room + sum(p.claim for (_, lapses_at), p in self.acting.items() if lapses_at <= now)

    def newcomer_room_changes_at(self, now: float) -> float:
        if not self.acting:
            return inf
        if self.table.priorities_differ:
            lapses = [lapses_at for (_, lapses_at), _ in self.acting.items()]
        else:
            lapses = [self.acting.next_rank((0, now), (0, inf))[1]]
        return min((at for at in (*lapses, self._spare(now)[1]) if at > now), default=inf)

    def _spare(self, now: float) -> tuple[float, float]:
        """Claims of acting programs that an idle engine gives up: those that have lapsed, and after
        ``idle_grace`` as many as could have been computed again in the time that it has been idle
        since (ski rental); and when there are more of them."""
        if self._idle_since is None:
            return 0.0, inf
        spare = 0.0
        at = self._idle_since + self.config.idle_grace
        for (_, lapses_at), program in self.acting.items():
            cost = self.prefill.seconds(0, program.context_tokens)
            at += _HOLD_PRIOR_SECONDS if cost is None else cost
            if now < min(at, lapses_at):
                return spare, min(at, lapses_at)
            spare += program.claim
        return spare, inf

    def check_integrity(self) -> None:
        waiting = set(self.table.waiting)
        if self._needs.keys() != waiting:
            raise IntegrityError(f"{waiting} wait, {self._needs} are needed")
        if abs((counted := sum(self._needs.values())) - self._needed) > 1e-6 * max(counted, 1.0):
            raise IntegrityError(f"{self._needed} blocks are needed, {counted} counted")
        acting = {p for p in self.table.active if p.phase is Phase.ACTING}
        if set(self._order) != waiting or set(self._due) != waiting:
            raise IntegrityError(f"{waiting} wait, {self._order} and {self._due} are in order")
        if set(self.acting) != acting:
            raise IntegrityError(f"{acting} act with a claim, {self.acting} are in order")

    def why_held(self, program: Program, now: float, memory: Memory) -> Wait:
        assert program.waiting_since is not None
        needed = self._claim(program) - program.claim
        room = self._room(memory, self.config.low_watermark)
        short = max(round(needed - room), 0)
        due_in = program.waiting_since + self._due_seconds(program) - now
        if due_in <= 0:
            position = self._due.position(program)
        else:
            mine, due = self._restore_rank(program), list(self._due.until(now))
            passed_by = sum(self._restore_rank(each) > mine for each in due)
            position = self._order.position(program) + passed_by
        expected = None
        if self._restore_gap.samples:
            expected = self._restore_gap.value * (position + 1)
        reason = "needs more memory than is unclaimed" if short else "waits for its turn"
        return Wait(
            blocks_needed=round(needed),
            blocks_short=short,
            position=position,
            expected_seconds=expected,
            reason="is due: programs yield to it as their turns end" if due_in <= 0 else reason,
        )

    def _claim(self, program: Program) -> float:
        """Blocks that the program will use by itself, its next turn included.

        Of a program that acts, the part that is likely to be used: many clients end after one turn,
        others later without a word.
        """
        reasoning = program.phase is Phase.REASONING
        if reasoning:
            ahead = self.table.output_tokens.value
        else:
            ahead = program.growth or self.table.growth.value
        tokens = max(program.context_tokens, program.prompt_tokens) + ahead
        tokens += self.config.buffer_tokens
        borrowed = max(program.shared_resident_blocks, program.borrowed_blocks)
        blocks = max(self.blocks_of(tokens) - borrowed, 1)
        if reasoning:
            return blocks
        return blocks * self.table.returning(program) * self.config.acting_weight

    def _room(self, memory: Memory, watermark: float) -> float:
        """Blocks below the watermark that nobody claims; negative: claimed twice."""
        budget = watermark * memory.capacity_blocks - memory.unlabelled_blocks
        return budget - memory.shared_blocks - self.table.claimed

    def _set_need(self, program: Program) -> None:
        """The claim of a program changed, or it has begun to wait: then that is what it needs."""
        if program.waiting_since is not None:
            need = self._claim(program) - program.claim
            self._needed += need - self._needs.get(program, 0.0)
            self._needs[program] = need

    def _due_seconds(self, program: Program) -> float:
        """Seconds after its arrival at which a turn of the program is due."""
        limit = self.config.max_wait
        if program.deadline_seconds is not None:
            limit = min(limit, program.deadline_seconds)
        return _DUE_SHARE * limit

    def _restore_rank(self, program: Program) -> tuple[int, float]:
        """By priority, then in order of arrival.

        Not by S_restore, the shortest context first (ThunderAgent, section "Policy"): where claims
        are held for long enough, size buys no throughput and large contexts wait for all others.
        In a simulation of the ``thrash`` load with measured step times, five seeds, both give 120
        steps a minute and the same p99; the largest quarter of programs waits 1.1 times the
        smallest, in order of arrival 0.6 times.
        """
        assert program.waiting_since is not None
        return (program.priority, program.waiting_since)

    def _rank_acting(self, program: Program) -> None:
        """Its claim lapses when holding it has cost what it is expected to be worth.

        Holding c tokens for t seconds takes the share c/C of the engine's memory for t; computing
        them again takes the whole engine for the time of their prefill, as measured.
        """
        tokens = max(program.context_tokens, 1)
        prefill = self.prefill.seconds(0, tokens)
        if prefill is None or self._capacity_tokens == inf:
            hold = _HOLD_PRIOR_SECONDS
        else:
            # With too few tool times to go by, hold for as long as computing again would cost: at
            # most twice the cost of knowing them (ski rental).
            hold = prefill * self._capacity_tokens / tokens
            if self.table.tool_times.samples >= _FEWEST_TOOL_TIMES:
                hold = self.table.tool_times.hold_seconds(
                    hold, program.tool, program.tool_times, self.table.returning(program)
                )
        self.acting.put(program, (-program.priority, program.idle_since + hold))

    # -- the steps ---------------------------------------------------------------------

    def _shed(self, blocks: float) -> list[Action]:
        """Claims outgrew memory: pause by S_pause = 1/c + [acting], the highest first.

        (ThunderAgent, section "Policy".) A running turn keeps its blocks: its program leaves
        when the turn ends, and the last one stays.
        """
        actions: list[Action] = []
        for program in sorted(self.acting, key=lambda p: p.context_tokens):
            if blocks <= 0:
                return actions
            blocks -= program.claim
            actions.append(self._pause(program, "memory is short"))
        reasoning = [p for p in self.table.active if p.phase is Phase.REASONING]
        for program in sorted(reasoning, key=lambda p: p.context_tokens)[:-1]:
            if blocks <= self.table.yielding:
                break
            self.table.set_yields(program, True)
        return actions

    def _restore(self, now: float, memory: Memory) -> list[Action]:
        """Restore waiting programs while their claims fit, those that are due first."""
        actions: list[Action] = []
        room = self._room(memory, self.config.low_watermark)
        slots = memory.free_slots
        free = memory.free_blocks
        busy = memory.busy
        restored: Program | None = None
        for program, due in self._candidates(now):
            assert program.waiting_since is not None
            if slots <= 0 and not due:
                break  # a due turn waits in the engine's queue, where nobody passes it
            if program.yields and program.requests_running and not due:
                continue  # its other turns end first
            borrowed = memory.borrowed_blocks(program)
            if restored is not None and restored.group == program.group is not None:
                # The prompt that both share is about to be in memory.
                borrowed = max(borrowed, memory.common_blocks(program, restored))
            program.borrowed_blocks = borrowed
            need = self._claim(program) - program.claim
            prompt = self.blocks_of(program.prompt_tokens) - borrowed
            # Requests without a program cannot be asked to yield. A due turn that they keep
            # out waits in the engine's own queue, where nobody passes it any more.
            queueable = memory.unlabelled_blocks if due else 0
            if busy and prompt > free + queueable:
                # Running turns reference the blocks: only their ends help.
                self._ask_to_yield(max(need - room, prompt - free - queueable), program, due)
                break
            reason = "its claim fits"
            if need > room:
                rescue = not busy and now >= self._rescue_at(program)
                chosen = self._victims(need - room, program, inf if due or rescue else now)
                freed = sum(victim.claim for victim in chosen)
                if need > room + freed + queueable and not rescue:
                    self._ask_to_yield(need - room - freed, program, due)
                    self._set_deadline(program, now, busy)
                    break
                for victim in chosen:
                    actions.append(self._pause(victim, f"makes room for {program.program_id!r}"))
                room += freed
                reason = "due" if due else "nothing to run" if rescue else "a claim lapsed"
            self.activate(program, now)
            program.restores += 1
            program.goes_first = due
            actions.append(Action(ActionKind.RESTORE, program, reason))
            self._learn_restore(now)
            self._idle_since = None
            room -= need
            free -= prompt
            slots -= len(program.held)
            busy = True
            restored = program
        return actions

    def _rescue_at(self, program: Program) -> float:
        """When ``program`` may displace acting programs because nothing runs.

        Both the turn and the engine wait for ``idle_grace``: any of the programs that act may come
        back, and what is displaced is computed again. While clients are new it is not known whether
        they come back at all: then it is enough that the turn has waited.
        """
        assert program.waiting_since is not None
        first = next(iter(self.acting), None)
        since = min(program.waiting_since, program.idle_since)  # it may be ranked as one to come
        if first is not None and first.turns_run > 1:
            since = max(since, inf if self._idle_since is None else self._idle_since)
        return since + self.config.idle_grace

    def _candidates(self, now: float) -> Iterator[tuple[Program, bool]]:
        """Waiting programs and whether they are due, in the order of their restore.

        Due ones by the time since when, the others by rank. The programs of one RL prompt group
        share their prompt: once one is restored the others follow.
        """
        seen: set[Program] = set()
        for first in chain(self._due.until(now), self._order):
            for program in (first, *self.table.waiting_groups.get(first.group or "", ())):
                if program not in seen:
                    seen.add(program)
                    yield program, self._due.rank_of(program) <= now

    def _victims(self, blocks: float, waiting: Program, lapsed_by: float) -> list[Program]:
        """Acting programs with ``blocks`` claimed blocks, fewer if there are no more.

        Those whose claims lapse until ``lapsed_by``, the first to lapse first; of a lower
        priority than ``waiting`` all.
        """
        chosen: list[Program] = []
        for (rank, lapses_at), program in self.acting.items():
            if blocks <= 0:
                break
            if lapses_at <= lapsed_by or -rank > waiting.priority:
                blocks -= program.claim
                chosen.append(program)
            elif not self.table.priorities_differ:
                break
        return chosen

    def _ask_to_yield(self, blocks: float, waiting: Program, due: bool) -> None:
        """Programs shall pause when their turns end, the longest served first: for a due turn
        any, else those of a lower priority."""
        if not due and not self.table.priorities_differ:
            return
        for program in self.table.active:
            if blocks <= self.table.yielding:
                return
            runs = program.phase is Phase.REASONING and program is not waiting
            if runs and (due or program.priority > waiting.priority):
                self.table.set_yields(program, True)

    def _pause(self, program: Program, reason: str) -> Action:
        self.acting.discard(program)
        self.table.pause(program)
        self._set_need(program)
        return Action(ActionKind.PAUSE, program, reason)

    def _learn_restore(self, now: float) -> None:
        if self._last_restore is not None:
            self._restore_gap.add(now - self._last_restore)
        self._last_restore = now

    def _set_deadline(self, first: Program, now: float, busy: bool) -> None:
        """When does the case of ``first``, who waits, change although nothing happens?"""
        assert first.waiting_since is not None
        ahead = [self._due.rank_of(first), self._due.next_rank(now, inf)]
        if not busy:
            ahead.append(self._rescue_at(first))
        lowest, _ = self.acting.first_rank((0, 0.0))
        ahead.append(self.acting.next_rank((lowest, now), (0, inf))[1])
        self.deadline = min([self.deadline, *(at for at in ahead if at > now)])
