"""What a request tells about its turn besides whose it is."""

import itertools

import pytest

from tests.program.test_identity import PLACES, merged, nested, resolve
from vllm_thunder.program.errors import IdentityError


@pytest.mark.parametrize("place", PLACES)
def test_the_body_tells_the_rest_of_the_turn(place):
    told = {
        "program_id": "a",
        "is_last_step": True,
        "parent_program_id": 12,
        "program_group": "g",
        "tool_name": "bash",
        "kv_retention_ttl_seconds": 90,
        "deadline_seconds": 2.5,
        "one_off": True,
        "priority": -4,
    }
    body = {}
    for name, value in told.items():
        body = merged(body, nested(place, name, value))
    turn = resolve(body, turn_id="t9")
    assert turn.program_id == "a"
    assert turn.turn_id == "t9"
    assert turn.parent_id == "12"
    assert turn.final is True
    assert turn.priority == -4
    assert turn.group == "g"
    assert turn.tool == "bash"
    assert turn.retention_seconds == 90.0
    assert turn.deadline_seconds == 2.5
    assert turn.one_off is True
    assert turn.fans_out is False


def test_a_request_that_tells_nothing_more():
    turn = resolve({"program_id": "a", "deadline_seconds": None, "one_off": None})
    assert turn == resolve({"program_id": "a", "agentic_context": {"step_id": 3}})
    assert (turn.deadline_seconds, turn.one_off, turn.retention_seconds) == (None, False, None)


@pytest.mark.parametrize(("worse", "better"), list(itertools.combinations(PLACES[::-1], 2)))
@pytest.mark.parametrize(
    ("name", "field", "values"),
    [
        ("deadline_seconds", "deadline_seconds", (1, 2)),
        ("kv_retention_ttl_seconds", "retention_seconds", (0, 2)),
        ("one_off", "one_off", (False, True)),
        ("is_last_step", "final", (False, True)),
    ],
)
def test_the_better_place_wins(worse, better, name, field, values):
    told, outranked = values
    body = merged(nested(worse, name, outranked), nested(better, name, told))
    assert getattr(resolve({"program_id": "a", **body}), field) == told


@pytest.mark.parametrize(
    ("value", "final"),
    [(True, True), (False, False), (1, True), (0, False), ("true", True), ("False", False)],
)
def test_is_last_step_values(value, final):
    assert resolve({"job_id": "j", "vllm_xargs": {"is_last_step": value}}).final is final
    assert resolve({"job_id": "j"}, {"x-dynamo-session-final": str(value)}).final is final


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("is_last_step", "perhaps"),
        ("is_last_step", 2),
        ("is_last_step", []),
        ("kv_retention_ttl_seconds", -1),
        ("kv_retention_ttl_seconds", "60"),
        ("kv_retention_ttl_seconds", True),
        pytest.param("kv_retention_ttl_seconds", 10**400, id="too long"),
        ("kv_retention_ttl_seconds", float("nan")),
        ("kv_retention_ttl_seconds", float("inf")),
        ("deadline_seconds", 0),
        ("deadline_seconds", 0.0),
        ("deadline_seconds", -1.5),
        ("deadline_seconds", "5"),
        ("deadline_seconds", True),
        ("deadline_seconds", [5]),
        pytest.param("deadline_seconds", 10**400, id="too late"),
        ("deadline_seconds", float("nan")),
        ("deadline_seconds", float("inf")),
        ("one_off", "perhaps"),
        ("one_off", 2),
        ("one_off", 1.0),
        ("one_off", {}),
        ("parent_program_id", False),
        ("program_group", {}),
        ("tool_name", ""),
    ],
)
def test_wrong_values_beside_an_id(name, value):
    with pytest.raises(IdentityError) as caught:
        resolve({"program_id": "a", name: value})
    assert caught.value.field == name


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("deadline_seconds", 0, "a number of seconds above 0 and up to 3155760000"),
        ("kv_retention_ttl_seconds", -1, "a number of seconds from 0 to 3155760000"),
        ("one_off", "no", "true or false"),
    ],
)
def test_a_wrong_value_is_told_what_is_allowed(place, name, value, allowed):
    field = ".".join((*place, name))
    with pytest.raises(IdentityError) as caught:
        resolve({"program_id": "a", **nested(place, name, value)})
    assert str(caught.value) == f"{field}: must be {allowed}"


def test_priority_is_vllms_own_where_it_is_set():
    assert resolve({"program_id": "a"}).priority == 0
    assert resolve({"program_id": "a", "agentic_context": {"priority": 7}}).priority == 7
    both = {"program_id": "a", "priority": 2, "agentic_context": {"priority": 7}}
    assert resolve(both).priority == 2
    assert resolve(both, {"x-vllm-priority": "-1"}).priority == -1
    assert resolve(both, {"x-vllm-priority": "soon"}).priority == 2
    assert resolve(both, {"x-vllm-priority": "9" * 30}).priority == 2


@pytest.mark.parametrize("value", ["high", True, 2**63, 1.5])
def test_vllm_answers_for_a_wrong_priority_of_its_own_and_we_for_ours(value):
    assert resolve({"program_id": "a", "priority": value}).priority == 0
    with pytest.raises(IdentityError, match=r"agentic_context\.priority"):
        resolve({"program_id": "a", "agentic_context": {"priority": value}})


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("0", 0.0),
        ("12.5", 12.5),
        ("3", 3.0),
        ("1e1", 10.0),
        ("-2.5", -2.5),
        ("", 0.0),
        (None, 0.0),
    ],
)
def test_a_turn_tells_how_long_it_has_waited_in_front_of_the_engine(header, seconds):
    headers = {} if header is None else {"x-program-waited": header}
    assert resolve({"program_id": "a"}, headers).waited_seconds == seconds


@pytest.mark.parametrize(
    "header", ["soon", "nan", "inf", "-inf", "--1", "- 1", "1 s", "1e400", "\xb2"]
)
def test_a_wait_that_is_no_number_of_seconds_is_refused(header):
    with pytest.raises(IdentityError) as caught:
        resolve({"program_id": "a"}, {"x-program-waited": header})
    assert caught.value.field == "header x-program-waited"
    assert str(caught.value) == (
        "header x-program-waited: must be a number of seconds from -3155760000 to 3155760000"
    )


def test_a_request_without_an_id_has_no_wait():
    assert resolve({}, {"x-program-waited": "soon"}) is None
