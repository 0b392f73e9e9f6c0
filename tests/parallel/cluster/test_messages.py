"""Messages between processes: what is refused, and that everything sent is read back."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel.cluster.messages import (
    Abort,
    Gather,
    Heartbeat,
    Hello,
    Member,
    Members,
    Result,
    encode,
    parse,
)

MEMBER = Member(host="h", clock_skew=-0.5, payload={"jax_port": 1})
MESSAGES = [
    Hello(process_id=1, num_processes=2, host="a.b-c_d", payload={"x": [1, None]}, clock=1e9),
    Members(members=[MEMBER, MEMBER]),
    Heartbeat(phase=None, phase_seconds=0.0),
    Heartbeat(phase="step 12", phase_seconds=3),
    Gather(tag="report 1", value={"loss": [1.5, True, None, "x"]}),
    Result(tag="report 1", values=[1, "a", {}]),
    Abort(reason="process 1 failed: out of memory", exit_code=255),
]
CHANGES = [
    ("hello", {"process_id": 2}, "hello: Value error, process_id is not below num_processes"),
    ("hello", {"clock": math.nan}, "hello.clock: Input should be a finite number"),
    ("members", {"members": [{"host": "h"}]}, "members.members.0.clock_skew: Field required"),
    ("members", {"members": None}, "members.members: Input should be a valid list"),
    ("heartbeat", {"phase_seconds": -1.0}, "heartbeat.phase_seconds: Input should be greater"),
    ("heartbeat", {"phase_seconds": math.inf}, "heartbeat.phase_seconds: Input should be a finite"),
    ("heartbeat", {"phase_seconds": True}, "heartbeat.phase_seconds: Input should be a valid num"),
    ("heartbeat", {"phase": 1}, "heartbeat.phase: Input should be a valid string"),
    ("gather", {"tag": None}, "gather.tag: Input should be a valid string"),
    ("gather", {"exit_code": 0}, "gather.exit_code: Extra inputs are not permitted"),
    ("result", {"values": "all"}, "result.values: Input should be a valid list"),
    ("abort", {"exit_code": 0}, "abort.exit_code: Input should be greater than or equal to 1"),
    ("abort", {"exit_code": -9}, "abort.exit_code: Input should be greater than or equal to 1"),
    ("abort", {"exit_code": 256}, "abort.exit_code: Input should be less than or equal to 255"),
    ("abort", {"exit_code": False}, "abort.exit_code: Input should be a valid integer"),
    ("abort", {"exit_code": "0"}, "abort.exit_code: Input should be a valid integer"),
    ("abort", {"a\nb": 0}, "abort.a\\nb: Extra inputs are not permitted"),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.kind)
def test_every_message_is_read_as_it_was_sent(message):
    assert parse(encode(message)) == message
    assert b"\n" not in encode(message)


@pytest.mark.parametrize(("kind", "fields", "reason"), CHANGES)
def test_a_message_with_a_wrong_field_is_refused(kind, fields, reason):
    valid = next(message for message in MESSAGES if message.kind == kind)
    with pytest.raises(ValueError) as refused:
        parse(json.dumps(valid.model_dump() | fields).encode())
    assert str(refused.value).startswith(reason) and str(refused.value).isprintable()


def test_values_that_are_not_finite_or_not_unicode_travel():
    found = parse(encode(Gather(tag="loss", value=[math.inf, math.nan, "\udc80"])))
    assert isinstance(found, Gather)
    assert found.value[0] == math.inf and math.isnan(found.value[1]) and found.value[2] == "\udc80"
    assert parse(encode(Abort(reason="no file a\udc80", exit_code=1))).reason == "no file a\\udc80"


@given(st.binary() | st.text().map(str.encode))
def test_rubbish_is_refused_by_a_value_error(text):
    with pytest.raises(ValueError):
        parse(text)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)


@given(
    st.sampled_from(MESSAGES),
    st.sampled_from(["kind", "exit_code", "process_id", "values", "members", "clock", "new"]),
    JSON,
)
def test_whatever_is_accepted_is_valid(message, field, value):
    """Whoever changes a field gets a refusal, or a message within the rules."""
    try:
        found = parse(json.dumps(message.model_dump() | {field: value}).encode())
    except ValueError:
        return
    assert parse(encode(found)) == found or "nan" in repr(found)
    assert type(found) is type(message) and set(found.model_dump()) == set(message.model_dump())
    if isinstance(found, Abort):
        assert type(found.exit_code) is int and 1 <= found.exit_code <= 255
    if isinstance(found, Hello):
        assert type(found.process_id) is int and 1 <= found.process_id < found.num_processes
        assert math.isfinite(found.clock)
