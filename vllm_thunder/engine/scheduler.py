"""vLLM's asynchronous scheduler, with programs.

It composes a table (who runs, who waits), a ledger in the block pool (who holds what) and a policy
(who may have memory); everything else is vLLM's, reached through ``super()``. Turns that have to
wait are in a queue of our own: vLLM's queues hold only what may run now.
"""

import time
from collections.abc import Container
from dataclasses import replace
from math import inf
from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from vllm_thunder.engine.block_pool import ProgramBlockPool, program_kv_cache
from vllm_thunder.engine.feed import ProgramFeed
from vllm_thunder.engine.held import HeldTurns
from vllm_thunder.engine.kv_groups import group_sizes
from vllm_thunder.engine.operations import ProgramOperations
from vllm_thunder.engine.preemption import cheapest_to_compute_again
from vllm_thunder.engine.prompts import HeldPrompts
from vllm_thunder.engine.status import EngineStatus
from vllm_thunder.engine.step_times import StepTimes
from vllm_thunder.engine.unlabelled import UnlabelledBlocks
from vllm_thunder.program.config import CONFIG_KEY, ThunderConfig
from vllm_thunder.program.cost import ContextBlocks
from vllm_thunder.program.decisions import Action, ActionKind, Memory
from vllm_thunder.program.errors import IntegrityError
from vllm_thunder.program.policy import make_policy
from vllm_thunder.program.program import Program, Status
from vllm_thunder.program.table import ProgramTable
from vllm_thunder.program.turn import Turn

__all__ = ["ProgramScheduler"]

logger = init_logger(f"vllm.{__name__}")  # below vLLM's: its level and handlers

#: A held turn whose grammar is still compiling is looked at this often (seconds), so that a
#: compilation error reaches the client although the turn waits.
GRAMMAR_POLL_SECONDS = 0.05
#: Nothing sleeps longer than this (seconds) while turns are held.
LONGEST_NAP_SECONDS = 1.0
#: An idle engine with programs wakes at least this often (seconds).
LONGEST_SLEEP_SECONDS = 60.0


