"""Patch 0001: a request's turn, from the context to the scheduler's request."""

import copy

import msgspec
import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.request import Request
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from vllm_thunder.program.context import current_turn
from vllm_thunder.program.turn import Turn

TURN = Turn("run/1:α\n", "turn-1", parent_id="run/0", priority=-3, tool="bash", fans_out=True)


def engine_request(program: Turn | None = None) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id="r",
        prompt_token_ids=[1, 2, 3],
        mm_features=None,
        sampling_params=SamplingParams(max_tokens=4),
        pooling_params=None,
        arrival_time=1.5,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
        program=program,
    )


def test_the_field_is_the_last_one() -> None:
    assert EngineCoreRequest.__struct_fields__[-1] == "program"
    assert engine_request().program is None


@pytest.mark.parametrize("turn", [TURN, Turn("p", "t"), None])
def test_round_trip_to_the_engine_core(turn: Turn | None) -> None:
    frames = MsgpackEncoder().encode(engine_request(turn))
    received = MsgpackDecoder(EngineCoreRequest).decode(frames)
    assert received.program == turn
    assert type(received.program) is type(turn)
    assert Request.from_engine_core_request(received, None).program == turn


def test_a_sender_without_the_field_is_understood() -> None:
    (frame,) = MsgpackEncoder().encode(engine_request())
    *stock_fields, program = msgspec.msgpack.decode(frame)
    assert program is None
    stock = msgspec.msgpack.encode(stock_fields)
    assert MsgpackDecoder(EngineCoreRequest).decode([stock]) == engine_request()


def test_assigning_the_id_sets_the_turn_of_the_context() -> None:
    request = engine_request()
    token = current_turn.set(TURN)
    try:
        InputProcessor.assign_request_id(request)
    finally:
        current_turn.reset(token)
    assert request.program is TURN
    assert request.request_id.startswith("r-")
    assert copy.copy(request).program is TURN, "n > 1 copies the request for each child"


def test_outside_a_turn_nothing_is_set() -> None:
    request = engine_request()
    InputProcessor.assign_request_id(request)
    assert request.program is None


@pytest.mark.parametrize("in_context", [None, Turn("other", "t2")])
def test_a_turn_that_is_set_stays(in_context: Turn | None) -> None:
    request = engine_request(TURN)
    token = current_turn.set(in_context)
    try:
        InputProcessor.assign_request_id(request)
    finally:
        current_turn.reset(token)
    assert request.program is TURN
