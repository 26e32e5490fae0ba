"""Patches 0002 and 0003: vLLM's real loop, with a scheduler and an executor of a few lines."""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import EngineCoreProc, EngineShutdownState
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT

#: Seconds: far below every wait that must not happen, far above what a busy machine needs.
SOON = 10.0
WAKEUP = (EngineCoreRequestType.WAKEUP, None)


class StockScheduler:
    """Unfinished work that no step advances, until it is aborted."""

    def __init__(self, requests: int = 1) -> None:
        self.requests = requests
        self.calls: list[tuple[Any, ...]] = []

    def has_requests(self) -> bool:
        return self.requests > 0

    def get_num_unfinished_requests(self) -> int:
        return self.requests

    def schedule(self, throttle_prefills: bool) -> SchedulerOutput:
        self.calls.append(("schedule",))
        return SchedulerOutput.make_empty()

    def get_grammar_bitmask(self, output: SchedulerOutput) -> None:
        return None

    def update_from_output(self, output: SchedulerOutput, result: Any) -> dict[int, Any]:
        self.calls.append(("update",))
        return {}

    def finish_requests(self, ids: Any, status: Any) -> list[Any]:
        self.calls.append(("finish", ids))
        self.requests = 0
        return []

    def programs(self, op: str, *args: Any) -> Any:
        self.calls.append((op, *args))
        return {"op": op}

    def count(self, name: str) -> int:
        return sum(call[0] == name for call in self.calls)


class HoldingScheduler(StockScheduler):
    """Holds its requests until ``due``, a time of the monotonic clock."""

    def __init__(self, seconds: float, requests: int = 1) -> None:
        super().__init__(requests)
        self.due = time.monotonic() + seconds
        self.asked = 0

    def schedule(self, throttle_prefills: bool) -> SchedulerOutput:
        if time.monotonic() >= self.due:
            self.requests = 0
        return super().schedule(throttle_prefills)

    def held_wait(self) -> float | None:
        self.asked += 1
        return max(self.due - time.monotonic(), 0.0) if self.requests else None


class Executor:
    is_sleeping = False

    def execute_model(self, output: SchedulerOutput, non_block: bool) -> "Future[Any]":
        future: Future[Any] = Future()
        future.set_result(EMPTY_MODEL_RUNNER_OUTPUT)
        return future


def make_core(scheduler: Any, *, batches: int = 1, data_parallel_size: int = 1) -> EngineCoreProc:
    """An engine core without model, sockets and processes."""
    core = EngineCoreProc.__new__(EngineCoreProc)
    core.vllm_config = SimpleNamespace(
        parallel_config=SimpleNamespace(data_parallel_size=data_parallel_size),
        observability_config=SimpleNamespace(enable_logging_iteration_details=False),
        shutdown_timeout=30,
    )
    core.scheduler = scheduler
    core.model_executor = Executor()
    core.input_queue, core.output_queue = queue.Queue(), queue.Queue()
    core.aborts_queue = queue.Queue()
    core.batch_queue_size = batches
    core.batch_queue = deque(maxlen=batches) if batches > 1 else None
    core.step_fn = core.step if batches == 1 else core.step_with_batch_queue
    core.engines_running = False
    core.shutdown_state = EngineShutdownState.RUNNING
    core.process_input_queue_block = True
    core._idle_state_callbacks = []
    core._weight_version = "default"
    core.publish_dp_lb_stats = core.enable_fault_tolerance = core.log_stats = False
    core.check_for_draft_tokens = core.is_mm_encoder_only = core.is_pooling_model = False
    core.async_scheduling = batches > 1
    return core


def timed(function: Callable[[], Any]) -> float:
    start = time.monotonic()
    function()
    return time.monotonic() - start


def later(seconds: float, function: Callable[[], Any]) -> None:
    timer = threading.Timer(seconds, function)
    timer.daemon = True
    timer.start()


