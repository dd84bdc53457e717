"""Recorded turns come back as they were sent, in an order that only an episode can have."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import msgpack
import numpy as np
import pytest

from asyncrl.buffer.client import codec, messages
from asyncrl.trajectory import Ticket, TicketId
from asyncrl.trajectory.kept_ids import KeptIds
from asyncrl.trajectory.turns import (
    Recorded,
    RecordedAnswer,
    RecordedReset,
    RecordedSample,
    ids_digest,
    successors,
    tokens_digest,
)
from asyncrl.wire import WireError
from asyncrl.wire.turns import (
    Unrecordable,
    decode_body,
    decode_carried,
    decode_turn,
    encode_body,
    encode_carried,
    encode_turn,
    tools_digest,
)
from tests.buffer.fuzzing import mutations

ID = TicketId(1, 2, 3)


def sample(number: int, ids: list[int], versions: list[int] | None = None, **about: Any) -> RecordedSample:
    of = np.array(ids, np.int32)
    logprobs = -np.arange(len(ids), dtype=np.float32) / 7
    given = {"stop_reason": "stop", "prompt": ids_digest([1, 2, number + 10])} | about
    return RecordedSample(number, of, logprobs, np.array(versions or [0] * len(ids), np.int32), **given)


RESET = RecordedReset([{"role": "user", "content": "wie geht's?"}], tools_digest([{"a": 1}]), b"hall", b"\0state")
INTENT = sample(0, [5, 6, 7], [3, 3, 4], kept=KeptIds(np.array([1, 0, 2], np.uint16), np.array([5, 7, 9], np.int32)))
ANSWER = RecordedAnswer(
    0,
    [{"role": "tool", "content": "9", "tool_call_id": "x"}],
    0.1,
    False,
    {"part": 0.5},
    {"success": 0.0},
    "kitchen",
    (("look", 0.25),),
    0.5,
    "/snapshots/abc",
)
REPLY = sample(2, [], stop_reason="length", queue_s=0.5, prefilled=3, summary=True, beside=2)
ALL: list[Recorded] = [RESET, INTENT, ANSWER, REPLY]


def same(a: Recorded, b: Recorded) -> None:
    if isinstance(a, RecordedSample) and isinstance(b, RecordedSample):
        assert a.digest() == b.digest()
        assert [x.dtype for x in (a.token_ids, a.logprobs, a.versions)] == [np.int32, np.float32, np.int32]
        empty = np.zeros(0)
        gone = {"token_ids": empty, "logprobs": empty, "versions": empty, "kept": None}
        a, b = replace(a, **gone), replace(b, **gone)
        assert {k: getattr(a, k) for k in RecordedSample.__slots__ if k not in gone} == {
            k: getattr(b, k) for k in RecordedSample.__slots__ if k not in gone
        }
    else:
        assert a == b


@pytest.mark.parametrize("record", ALL, ids=lambda r: r.named)
def test_a_record_comes_back(record: Recorded) -> None:
    id, attempt, stored = decode_turn(encode_turn(ID, 4, record))
    assert (id, attempt) == (ID, 4)
    same(stored.record, record)
    same(decode_carried(encode_carried(record)), record)
    assert stored.size == len(stored.body) + len(getattr(record, "snapshot", None) or b"")
    assert stored.body == encode_body(record)


def test_a_record_of_an_earlier_state_of_the_code_is_read() -> None:
    *before, beside = msgpack.unpackb(encode_body(REPLY))
    assert beside == 2
    same(decode_body(msgpack.packb(before)), replace(REPLY, beside=0))


def test_an_episode_has_one_order() -> None:
    partial, whole = sample(1, [4], stop_reason="abort"), sample(1, [4, 5])
    summary = sample(2, [8], summary=True)
    order = [None, RESET, INTENT, ANSWER, partial, whole, replace(ANSWER, number=1), summary, sample(3, [9])]
    behind = [successors(None if last is None else (last.place[0], last.form)) for last in order]
    for places, next in zip(behind, order[1:], strict=False):
        assert next is not None
        assert next.place in places
    assert behind[0] == {RESET.place, INTENT.place}, "without a reset the environment cannot go on"
    assert all(len(places) == 1 for places in behind[1:])


def test_the_digest_of_tokens_knows_each_array_and_not_how_they_are_parted() -> None:
    def of(record: RecordedSample) -> Any:
        return record.token_ids, record.logprobs, record.versions, record.kept

    a, b = sample(0, [5, 6], [1, 2]), sample(0, [7], [2])
    ids, logprobs, versions = (np.concatenate(each) for each in zip(of(a)[:3], of(b)[:3], strict=True))
    whole = (ids, logprobs, versions, None)
    assert tokens_digest([of(a), of(b)]) == tokens_digest([whole])
    others = [(ids + 1, logprobs, versions), (ids, logprobs - 1, versions), (ids, logprobs, versions + 1), whole[:2]]
    digests = {tokens_digest([whole]), *(tokens_digest([(*other[:3], None)]) for other in others[:3])}
    kept = KeptIds(np.array([1, 0, 0], np.uint16), np.array([5], np.int32))
    digests |= {tokens_digest([(*whole[:3], kept)]), tokens_digest([])}
    assert len(digests) == 6
    assert ids_digest([1, 2]) != ids_digest([2, 1])
    assert ids_digest([1, 2]) == ids_digest(np.array([1, 2], np.int64))


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (replace(ANSWER, reward=float("nan")), "reward is nan"),
        (replace(ANSWER, metrics={"m": float("inf")}), "metrics.m is inf"),
        (replace(ANSWER, messages=[{"role": "user", "content": object()}]), "answer 0 cannot be a message"),
        (replace(ANSWER, messages=[{"role": "user", "content": "\ud800"}]), "answer 0 cannot be a message"),
        (replace(ANSWER, messages=[{"n": 2**70}]), "answer 0 cannot be a message"),
        (replace(ANSWER, snapshot="\ud800"), "answer 0 cannot be a message"),
        (replace(ANSWER, snapshot=bytes(3000)), r"with its snapshot, expected at most 2000 \(buffer.turn_max_kb\)"),
    ],
)
def test_what_no_message_can_carry_is_named(record: Recorded, message: str) -> None:
    with pytest.raises(Unrecordable, match=message):
        encode_turn(ID, 0, record, 2000)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (sample(0, [], stop_reason="abort"), "interrupted before its first token"),
        (sample(0, [-1]), "negative id"),
        (sample(0, [1], [-1]), "versions holds a negative"),
        (replace(sample(0, [1]), logprobs=np.array([np.nan], np.float32)), "not a log-probability"),
        (replace(sample(0, [1]), logprobs=np.array([1.0], np.float32)), "not a log-probability"),
        (replace(sample(0, [1]), logprobs=np.zeros(2, np.float32)), "1 token_ids, 2 logprobs"),
        (replace(INTENT, kept=KeptIds(np.array([1], np.uint16), np.array([5], np.int32))), "kept has 1 counts"),
        (replace(INTENT, prompt="ab"), "of length >= 32"),
        (replace(INTENT, generate_s=-1.0), "cannot be read"),
        (replace(INTENT, number=-1), "cannot be read"),
        (replace(ANSWER, number=1 << 17), "cannot be read"),
        (replace(ANSWER, state=b"x" * 65), "state has 65 bytes"),
        (replace(ANSWER, calls=[("t", -1.0)]), "negative seconds"),
    ],
)
def test_what_no_actor_sends_is_refused(record: Recorded, message: str) -> None:
    with pytest.raises(WireError, match=message):
        decode_turn(encode_turn(ID, 0, record))


def test_snapshots_belong_to_answers_and_sizes_are_bounded() -> None:
    with pytest.raises(WireError, match="only answers have one"):
        decode_body(encode_body(INTENT), b"state")
    with pytest.raises(WireError, match="at most 10 are read"):
        decode_turn(encode_turn(ID, 0, ANSWER), 10)


def test_any_damage_is_read_or_refused() -> None:
    read = refused = 0
    for bad in mutations([[encode_turn(ID, 4, record)] for record in ALL], 20_000, seed=22):
        for frame in bad:
            try:
                _, _, stored = decode_turn(frame)
            except WireError:
                refused += 1
            else:
                assert decode_turn(encode_turn(ID, 4, stored.record))[2].record.place == stored.record.place
                read += 1
    assert read > 100
    assert refused > 10_000


def test_tickets_carry_their_turns() -> None:
    asked = messages.TicketsRequest("a", (0, 0), 4, (), 0.0)
    bare = Ticket(TicketId(0, 1, 0), 0, "train", {"id": "t"}, (0, 0), 4, 1.0, 1, 30.0, durable=True)
    tickets = [bare, replace(bare, turns=tuple(ALL)), bare, replace(bare, turns=(RESET,))]
    reply, frames = codec.ticket_reply(tickets, "")
    header = codec.encode_reply(1, reply)
    back = codec.decode_reply(asked, codec.decode_header(header), frames).tickets
    assert [len(ticket.turns) for ticket in back] == [0, 4, 0, 1]
    assert all(ticket.durable for ticket in back)
    for mine, theirs in zip(back[1].turns, ALL, strict=True):
        same(mine, theirs)
    for wrong in (frames[:-1], [*frames, frames[0]]):
        with pytest.raises(WireError, match="recorded turns came"):
            codec.decode_reply(asked, codec.decode_header(header), wrong)
    for turns in ([(1, 4), (1, 1)], [(1, 4), (4, 1)]):
        bad = codec.encode_reply(1, replace(reply, turns=turns))
        with pytest.raises(WireError, match="different places below 4"):
            codec.decode_reply(asked, codec.decode_header(bad), frames)
    good = [header, *map(bytes, frames)]
    for each in mutations([good], 2000, seed=23):
        with contextlib.suppress(WireError):
            codec.decode_reply(asked, codec.decode_header(each[0]), each[1:])
    unpacked = msgpack.unpackb(header)
    unpacked["reply"]["tickets"][0]["turns"] = [1]
    with pytest.raises(WireError):
        codec.decode_reply(asked, codec.decode_header(msgpack.packb(unpacked)), frames)
