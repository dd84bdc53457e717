"""Requests and replies come back as they were sent; what cannot be one is refused."""

from __future__ import annotations

import contextlib
import math
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.buffer.client import codec, messages
from asyncrl.buffer.client.messages import TicketReply, TicketsRequest
from asyncrl.buffer.ledger.group import Reason
from asyncrl.tracking.series import DROP_REASONS
from asyncrl.trajectory import Ticket, TicketId
from asyncrl.wire import WireError, pack, unpack
from tests.wire.test_wire import ATTEMPTS, COUNTS, IDS, JSON, NUMBERS

ASKED = TicketsRequest("a", (0, 0), 1, [], 0.0)


def decoded(header: bytes) -> TicketReply:
    return codec.decode_reply(ASKED, codec.decode_header(header), [])


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_a_ticket_comes_back(data: st.DataObject) -> None:
    ticket = Ticket(
        id=data.draw(IDS),
        attempt=data.draw(ATTEMPTS),
        kind=data.draw(st.sampled_from(["train", "eval"])),
        task=data.draw(st.dictionaries(st.text(max_size=5), NUMBERS | st.text(max_size=5) | st.none(), max_size=3)),
        min_version=(data.draw(COUNTS), data.draw(COUNTS)),
        group_size=data.draw(st.integers(1, 1000)),
        temperature=data.draw(NUMBERS),
        seed=data.draw(COUNTS),
        lease_s=data.draw(NUMBERS),
    )
    assert decoded(codec.encode_reply(1, TicketReply([ticket], ""))).tickets == [ticket]


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_any_value_in_any_field_of_a_ticket_is_taken_or_refused(data: st.DataObject) -> None:
    ticket = Ticket(TicketId(0, 1, 2), 0, "train", {}, (0, 0), 8, 1.0, 5, 30.0)
    reply: dict[str, Any] = unpack(codec.encode_reply(1, TicketReply([ticket], "")))
    (fields,) = reply["reply"]["tickets"]
    name = data.draw(st.sampled_from(sorted(fields)))
    if data.draw(st.booleans()):
        del fields[name]
    else:
        fields[name] = data.draw(JSON)
    with contextlib.suppress(WireError):
        assert decoded(pack(reply)).tickets[0].group_size >= 1


def test_every_request_comes_back_and_has_an_op_and_a_reply() -> None:
    assert len(messages.REQUESTS) == len({request.__struct_config__.tag for request in messages.REQUESTS}) == 21
    for request in (ASKED, messages.StatusRequest(), messages.StartRequest(3, 2, None, True)):
        back = codec.decode_request(codec.encode_request(request, 7))
        assert back == msgspec.structs.replace(request, n=7)
        assert unpack(codec.encode_request(request, 7))["op"] == request.op


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, -math.inf, True, "1", None])
def test_seconds_are_finite_and_not_negative(value: Any) -> None:
    good = unpack(codec.encode_request(ASKED, 1))
    assert codec.decode_request(pack(good)) == msgspec.structs.replace(ASKED, n=1)
    with pytest.raises(WireError, match="wait_s"):
        codec.decode_request(pack(good | {"wait_s": value}))


def test_a_request_without_a_number_is_refused_and_one_with_a_wrong_field_keeps_its_number() -> None:
    with pytest.raises(WireError, match="n is missing"):
        codec.decode_request(pack({"op": "status"}))
    assert codec.number_of(pack({"op": "nothing", "n": 5})) == 5
    assert [codec.number_of(pack(header)) for header in ({"n": -5}, {"n": 2**63}, {"n": True}, {})] == [-1] * 4


def test_tracking_names_every_reason_for_which_a_group_is_dropped() -> None:
    assert get_args(Reason) == DROP_REASONS
