"""The closed-loop client against a server of the tests' own: all it sends, and every failure."""

import asyncio
import time

import pytest

from tests.replay.fake_server import FakeServer
from vllm_thunder.program.errors import ConfigError
from vllm_thunder.replay.client import CallFailed, ClientOptions
from vllm_thunder.replay.driver import replay
from vllm_thunder.replay.records import Replay, StepRecord
from vllm_thunder.replay.workload import ProgramShape, StepShape, Workload


def workload(programs: int = 3, steps: int = 3, tool_seconds: float = 0.0) -> Workload:
    shape = tuple(
        StepShape(40 if number == 0 else 20, 4, "bash", tool_seconds) for number in range(steps)
    )
    return Workload(
        name="test",
        seed=0,
        blocks=10,
        block_size=16,
        programs=tuple(ProgramShape(f"p/{i}", "test", 10, shape) for i in range(programs)),
    )


async def run(server: FakeServer, load: Workload, **options: object) -> Replay:
    async with server.serving():
        return await replay(load, ClientOptions(server.url, **options))  # type: ignore[arg-type]


def by_program(result: Replay, program_id: str) -> list[StepRecord]:
    return sorted(
        (step for step in result.steps if step.program_id == program_id), key=lambda s: s.step
    )


async def test_contexts_grow_by_the_actual_answer() -> None:
    server = FakeServer()
    result = await run(server, workload(programs=1))
    assert not result.errors
    first, second, third = (request["messages"] for request in server.requests)
    assert [message["role"] for message in first] == ["system", "user"]
    assert len(first[0]["content"].split()) == 10
    assert len(first[1]["content"].split()) == 30
    assert second[:2] == first
    assert second[2] == {
        "role": "assistant",
        "content": " answer0.0 answer0.1 answer0.2 answer0.3",
    }
    assert second[3]["role"] == "user"
    assert len(second[3]["content"].split()) == 20
    assert third[:4] == second


async def test_the_system_prompt_is_shared_and_the_rest_is_not() -> None:
    server = FakeServer()
    await run(server, workload(programs=3, steps=1))
    prompts = [request["messages"] for request in server.requests]
    assert len({messages[0]["content"] for messages in prompts}) == 1
    assert len({messages[1]["content"] for messages in prompts}) == 3


async def test_two_runs_send_the_same_text() -> None:
    servers = [FakeServer(), FakeServer()]
    for server in servers:
        await run(server, workload(programs=1))
    assert servers[0].requests == servers[1].requests


async def test_what_a_request_asks_for() -> None:
    server = FakeServer()
    await run(server, workload(programs=1, steps=1))
    request = server.requests[0]
    assert request["model"] == "fake"
    assert request["program_id"] == "p/0"
    assert request["max_tokens"] == request["min_tokens"] == 4
    assert request["ignore_eos"] is True
    assert request["stream"] is True
    assert request["stream_options"] == {"include_usage": True}
    plain = FakeServer()
    await run(plain, workload(programs=1, steps=1), exact_output=False, model="mine")
    assert plain.requests[0]["model"] == "mine"
    assert not {"ignore_eos", "min_tokens"} & plain.requests[0].keys()


@pytest.mark.parametrize(
    ("field", "where"),
    [
        ("session_id", lambda body, headers: body["session_id"]),
        ("vllm_xargs.session_id", lambda body, headers: body["vllm_xargs"]["session_id"]),
        ("header:X-Session-ID", lambda body, headers: headers["X-Session-ID"]),
    ],
)
async def test_the_id_goes_where_the_field_says(field, where) -> None:
    server = FakeServer()
    await run(server, workload(programs=1, steps=1), program_id_field=field)
    assert where(server.requests[0], server.headers[0]) == "p/0"
    assert "program_id" not in server.requests[0]


async def test_the_last_call_says_so() -> None:
    server = FakeServer()
    await run(server, workload(programs=1, steps=2), final_field="is_last_step")
    assert ["is_last_step" in request for request in server.requests] == [False, True]


async def test_releases() -> None:
    server = FakeServer()
    await run(server, workload())
    assert sorted(server.released) == ["p/0", "p/1", "p/2"]
    never = FakeServer()
    await run(never, workload(), release_path=None)
    assert never.released == []
    failing = FakeServer(release_status=503)
    result = await run(failing, workload(programs=1))
    assert "release: HTTP 503" in result.errors[0]
    assert result.programs[0].error is None