def utility(name: str, *args: Any) -> tuple[EngineCoreRequestType, Any]:
    return EngineCoreRequestType.UTILITY, (0, 7, name, list(args))


@pytest.mark.parametrize("args", [(), ("p",), ("p", "t")])
def test_the_programs_utility_passes_on_every_argument(args: tuple[str, ...]) -> None:
    core = make_core(StockScheduler())
    core._handle_client_request(*utility("programs", "op", *args))
    assert core.scheduler.calls == [("op", *args)]
    client, outputs = core.output_queue.get_nowait()
    assert (client, outputs.utility_output.call_id) == (0, 7)
    assert outputs.utility_output.failure_message is None
    assert outputs.utility_output.result.result == {"op": "op"}


def test_a_stock_scheduler_is_stepped_at_once() -> None:
    core = make_core(StockScheduler())
    assert timed(core._process_input_queue) < SOON


def test_a_stock_scheduler_without_work_waits_for_a_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    core = make_core(StockScheduler(requests=0))
    timeouts: list[Any] = []
    get = core.input_queue.get

    def spy(block: bool = True, timeout: float | None = None) -> Any:
        timeouts.append((block, timeout))
        core.scheduler.requests = 1
        return get(block, timeout)

    monkeypatch.setattr(core.input_queue, "get", spy)
    later(0.05, lambda: core.input_queue.put(WAKEUP))
    assert timed(core._process_input_queue) >= 0.04
    assert timeouts == [(True, None)]


def test_an_engine_without_work_does_the_housekeeping_and_sleeps_on() -> None:
    scheduler = StockScheduler(requests=0)
    core = make_core(scheduler)
    asked: list[float] = []

    def idle_timeout() -> float:
        asked.append(time.monotonic())
        if len(asked) == 4:
            scheduler.requests = 1
            core.input_queue.put(WAKEUP)
        return 0.05

    scheduler.idle_timeout = idle_timeout
    core._process_input_queue()
    assert len(asked) == 4
    assert all(b - a >= 0.045 for a, b in pairwise(asked)), "it sleeps in between"
    assert scheduler.calls == []


def test_without_housekeeping_the_idle_wait_has_no_end() -> None:
    scheduler = StockScheduler(requests=0)
    core = make_core(scheduler)
    asked: list[None] = []
    scheduler.idle_timeout = lambda: asked.append(None)

    def work_comes() -> None:
        scheduler.requests = 1
        core.input_queue.put(WAKEUP)

    later(0.05, work_comes)
    core._process_input_queue()
    assert asked == [None]


def test_no_idle_wait_where_the_queue_is_polled() -> None:
    scheduler = StockScheduler(requests=0)
    scheduler.idle_timeout = lambda: pytest.fail("asked while polling")
    core = make_core(scheduler)
    core.process_input_queue_block = False
    assert timed(core._process_input_queue) < SOON


def test_an_idle_engine_ends_its_wait_for_a_shutdown() -> None:
    core = make_core(StockScheduler(requests=0))
    core.scheduler.idle_timeout = lambda: 0.02

    def terminate() -> None:
        core.shutdown_state = EngineShutdownState.REQUESTED
        core.input_queue.put(WAKEUP)

    later(0.1, terminate)
    with pytest.raises(SystemExit):
        core.run_busy_loop()
    assert core.scheduler.count("schedule") == 0


def test_held_turns_wait_for_the_deadline() -> None:
    core = make_core(HoldingScheduler(0.2))
    core._process_input_queue()
    assert core.scheduler.due <= time.monotonic() < core.scheduler.due + SOON
    assert core.scheduler.calls == []


@pytest.mark.parametrize("state", [EngineShutdownState.RUNNING, EngineShutdownState.SHUTTING_DOWN])
def test_a_message_ends_the_wait(state: EngineShutdownState) -> None:
    core = make_core(HoldingScheduler(30))
    core.shutdown_state = state
    abort = (EngineCoreRequestType.ABORT, ["r"])
    later(0.05, lambda: core.input_queue.put(abort))
    assert 0.04 <= timed(core._process_input_queue) < SOON
    assert core.scheduler.calls == [("finish", ["r"])]


