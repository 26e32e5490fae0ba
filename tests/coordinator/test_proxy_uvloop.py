"""The same on uvloop, which is what serves: its transports differ from asyncio's."""

import pytest
import uvloop

from tests.coordinator import (
    test_proxy_bytes,
    test_proxy_clients,
    test_proxy_faults,
    test_proxy_limits,
)
from tests.coordinator.front import CHAT

RUNS = [
    *(
        (test_proxy_bytes.test_an_answer_is_what_the_engine_sent, k, True)
        for k in test_proxy_bytes.ANSWERS
    ),
    *(
        (test_proxy_bytes.test_a_request_is_what_the_client_sent, k)
        for k in test_proxy_bytes.REQUESTS
    ),
    (test_proxy_bytes.test_a_slow_client_slows_the_engine,),
    (test_proxy_bytes.test_chunks_come_as_they_are_sent,),
    *(
        (test_proxy_faults.test_a_call_goes_elsewhere_while_no_byte_came, how, body)
        for how in test_proxy_faults.LOST_BEFORE_A_BYTE
        for body in (test_proxy_faults.LABELLED, test_proxy_faults.UNLABELLED)
    ),
    *(
        (
            test_proxy_faults.test_a_stream_that_breaks_ends_with_an_error_of_its_endpoint,
            CHAT,
            end,
            b"x",
        )
        for end in (*test_proxy_faults.ENDS, "abandoned")
    ),
    *(
        (
            test_proxy_faults.test_what_hangs_with_an_engine_that_is_declared_down_goes_elsewhere,
            warm,
            said,
            test_proxy_faults.LABELLED,
        )
        for warm in (False, True)
        for said in (0, 1)
    ),
    (
        test_proxy_faults.test_an_engine_that_is_declared_down_while_the_client_reads_slowly_is_cut_there,
    ),
    (test_proxy_faults.test_a_connection_that_the_engine_closed_for_idleness_is_no_failure,),
    (test_proxy_faults.test_killing_an_engine_under_load_loses_no_call_that_had_no_byte,),
    *(
        (
            test_proxy_clients.test_a_client_that_leaves_ends_its_request_at_the_engine,
            stage,
            True,
            stream,
            0.02,
        )
        for stage in test_proxy_clients.STAGES
        for stream in (True, False)
    ),
    (test_proxy_clients.test_a_held_stream_is_kept_open_and_then_goes_on_as_the_engine_says,),
    (test_proxy_limits.test_bodies_stream_both_ways_at_once,),
    (test_proxy_limits.test_an_engine_that_does_not_answer_is_a_502, b"{}"),
]


def name_of(run):
    test, *arguments = run
    return "-".join([test.__name__.removeprefix("test_"), *map(str, arguments)])


@pytest.mark.parametrize("run", RUNS, ids=name_of)
def test_on_uvloop(run):
    test, *arguments = run
    uvloop.run(test(*arguments))
