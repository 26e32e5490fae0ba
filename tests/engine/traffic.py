"""Random traffic for the real scheduler, as a hypothesis state machine.

Clients, the clock, the operator and the steps of the engine take turns in any order; after each
rule all books are recounted and the worker has checked every KV slot that it read. At the end
everything runs out: nothing hangs, nothing is left, and every client got the text of the model.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from vllm.lora.request import LoRARequest
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import Request

from tests.engine.harness import BLOCK, text
from tests.engine.worker import WorkedEngine, answer

PROGRAMS = ("a", "b", "c", "d", "e")
#: Simulated seconds of a step while traffic runs out.
STEP_SECONDS = 0.05
#: An engine that has turns and runs none for longer than this holds them back for nothing.
IDLE_SECONDS = 1.0


@dataclass(frozen=True)
class Variant:
    """One engine: its memory, its model and its settings."""

    blocks: int = 40
    groups: Callable[[], list[Any]] | None = None
    drafts: int = 0
    #: LoRA adapters that one step may use; 0: none.
    adapters: int = 0
    defer_frees: bool = False
    outstanding: int = 2
    engine: dict[str, Any] = field(default_factory=dict)


@dataclass
class Sent:
    """A request, whose it is, and what its client must get."""

    request: Request
    program: str | None
    expected: list[int]
    aborted: bool = False


@dataclass
class Fan:
    program: str
    turn_id: str


class Traffic(RuleBasedStateMachine):
    """Drives one engine of ``variant``; ``model`` is the folder of its configuration."""

    def __init__(self, model: Path, variant: Variant):
        super().__init__()
        self.variant = variant
        self.engine = WorkedEngine(
            model,
            blocks=variant.blocks,
            groups=None if variant.groups is None else variant.groups(),
            drafts=variant.drafts,
            adapters=variant.adapters,
            **variant.engine,
        )
        self.scheduler = self.engine.scheduler
        self.scheduler.defer_block_free = variant.defer_frees
        self.live: list[Sent] = []
        self.done: list[Sent] = []
        self.contexts: dict[str, list[int]] = {}
        self.fans: list[Fan] = []
        #: Programs that go when their turns in flight end.
        self.ending: set[str] = set()
        self.fresh = 0
        self.settled: dict[str, Request] = {}

    # -- clients -----------------------------------------------------------------------

    @rule(
        name=st.sampled_from(PROGRAMS),
        history=st.sampled_from(["kept", "kept", "kept", "no output", "edited", "first line"]),
        growth=st.integers(1, 90),
        max_tokens=st.integers(1, 20),
        options=st.fixed_dictionaries(
            {},
            optional={
                "final": st.just(True),
                "one_off": st.just(True),
                "priority": st.integers(-1, 1),
                "group": st.sampled_from(["g", "h"]),
                "parent_id": st.sampled_from(PROGRAMS),
                "tool": st.sampled_from(["make", "grep"]),
                "retention_seconds": st.sampled_from([0.2, 5.0]),
                "deadline_seconds": st.sampled_from([1e-323, 0.5, 10.0]),
            },
        ),
        lora=st.integers(0, 2),
    )
    def turn(self, name, history, growth, max_tokens, options, lora):
        prompt = self._next_prompt(name, history, growth)
        self._send(prompt, name, max_tokens, lora, **options)

    @rule(
        names=st.sets(st.sampled_from(PROGRAMS), min_size=2),
        growth=st.integers(1, 60),
        max_tokens=st.integers(20, 60),
    )
    def crowd(self, names, growth, max_tokens):
        """Long answers of several programs at once: decoding outgrows memory."""
        for name in sorted(names):
            self._send(self._next_prompt(name, "kept", growth), name, max_tokens, 0)

    @rule(
        name=st.sampled_from(PROGRAMS),
        copies=st.integers(1, 4),
        growth=st.integers(1, 60),
        max_tokens=st.integers(1, 12),
        final=st.booleans(),
    )
    def fan(self, name, copies, growth, max_tokens, final):
        """n > 1: several requests of one turn, whose end the front end tells."""
        prompt = self._next_prompt(name, "kept", growth)
        self.fresh += 1
        fan = Fan(name, f"fan{self.fresh}")
        self.fans.append(fan)
        for _ in range(copies):
            self._send(prompt, name, max_tokens, 0, turn_id=fan.turn_id, fans_out=True, final=final)

    @precondition(lambda self: self.fans)
    @rule(data=st.data())
    def fan_is_over(self, data):
        fan = data.draw(st.sampled_from(self.fans))
        self.fans.remove(fan)
        self.scheduler.programs("turn_end", fan.program, fan.turn_id)
        self._check_endings()

    @rule(
        name=st.sampled_from((None, *PROGRAMS)),
        shared=st.floats(0.0, 1.0),
        growth=st.integers(1, 60),
        max_tokens=st.integers(1, 15),
        lora=st.integers(0, 2),
    )
    def unlabelled(self, name, shared, growth, max_tokens, lora):
        """A request without an id, which may share a prefix with a program."""
        context = self.contexts.get(name, text(0, 3 * BLOCK))
        prompt = context[: round(shared * len(context))] + self._new_text(growth)
        self._send(prompt, None, max_tokens, lora)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data):
        sent = data.draw(st.sampled_from(self.live))
        sent.aborted = True
        self.engine.abort(sent.request)
        self._collect()

    @rule(name=st.sampled_from(PROGRAMS))
    def release(self, name):
        answer = self.scheduler.programs("release", name)
        if answer["pending"]:
            self.ending.add(name)
        assert answer["pending"] == (self.scheduler.programs("get", name) is not None)

    @rule(name=st.sampled_from(PROGRAMS), tool=st.sampled_from(["make", "grep"]))
    def tool_begins(self, name, tool):
        self.scheduler.programs("tool", name, tool)

    # -- the engine --------------------------------------------------------------------

    @precondition(lambda self: len(self.engine.outstanding) < self.variant.outstanding)
    @rule()
    def schedule(self):
        self.engine.schedule()

    @precondition(lambda self: self.engine.outstanding)
    @rule()
    def update(self):
        self.engine.update()
        self._collect()

    @rule(steps=st.integers(1, 12), seconds=st.sampled_from([0.0, 0.01, 0.1]))
    def run_on(self, steps, seconds):
        for _ in range(steps):
            self._step()
            self.engine.now += seconds

    @rule(seconds=st.sampled_from([0.001, 0.1, 0.4, 2.0, 30.0]))
    def time_passes(self, seconds):
        self.engine.now += seconds

    @rule()
    def the_core_asks_how_long_it_may_sleep(self):
        assert 0.0 <= self.scheduler.held_wait() <= IDLE_SECONDS
        timeout = self.scheduler.idle_timeout()
        assert timeout is None or timeout > 0

    # -- the operator ------------------------------------------------------------------

    @rule(running=st.booleans())
    def reset_prefix_cache(self, running):
        if self.variant.defer_frees and self.engine.outstanding:
            running = False  # blocks that wait for a step are in use: vLLM raises
        self.engine.reset_prefix_cache(running=running)

    @rule(state=st.sampled_from([*PauseState, PauseState.UNPAUSED]))
    def pause(self, state):
        self.scheduler.set_pause_state(state)

    @rule(name=st.sampled_from(PROGRAMS))
    def look(self, name):
        """Status is asked for at any time, and its numbers fit together."""
        programs = {p["program_id"]: p for p in self.scheduler.status.list()}
        one = self.scheduler.status.get(name)
        assert one == programs.get(name)
        summary = self.scheduler.status.summary()
        gone = ("programs_released", "programs_expired", "programs_evicted")
        assert summary["programs"] == len(programs)
        assert len(programs) == summary["programs_created"] - sum(summary[name] for name in gone)
        assert summary["free_blocks"] == self.engine.free_blocks
        assert summary["held_turns"] == sum(p["held_turns"] for p in programs.values())
        for program in programs.values():
            held = program["unique_blocks"] + program["shared_blocks"]
            assert 0 <= program["resident_blocks"] <= held
            assert (program["wait"] is not None) == bool(program["held_turns"])
        self.scheduler.status.metrics()

    # -- what always holds -------------------------------------------------------------

    @invariant()
    def the_books_agree(self):
        self.engine.check()

    @invariant()
    def nothing_is_pinned(self):
        """Every block that no request uses, and no step in flight will write, is free."""
        used = set()
        for manager in self.scheduler.kv_cache_manager.coordinator.single_type_managers:
            for blocks in manager.req_to_blocks.values():
                used.update(b.block_id for b in blocks if not b.is_null)
        for _, blocks in self.scheduler.deferred_frees:
            used.update(b.block_id for b in blocks if not b.is_null)
        assert self.engine.free_blocks == self.variant.blocks - len(used)

    def teardown(self):
        self.scheduler.set_pause_state(PauseState.UNPAUSED)
        self._run_out()
        self._settle()
        self._check_what_programs_hold()
        for sent in self.done:
            got = list(sent.request.output_token_ids)
            assert got == sent.expected[: len(got)], sent
            assert sent.aborted or got == sent.expected
            assert self.engine.received.get(sent.request.request_id, []) == got
        for fan in self.fans:
            self.scheduler.programs("turn_end", fan.program, fan.turn_id)
        for program in self.scheduler.status.list():
            self.scheduler.programs("release", program["program_id"])
            self.engine.check()
        summary = self.scheduler.status.summary()
        assert (summary["programs"], summary["unique_blocks"], summary["shared_blocks"]) == (
            0,
            0,
            0,
        )
        assert self.engine.free_blocks == self.variant.blocks
        free = self.engine.pool.free_block_queue.get_all_free_blocks()
        assert len({block.block_id for block in free}) == self.variant.blocks
        self.engine.check()

    # -- inside ------------------------------------------------------------------------

    def _new_text(self, length: int) -> list[int]:
        self.fresh += 1
        return text(self.fresh, length)

    def _next_prompt(self, name: str, history: str, growth: int) -> list[int]:
        context = self.contexts.get(name)
        if context is None:
            context = text(0, 3 * BLOCK) + self._new_text(20)  # a common system prompt
        elif history == "no output":
            context = context[: -max(1, len(context) // 10)]
        elif history == "edited":
            middle = len(context) // 2
            context = context[:middle] + self._new_text(5) + context[middle + 9 :]
        elif history == "first line":
            context = self._new_text(8) + context[8:]
        return context + self._new_text(growth)

    def _longest_prompt(self, max_tokens: int) -> int:
        """An engine refuses what can never fit."""
        longest = 0
        while self.scheduler.blocks_of(longest + BLOCK) + 4 <= self.variant.blocks:
            longest += BLOCK
        return longest - max_tokens - 2 * self.variant.drafts

    def _send(self, prompt, name, max_tokens, lora, **turn):
        if len(prompt) > self._longest_prompt(max_tokens):  # the client begins anew
            prompt = text(0, 3 * BLOCK) + self._new_text(30)
        request: dict[str, Any] = {}
        if lora and self.variant.adapters:
            request["lora_request"] = LoRARequest(f"adapter{lora}", lora, "nowhere")
        if self.variant.engine.get("scheduling") == "priority":
            request["priority"] = turn.get("priority", 0)
        made = self.engine.send(prompt, name, max_tokens=max_tokens, request=request, **turn)
        self.live.append(Sent(made, name, answer(prompt, max_tokens)))
        if turn.get("final"):
            self.ending.add(name)

    def _step(self) -> int:
        """One step as the core does it; the tokens that were scheduled."""
        if len(self.engine.outstanding) == self.variant.outstanding:
            self.engine.update()
        scheduled = self.engine.schedule().total_num_scheduled_tokens
        if self.variant.outstanding == 1 or not scheduled:
            while self.engine.outstanding:
                self.engine.update()
        self._collect()
        return scheduled

    def _collect(self) -> None:
        for sent in [s for s in self.live if s.request.is_finished()]:
            self.live.remove(sent)
            self.done.append(sent)
            if sent.program is not None and not sent.request.program.one_off:
                self.contexts[sent.program] = list(sent.request.all_token_ids)
        self._check_endings()

    def _check_endings(self) -> None:
        in_flight = {owner.program for owner in (*self.live, *self.fans)}
        for name in self.ending - in_flight:
            self.ending.discard(name)
            assert self.scheduler.programs("get", name) is None

    def _run_out(self) -> None:
        idle = 0.0
        for _ in range(4000):
            if not self.live and not self.engine.outstanding:
                return
            if self._step():
                idle = 0.0
            else:
                idle += STEP_SECONDS
                assert idle <= IDLE_SECONDS, (
                    f"held on an idle engine: {self.scheduler.status.list()}"
                )
            self.engine.now += STEP_SECONDS
            self.engine.check()
            self.nothing_is_pinned()
        raise AssertionError(f"not finished: {self.live}, {self.scheduler.status.list()}")

    def _settle(self) -> None:
        """Two more turns of every program, one after another: all that it holds is known then.

        Two, because one that continues nothing may be a side call, which leaves no trace.
        """
        for program in self.scheduler.status.list():
            name = program["program_id"]
            for fan in [fan for fan in self.fans if fan.program == name]:
                self.fans.remove(fan)
                self.scheduler.programs("turn_end", name, fan.turn_id)
            self._check_endings()
            for _ in range(2):
                prompt = self._next_prompt(name, "kept", 0)[: self._longest_prompt(3) - 9]
                self._send(prompt + self._new_text(9), name, 3, 1)
                self.settled[name] = self.live[-1].request
                self._run_out()

    def _check_what_programs_hold(self) -> None:
        """Against the hashes of the contexts, looked up in the pool."""
        cached = self.engine.pool.cached_block_hash_to_block
        groups = range(len(self.scheduler.kv_cache_config.kv_cache_groups))
        full = len(groups) == 1 and self.scheduler.kv_cache_manager.enable_caching
        programs = self.scheduler.status.list()
        contexts = {}
        for name, request in self.settled.items():
            contexts[name] = {
                make_block_hash_with_group_id(block_hash, group)
                for block_hash in request.block_hashes[: (request.num_tokens - 1) // BLOCK]
                for group in groups
            }
        holders = Counter(key for p in programs for key in contexts[p["program_id"]])
        for program in programs:
            keys = contexts[program["program_id"]]
            unique = sum(holders[key] == 1 for key in keys)
            counted = (
                unique,
                len(keys) - unique,
                sum(cached.get_one_block(k) is not None for k in keys),
            )
            told = tuple(program[f"{kind}_blocks"] for kind in ("unique", "shared", "resident"))
            if full:
                assert told == counted, (program, counted)
            else:  # the windows of a program are a part of its context's blocks
                assert sum(told[:2]) <= len(keys)
                assert told[2] <= counted[2]