class ProgramScheduler(AsyncScheduler):
    """In place of vLLM's scheduler; ``vllm_thunder serve`` and ``vllm_thunder.LLM`` set it up."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with program_kv_cache():
            super().__init__(*args, **kwargs)
        settings = self.vllm_config.additional_config
        config = ThunderConfig.from_dict(dict(settings.get(CONFIG_KEY, {})))
        self.clock = time.monotonic
        self.table = ProgramTable(config)
        pool = self.kv_cache_manager.block_pool
        if not isinstance(pool, ProgramBlockPool):
            raise IntegrityError(f"a program pool was expected, vLLM built {type(pool).__name__}")
        self.pool = pool
        self.pool.free_block_queue.half_life = config.acting_half_life
        groups = group_sizes(self.kv_cache_config)
        self.blocks_of = ContextBlocks(groups)
        if config.policy != "fcfs" and not self.kv_cache_manager.enable_caching:
            # Some models turn prefix caching off by themselves: nothing outlives a turn then.
            logger.warning("Prefix caching is off for this model: programs are scheduled as fcfs.")
            config = replace(config, policy="fcfs")
        # Not "policy": that is vLLM's own, fcfs or priority.
        self.program_policy = make_policy(config, self.table, self.blocks_of)
        self.status = EngineStatus(
            self.table, self.pool, self.program_policy, clock=self._now, memory=self.memory
        )
        self.feed = ProgramFeed(
            self.table,
            self.pool.ledger,
            self.program_policy,
            memory=self.memory,
            held=lambda: len(self._held),
            groups=groups,
        )
        self._operations = ProgramOperations(
            self.table,
            self.program_policy,
            self.status,
            self.feed,
            clock=self._now,
            decide=self._decide,
            release=self._release,
            acts=self._program_acts,
            check_integrity=self.check_integrity,
        )
        self._held = HeldTurns()
        self._unlabelled = UnlabelledBlocks(self.kv_cache_manager.coordinator.single_type_managers)
        self._changed = False
        self._prompts = HeldPrompts(self._held, self.pool, self.block_size)
        self._step_times = StepTimes(self.program_policy.prefill, 1 + self.num_spec_tokens)

    def _now(self) -> float:
        return self.clock()

    # -- turns arrive and end ----------------------------------------------------------

    def _enqueue_waiting_request(self, request: Request) -> None:
        request_id = request.request_id
        if request.program is None:
            self._unlabelled.add(request_id)
            self.table.changes.touched()
        elif request_id not in self.pool.program_of:  # else the next chunk of a streaming session
            self._turn_arrived(request)
            return
        super()._enqueue_waiting_request(request)

    def _turn_arrived(self, request: Request) -> None:
        now = self.clock()
        turn = request.program
        assert turn is not None
        if turn.program_id not in self.table and len(self.table) >= self.table.config.max_programs:
            self._release_idle_longest()
        program = self.table.turn_arrived(turn, request.num_tokens, now)
        self.pool.program_of[request.request_id] = program
        sibling = program.turns[turn.turn_id] > 1 and turn.turn_id not in program.unserved
        if self.program_policy.admit(program, now):
            self._admit(request, program)
        elif sibling and program.status is Status.ACTIVE and not program.held:
            self._admit(request, program)  # a turn that fans out runs as one
        elif self._holdable(request):
            self._hold(request, program, now - turn.waited_seconds)
        else:
            self._activate(program, now)
            self._admit(request, program)

    def _holdable(self, request: Request) -> bool:
        """Transferred KV must be taken when it comes, and a streaming session keeps its slot and
        its blocks while it waits for input."""
        transfers = self.connector is not None and request.kv_transfer_params is not None
        return not transfers and not request.resumable

    def _hold(self, request: Request, program: Program, since: float) -> None:
        """The request waits for its program's restore, as one that waits since ``since``."""
        self._held.hold(request)
        self.table.request_held(program, request.request_id, since)
        self.program_policy.waits(program, since)
        self._changed = True

    def _admit(self, request: Request, program: Program) -> None:
        """Hand a turn that is not held to vLLM's queue."""
        self.table.request_runs(program, request.program.turn_id)
        if program.requests_running == 1:
            self.pool.ledger.begin_turn(program)
            program.interrupted = False
        super()._enqueue_waiting_request(request)

    def _unhold(self, program: Program, request_id: str, now: float) -> Request:
        assert program.waiting_since is not None
        self.status.waited(max(now - program.waiting_since, 0.0))
        self.table.request_unheld(program, request_id, now)
        if not program.held:
            self.program_policy.waits_no_more(program)
        return self._held.take(request_id)

    def _free_request(
        self, request: Request, delay_free_blocks: bool = False
    ) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        result = super()._free_request(request, delay_free_blocks)
        if request.request_id in self._unlabelled:
            self._unlabelled.remove(request.request_id)
            self.table.changes.touched()
            self._changed |= bool(self._held)
        program = self.pool.program_of.pop(request.request_id, None)
        if program is not None:
            self._request_ended(request, program)
        return result

    def _request_ended(self, request: Request, program: Program) -> None:
        now = self.clock()
        turn = request.program
        assert turn is not None
        self._changed = True
        if request.request_id in self._held:
            self._unhold(program, request.request_id, now)
        else:
            self._ran(request, program, turn)
        if self.table.request_ended(program, turn.turn_id, now):
            self._program_acts(program, now)
        elif program.held and not program.requests_running:
            for action in self.program_policy.drained(program):
                self._carry_out(action, now)

    def _ran(self, request: Request, program: Program, turn: Turn) -> None:
        """A request that was not held ended: what does it say about its program's context?"""
        pooled = request.pooling_params is not None
        completed = bool(request.num_output_tokens) or (
            pooled and request.status is RequestStatus.FINISHED_STOPPED
        )
        program.interrupted |= not completed
        if completed and not turn.one_off:
            program.ended_context = (request.num_tokens, request.num_output_tokens)
        if program.requests_running > 1:  # this one still counts
            return
        end = self.pool.ledger.end_turn(program, not program.interrupted)
        self.pool.relocate(end.superseded)
        self.status.hit_rate_collapses += end.replaced
        if program.ended_context is not None and not end.side_call:
            self.table.learn_context(program, *program.ended_context)
        program.ended_context = None

    def _program_acts(self, program: Program, now: float) -> None:
        """Its last turn ended."""
        self._changed = True
        if program.release_when_turn_ends:
            self.table.released += 1
            self._release(program)
            return
        for action in self.program_policy.acts(program, now):
            self._carry_out(action, now)

    # -- decisions ---------------------------------------------------------------------

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        now = self.clock()
        self.pool.free_block_queue.now = now
        if self._held.grammars:
            self._surface_grammar_errors(now)
        if self._changed or now >= self.program_policy.deadline:
            self._reconcile(now)
        output = super().schedule(throttle_prefills)
        if self.waiting and self._unlabelled and self.program_policy.holds:
            self._hold_again_what_blocks(now)
        if output.total_num_scheduled_tokens:
            self._step_times.scheduled(output, self.requests, now)
            self._learn_hits(output)
        if self.feed.watchers:
            self.feed.answer(now)
        return output

    def _learn_hits(self, output: SchedulerOutput) -> None:
        for started in output.scheduled_new_reqs:
            request = self.requests[started.req_id]
            program = self.pool.owner_of(request)
            if program is None:
                self.table.changes.touched()  # what it uses is known only now
            else:
                cached = started.num_computed_tokens
                self.table.learn_hits(program, cached, request.num_prompt_tokens)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        now = self.clock()
        self.pool.free_block_queue.now = now
        if scheduler_output.total_num_scheduled_tokens:
            self._step_times.output_arrived(now)
        return super().update_from_output(scheduler_output, model_runner_output)

    def _decide(self, now: float) -> None:
        if self._changed or now >= self.program_policy.deadline:
            self._reconcile(now)

    def _reconcile(self, now: float) -> None:
        self._changed = False
        for program in self.pool.free_block_queue.take_emptied():
            for action in self.program_policy.lost_blocks(program):
                self._carry_out(action, now)
        memory = self.memory()
        if self._pause_state is PauseState.UNPAUSED:
            actions = self.program_policy.reconcile(now, memory)
        else:
            actions = self.program_policy.expire(now)
        for action in actions:
            self._carry_out(action, now)

    def _carry_out(self, action: Action, now: float) -> None:
        program = action.program
        self.status.decided(action)
        if action.kind is ActionKind.RELEASE:
            self._release(program)
        elif action.kind is ActionKind.PAUSE:
            self.pool.free_block_queue.program_paused(program)
        else:
            self.pool.free_block_queue.program_restored(program)
            for request_id in list(program.held):
                self._admit(self._unhold(program, request_id, now), program)

    def memory(self) -> Memory:
        """What the policy may know of the engine now."""
        sessions = self.num_waiting_for_streaming_input  # silent, with a slot and their blocks
        queued = len(self.running) + len(self.waiting) + len(self.kv_holding_waiting) - sessions
        return Memory(
            capacity_blocks=self.pool.num_gpu_blocks - 1,
            unlabelled_blocks=self._unlabelled.blocks(self.clock()),
            shared_blocks=self.pool.ledger.shared_resident,
            free_blocks=self.pool.get_num_free_blocks(),
            free_slots=self.max_num_active_reqs - queued - sessions,
            busy=queued > 0,
            borrowed_blocks=self._prompts.borrowed_blocks,
            common_blocks=self._prompts.common_blocks,
        )

    def _hold_again_what_blocks(self, now: float) -> None:
        """A failed allocation ends vLLM's scan: a turn that does not fit must not stand before
        requests without a program."""
        while self.waiting and self.running:
            request = self.waiting.peek_request()
            program = self.pool.program_of.get(request.request_id)
            if program is None or request.status is not RequestStatus.WAITING:
                return
            if program.goes_first or not self._holdable(request):
                return
            # Others' blocks are there for the taking, and so are those of its own other turns.
            alone = program.requests_running == 1
            there = program.shared_resident_blocks if alone else program.resident_blocks
            needed = self.blocks_of(request.num_tokens) - there
            if needed <= self.pool.get_num_free_blocks():
                return
            self.waiting.pop_request()
            if program.requests_running == 1 and program.status is Status.ACTIVE:
                for action in self.program_policy.withdraw(program):
                    self._carry_out(action, now)
            arrived = now - request.program.waited_seconds
            self._hold(request, program, min(arrived, program.waited_since or arrived))

    def _choose_preemption_victim(self, request: Request, pinned: Container[str]) -> Request:
        """The turn that is cheapest to compute again, instead of vLLM's last one in the list."""
        if not self.program_policy.holds or len(self._unlabelled) == len(self.requests):
            return super()._choose_preemption_victim(request, pinned)
        candidates = (
            each
            for each in reversed(self.running)
            if each is request or each.request_id not in pinned
        )
        return cheapest_to_compute_again(candidates, self.pool.program_of, self.block_size)

    def _surface_grammar_errors(self, now: float) -> None:
        """Let held turns whose grammar does not compile fail now instead of when restored."""
        for request_id in self._held.broken():
            program = self.pool.program_of[request_id]
            self._admit(self._unhold(program, request_id, now), program)

    # -- programs are released ---------------------------------------------------------

    def _activate(self, program: Program, now: float) -> None:
        if program.status is not Status.ACTIVE:
            self.program_policy.activate(program, now)
            self.pool.free_block_queue.program_restored(program)

    def _release(self, program: Program) -> None:
        self.program_policy.forget(program)
        self.table.release(program)
        self.pool.relocate(self.pool.ledger.release(program))
        self._changed = True

    def _release_idle_longest(self) -> None:
        program = self.table.idle_longest()
        if program is not None:
            self.table.evicted += 1
            self._release(program)

    def programs(self, op: str, *args: str) -> Any:
        """What a utility call of this name asks for; see :class:`ProgramOperations`."""
        return self._operations.call(op, *args)

    def release_program(self, program_id: str) -> dict[str, Any]:
        """Release now, or when the turns in flight end; idempotent."""
        return self._operations.release(program_id)

    # -- what the engine core asks -----------------------------------------------------

    def get_num_unfinished_requests(self) -> int:
        # Held turns are work, except for a pause that waits for work to end: vLLM's own
        # queued requests do not count then either.
        held = len(self._held) if self._pause_state is PauseState.UNPAUSED else 0
        return super().get_num_unfinished_requests() + held

    def has_finished_requests(self) -> bool:
        if self.finished_req_ids or self.connector is None:
            return bool(self.finished_req_ids)
        # vLLM compares with its queues, in which held turns are not.
        return len(self.requests) - len(self._held) > sum(self.get_request_counts())

    def held_wait(self) -> float:
        """Seconds that the engine core may sleep because only held turns are left; 0: none."""
        if not self._held or self._changed or self._pause_state is not PauseState.UNPAUSED:
            return 0.0
        if self.running or self.waiting or self.finished_req_ids:
            return 0.0
        if len(self.kv_holding_waiting) > self.num_waiting_for_streaming_input:
            return 0.0
        wake_at = min(self.program_policy.deadline, self.feed.due_at())
        nap = min(wake_at - self.clock(), LONGEST_NAP_SECONDS)
        if self._held.grammars:
            nap = min(nap, GRAMMAR_POLL_SECONDS)
        return max(nap, 0.0)

    def idle_timeout(self) -> float | None:
        """Does what is due without a step; seconds until it is to be asked again, None: never."""
        now = self.clock()
        self._decide(now)
        self.feed.answer(now)
        wake_at = min(self.program_policy.deadline, self.feed.due_at())
        if wake_at == inf:
            return None
        # Retention is a client's number: a wait has to fit into what a lock can wait for.
        return min(max(wake_at - now, 0.001), LONGEST_SLEEP_SECONDS)

    def has_requests(self) -> bool:
        if super().has_requests():
            return True
        if self.feed.watchers:
            # A data-parallel rank without work of its own neither steps nor waits while others
            # work, and this is all that it asks.
            self.idle_timeout()
        return False

    def shutdown(self) -> None:
        super().shutdown()
        self.feed.close(self.clock())

    def set_pause_state(self, pause_state: PauseState) -> None:
        super().set_pause_state(pause_state)
        self._changed = True

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        self._changed = True
        return super().reset_prefix_cache(reset_running_requests, reset_connector)

    def make_stats(self, *args: Any, **kwargs: Any) -> SchedulerStats | None:
        stats = super().make_stats(*args, **kwargs)
        if stats is not None:
            stats.num_waiting_reqs += len(self._held)
        return stats

    def check_integrity(self) -> None:
        """The books of turns, programs and blocks agree; raises IntegrityError."""
        self.table.check_integrity()
        self.program_policy.check_integrity()
        self.pool.check_integrity()
        self.status.check_integrity(self._held)