async def test_without_ids_nothing_is_labelled_or_released() -> None:
    server = FakeServer()
    result = await run(server, workload(), program_id_field=None)
    assert not any("program_id" in request for request in server.requests)
    assert server.released == []
    assert not any(step.labelled for step in result.steps)


async def test_a_share_of_the_programs_is_unlabelled() -> None:
    server = FakeServer()
    result = await run(server, workload(programs=8, steps=2), unlabelled_share=0.25)
    labelled = {program.program_id for program in result.programs if program.labelled}
    assert len(labelled) == 6
    assert set(server.released) == labelled
    assert {request.get("program_id") for request in server.requests} == labelled | {None}


async def test_records_and_counters() -> None:
    server = FakeServer(token_seconds=0.01)
    result = await run(server, workload(programs=2))
    assert len(result.steps) == 6
    first, second, _ = by_program(result, "p/1")
    assert (first.prompt_tokens, first.completion_tokens, first.cached_tokens) == (40, 4, 0)
    assert (second.prompt_tokens, second.cached_tokens) == (64, 32)
    assert second.finish_reason == "length"
    for step in result.steps:
        assert 0.01 <= step.first_token_seconds < step.latency_seconds - 0.02
    assert second.started_at >= first.started_at + first.latency_seconds
    assert [program.finished_steps for program in result.programs] == [3, 3]
    last = by_program(result, "p/1")[-1]
    assert result.programs[1].ended_at == pytest.approx(
        last.started_at + last.latency_seconds, abs=0.5
    )
    assert result.engine["vllm:prefix_cache_queries_total"] == 2 * (40 + 64 + 88)
    assert result.engine["vllm:prefix_cache_hits_total"] == server.hit
    assert result.decisions == {"pauses": 6}, "the change, not the value"
    assert result.summary is not None
    assert result.summary["programs"] == 0


async def test_a_server_without_metrics() -> None:
    result = await run(FakeServer(with_metrics=False), workload(programs=1))
    assert result.engine == {}
    assert not result.errors


async def test_tools_take_their_time() -> None:
    start = time.perf_counter()
    result = await run(FakeServer(), workload(programs=2, steps=3, tool_seconds=0.2))
    first, second, last = by_program(result, "p/0")
    assert second.started_at - (first.started_at + first.latency_seconds) >= 0.2
    assert last.tool_seconds == 0
    assert 0.4 <= result.seconds < time.perf_counter() - start


async def test_a_cap_on_programs_queues_the_others_at_the_client() -> None:
    server = FakeServer(token_seconds=0.01)
    result = await run(server, workload(programs=6, steps=2), max_concurrent_programs=2)
    assert server.most_running == 2
    waited = [by_program(result, f"p/{number}")[0].queue_seconds for number in range(6)]
    assert min(waited[4:]) > 0.1
    assert max(waited[:2]) < min(waited[4:])
    for program in result.programs:
        steps = by_program(result, program.program_id)
        latencies = sum(step.latency_seconds for step in steps)
        # Waiting for a slot is time of the program, and no latency of its steps.
        assert steps[0].queue_seconds + latencies <= program.ended_at


async def test_unbounded_programs_run_at_once() -> None:
    server = FakeServer(token_seconds=0.02)
    await run(server, workload(programs=6, steps=1))
    assert server.most_running == 6


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("500", "HTTP 500: out of luck"),
        ("error", "the engine died"),
        ("cut", "the stream ended before"),
        ("hang", "no whole answer within 1 s"),
    ],
)
async def test_a_failed_call_is_recorded_and_ends_its_program_alone(
    fault: str, message: str
) -> None:
    server = FakeServer(fail_at={0: fault})
    result = await run(server, workload(programs=2), step_timeout=1.0)
    failed = server.requests[0]["program_id"]
    other = next(p.program_id for p in result.programs if p.program_id != failed)
    (step,) = by_program(result, failed)
    assert message in step.error
    assert [step.error for step in by_program(result, other)] == [None, None, None]
    assert len(result.errors) == 1
    assert result.errors[0].startswith(f"{failed}: ")
    assert len(server.requests) == 4, "nothing is tried again"
    assert sorted(server.released) == ["p/0", "p/1"], "a failed program is released too"
    if fault == "hang":
        assert 1.0 <= step.latency_seconds < 5.0