@pytest.mark.parametrize(
    ("message", "calls"),
    [(WAKEUP, []), (utility("programs", "list"), [("list",)])],
    ids=["wakeup", "utility"],
)
def test_messages_that_are_there_are_handled_at_once(
    message: Any, calls: list[tuple[Any, ...]]
) -> None:
    core = make_core(HoldingScheduler(30))
    for _ in range(3):
        core.input_queue.put(message)
    assert timed(core._process_input_queue) < SOON
    assert core.scheduler.calls == calls * 3
    assert core.input_queue.empty()


def test_a_failed_executor_ends_the_wait() -> None:
    core = make_core(HoldingScheduler(30))
    later(0.05, lambda: core.input_queue.put((EngineCoreRequestType.EXECUTOR_FAILED, b"")))
    with pytest.raises(RuntimeError, match="Executor failed"):
        core._process_input_queue()


@pytest.mark.parametrize("wait", [None, 0.0])
def test_work_that_can_run_is_not_delayed(wait: float | None) -> None:
    scheduler = StockScheduler()
    scheduler.held_wait = lambda: wait
    core = make_core(scheduler)
    assert timed(core._process_input_queue) < SOON


def test_no_wait_while_a_batch_is_in_flight() -> None:
    core = make_core(HoldingScheduler(30), batches=2)
    core.batch_queue.appendleft((Future(), SchedulerOutput.make_empty(), Future()))
    assert timed(core._process_input_queue) < SOON


def test_no_wait_where_the_queue_is_polled() -> None:
    core = make_core(HoldingScheduler(30))
    core.process_input_queue_block = False
    assert timed(core._process_input_queue) < SOON


def test_a_rank_of_a_wave_does_not_wait() -> None:
    core = make_core(HoldingScheduler(30), data_parallel_size=2)
    assert timed(core._process_input_queue) < SOON
    assert core.scheduler.asked == 0


def test_batches_in_flight_are_collected_before_the_wait() -> None:
    scheduler = HoldingScheduler(30)
    core = make_core(scheduler, batches=2)
    for expected, queued in ((["schedule"], 1), (["schedule", "update"], 0)):
        core.step_with_batch_queue()
        assert [call[0] for call in scheduler.calls] == expected
        assert len(core.batch_queue) == queued


def test_a_stock_scheduler_keeps_the_batch_queue_filled() -> None:
    core = make_core(StockScheduler(), batches=2)
    for _ in range(3):
        core.step_with_batch_queue()
    assert [call[0] for call in core.scheduler.calls] == [
        "schedule", "schedule", "update", "schedule", "update",
    ]  # fmt: skip
    assert len(core.batch_queue) == 1


@pytest.mark.parametrize("batches", [1, 2, 4], ids=["step", "async", "pipeline of 4"])
@pytest.mark.parametrize("draining", [False, True], ids=["serving", "draining"])
def test_the_busy_loop_sleeps_until_the_turn_is_due(batches: int, draining: bool) -> None:
    """From the held turn to the end of the drain that SIGTERM starts."""
    scheduler = HoldingScheduler(0.5)
    core = make_core(scheduler, batches=batches)

    def terminate() -> None:
        core.shutdown_state = EngineShutdownState.REQUESTED
        core.input_queue.put(WAKEUP)

    later(0.1 if draining else 0.6, terminate)
    cpu = time.thread_time()

    def loop() -> None:
        with pytest.raises(SystemExit):
            core.run_busy_loop()

    loop()
    assert time.monotonic() >= scheduler.due, "a drain waits for held turns"
    assert time.monotonic() < scheduler.due + SOON
    assert not scheduler.requests
    assert scheduler.count("schedule") == scheduler.count("update")
    assert scheduler.count("schedule") <= 8, "stock vLLM makes some 500 calls a second"
    assert time.thread_time() - cpu < 0.1
