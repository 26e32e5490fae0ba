"""Replays a workload in a closed loop against any OpenAI-compatible server.

Every program is a task of its own: it sends its context, reads the streamed answer, lets its
tool's time pass, appends the answer's actual text and the next observation, and calls again, so
that contexts grow as a real agent's do. All programs are offered at once. A call that fails is
recorded and ends its program: nothing is tried again, and every call has a time-out.

See :class:`vllm_thunder.replay.records.StepRecord` for what exactly a step's latency is.
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import asdict

from vllm_thunder.replay.client import CallFailed, ChatClient, ClientOptions, Conversations
from vllm_thunder.replay.records import ProgramRecord, Replay, StepRecord
from vllm_thunder.replay.words import write_words
from vllm_thunder.replay.workload import ProgramShape, Workload

__all__ = ["replay"]

#: Counters of ``GET /programs/summary``.
_DECISIONS = ("turns", "pauses", "restores", "free_restores", "programs_created")

_STOPPED = "the run was stopped before the program ended"

OnStep = Callable[[StepRecord], None]
Connect = Callable[[ClientOptions], AbstractAsyncContextManager[Conversations]]


async def replay(
    workload: Workload,
    options: ClientOptions,
    *,
    kind: str = "server",
    on_step: OnStep | None = None,
    connect: Connect = ChatClient,
) -> Replay:
    """Run the whole workload once; ``on_step`` is called as each model call ends. ``connect`` gives
    the client that carries the calls.

    Failures of calls are in the result. Raises CallFailed only when the server does not
    answer before the run.
    """
    async with connect(options) as client:
        before = await client.counters()
        summary_before = await client.summary() or {}
        run = _Run(workload, client, on_step)
        await run.finish()
        try:
            after = await client.counters()
        except CallFailed:  # the server is gone; what was measured until then still counts
            after = {}
        summary = await client.summary()
    run.steps.sort(key=lambda step: step.started_at)
    first = min((step.started_at for step in run.steps), default=0.0)
    last = max((step.started_at + step.latency_seconds for step in run.steps), default=0.0)
    about = {
        "workload": {
            "name": workload.name,
            "seed": workload.seed,
            "programs": len(workload.programs),
            "steps": workload.steps,
            "blocks": workload.blocks,
            "block_size": workload.block_size,
            "longest_context": workload.longest_context,
            "pressure": round(workload.pressure, 3),
        },
        "client": {**asdict(options), "model": client.model, "api_key": None},
    }
    return Replay(
        kind=kind,
        seconds=last - first,
        programs=run.programs,
        steps=run.steps,
        engine={name: value - before.get(name, 0.0) for name, value in after.items()},
        decisions={
            name: summary[name] - summary_before.get(name, 0)
            for name in _DECISIONS
            if summary is not None and name in summary
        },
        summary=summary,
        about=about,
    )


class _Run:
    def __init__(self, workload: Workload, client: Conversations, on_step: OnStep | None):
        self.programs: list[ProgramRecord] = []
        self.steps: list[StepRecord] = []
        self._workload = workload
        self._client = client
        self._on_step = on_step
        limit = client.options.max_concurrent_programs or len(workload.programs)
        self._slots = asyncio.Semaphore(limit)
        self._start = 0.0

    async def finish(self) -> None:
        shapes = self._workload.programs
        options = self._client.options
        rng = random.Random(f"{self._workload.seed}/unlabelled")
        unlabelled = rng.sample(range(len(shapes)), round(len(shapes) * options.unlabelled_share))
        self.programs = [
            ProgramRecord(
                program_id=shape.program_id,
                labelled=options.program_id_field is not None and index not in unlabelled,
                planned_steps=len(shape.steps),
            )
            for index, shape in enumerate(shapes)
        ]
        self._start = time.perf_counter()
        tasks = [
            asyncio.create_task(self._program(shape, program))
            for shape, program in zip(shapes, self.programs, strict=True)
        ]
        limits = [s for s in (options.run_timeout, options.window_seconds) if s is not None]
        limit = min(limits, default=None)
        try:
            await asyncio.wait(tasks, timeout=limit)
        finally:
            for task in tasks:
                task.cancel()
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
            if limit is not None and limit == options.window_seconds:
                for program in self.programs:
                    if program.error == _STOPPED:
                        program.error = None
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome

    async def _program(self, shape: ProgramShape, program: ProgramRecord) -> None:
        # If the task ends in any way but the last one below, this is why.
        program.error = _STOPPED
        async with self._slots, self._released_after(program):
            queue_seconds = self._now()
            try:
                await self._converse(shape, program, queue_seconds)
            except CallFailed as failure:
                program.error = str(failure)
            else:
                program.error = None

    async def _converse(
        self, shape: ProgramShape, program: ProgramRecord, queue_seconds: float
    ) -> None:
        messages: list[dict[str, str]] = []
        for number, step in enumerate(shape.steps):
            messages += self._new_messages(shape, number)
            last = number == len(shape.steps) - 1
            record = StepRecord(
                program_id=program.program_id,
                step=number,
                labelled=program.labelled,
                started_at=self._now(),
                queue_seconds=queue_seconds if number == 0 else 0.0,
                tool_seconds=0.0 if last else step.tool_seconds,
            )
            try:
                text = await self._client.step(record, messages, step.output_tokens, final=last)
            finally:
                program.ended_at = self._now()
                self.steps.append(record)
                if self._on_step is not None:
                    self._on_step(record)
            program.finished_steps += 1
            messages.append({"role": "assistant", "content": text})
            await asyncio.sleep(record.tool_seconds)

    def _new_messages(self, shape: ProgramShape, number: int) -> list[dict[str, str]]:
        """What the agent appends before a step. The text depends on the workload's seed, the
        program and the step alone; the system prompt on the program's source alone."""
        seed = self._workload.seed
        words = max(1, self._words(shape.steps[number].new_input_tokens))
        own = f"{seed}/{shape.program_id}/{number}"
        if number > 0:
            return [{"role": "user", "content": write_words(words, own)}]
        shared = min(self._words(shape.shared_prefix_tokens), words - 1)
        prompt = {"role": "user", "content": write_words(words - shared, own)}
        if shared < 1:
            return [prompt]
        common = write_words(shared, f"{seed}/{shape.source}")
        return [{"role": "system", "content": common}, prompt]

    def _words(self, tokens: int) -> int:
        return round(tokens * self._client.options.words_per_token)

    @asynccontextmanager
    async def _released_after(self, program: ProgramRecord) -> AsyncIterator[None]:
        try:
            yield
        finally:
            if program.labelled and self._client.options.release_path is not None:
                program.release_error = await self._client.release(program.program_id)

    def _now(self) -> float:
        return time.perf_counter() - self._start