async def test_the_runs_time_out_ends_everything() -> None:
    server = FakeServer(fail_at={0: "hang", 1: "hang"})
    start = time.perf_counter()
    result = await run(server, workload(programs=3), run_timeout=1.5)
    assert time.perf_counter() - start < 10
    stopped = [program for program in result.programs if program.error is not None]
    assert len(stopped) == 2
    assert all("stopped" in program.error for program in stopped)
    assert len(server.released) == 3


async def test_the_end_of_the_window_is_no_failure() -> None:
    server = FakeServer(fail_at={0: "hang"}, token_seconds=0.01)
    result = await run(server, workload(programs=3), window_seconds=1.5)
    assert not result.errors
    assert sorted(program.complete for program in result.programs) == [False, True, True]
    (cut,) = [step for step in result.steps if step.error is not None]
    assert cut.latency_seconds == pytest.approx(1.5, abs=0.3)
    assert result.seconds == pytest.approx(1.5, abs=0.3)
    assert len(server.released) == 3
    failed = await run(FakeServer(fail_at={0: "500"}), workload(), window_seconds=30.0)
    assert len(failed.errors) == 1, "what failed in the window has failed"
    timed_out = await run(
        FakeServer(fail_at={0: "hang"}), workload(), window_seconds=30.0, run_timeout=0.3
    )
    assert timed_out.errors


async def test_a_program_that_never_got_its_slot_is_told() -> None:
    server = FakeServer(fail_at={0: "hang"})
    result = await run(server, workload(programs=2), max_concurrent_programs=1, run_timeout=0.3)
    assert [program.finished_steps for program in result.programs] == [0, 0]
    assert all("stopped" in (program.error or "") for program in result.programs)
    assert server.released == ["p/0"]


async def test_cancelling_the_run_stops_its_programs() -> None:
    server = FakeServer(fail_at={0: "hang"})
    async with server.serving():
        task = asyncio.create_task(replay(workload(programs=1), ClientOptions(server.url)))
        await server.called.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert server.released == ["p/0"]
        assert len(asyncio.all_tasks() - {asyncio.current_task()}) <= 2, "the server's own"


async def test_no_server_at_all_is_an_error_at_once() -> None:
    with pytest.raises(CallFailed, match=r"127\.0\.0\.1:9/v1/models"):
        await replay(workload(), ClientOptions("http://127.0.0.1:9"))
    with pytest.raises(CallFailed, match=r"127\.0\.0\.1:9/metrics"):
        await replay(workload(), ClientOptions("http://127.0.0.1:9", model="m"))


async def test_words_per_token() -> None:
    server = FakeServer()
    await run(server, workload(programs=1, steps=2), words_per_token=0.5)
    lengths = [len(m["content"].split()) for m in server.requests[1]["messages"]]
    assert lengths == [5, 15, 4, 10]


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        ({"base_url": "localhost:8000"}, "--url"),
        ({"program_id_field": "header:"}, "--program-id-field"),
        ({"program_id_field": "a..b"}, "--program-id-field"),
        ({"final_field": ""}, "--final-field"),
        ({"release_path": "programs/release"}, "--release-path"),
        ({"max_concurrent_programs": 0}, "--max-concurrent-programs"),
        ({"unlabelled_share": 1.5}, "--unlabelled-share"),
        ({"step_timeout": 0.0}, "--step-timeout"),
        ({"run_timeout": -1.0}, "--run-timeout"),
        ({"window_seconds": 0.0}, "--window"),
        ({"words_per_token": float("nan")}, "--words-per-token"),
    ],
)
def test_options_have_ranges(options: dict[str, object], flag: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        ClientOptions(**{"base_url": "http://x", **options})  # type: ignore[arg-type]


async def test_a_result_survives_its_json(tmp_path) -> None:
    result = await run(FakeServer(fail_at={0: "500"}), workload(), api_key="secret")
    result.save(tmp_path / "run.json")
    assert Replay.load(tmp_path / "run.json") == result
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]
    assert "secret" not in (tmp_path / "run.json").read_text()
