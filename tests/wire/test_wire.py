"""What was encoded comes back; what was changed on the way is taken for what it says or refused, and never crashes."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import msgpack
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from asyncrl.trajectory import (
    CONTEXT,
    MAX_TURNS_RECORDED,
    Row,
    Span,
    TicketId,
    Trajectory,
    TurnRecord,
    TurnReward,
)
from asyncrl.wire import WireError, decode_trajectory, encode_trajectory, pack, unpack

NUMBERS = st.floats(allow_nan=False, allow_infinity=False, width=64)
COUNTS = st.integers(0, 2**40)
NAMED = st.dictionaries(st.text(max_size=8), NUMBERS, max_size=3)
SECONDS = st.floats(0, allow_nan=False, allow_infinity=False)
TURN_RECORDS = st.builds(TurnRecord, st.none() | SECONDS, SECONDS, st.none() | SECONDS, COUNTS, COUNTS)
ATTEMPTS = st.integers(0, 2**31 - 1)
IDS = st.builds(TicketId, ATTEMPTS, st.integers(0, 2**41 - 1), st.integers(0, 2**20 - 1))


@st.composite
def rows(draw: st.DrawFn) -> Row:
    n = draw(st.integers(1, 12))
    mask = np.array(draw(st.lists(st.booleans(), min_size=n, max_size=n)))
    versions = np.array(draw(st.lists(st.integers(0, 2**31 - 1), min_size=n, max_size=n)), np.int64)
    logprobs = draw(st.lists(st.floats(-100, 0, width=32), min_size=n, max_size=n))
    return Row(
        token_ids=np.array(draw(st.lists(st.integers(0, 2**31 - 1), min_size=n, max_size=n)), np.int32),
        mask=mask,
        logprobs=np.where(mask, np.array(logprobs, np.float32), np.float32(0)),
        versions=np.where(mask, versions, CONTEXT).astype(np.int32),
    )


@st.composite
def turn_rewards(draw: st.DrawFn, several: list[Row], turns: int) -> tuple[TurnReward, ...]:
    """Each run of sampled tokens, cut anywhere, belongs to the turn before or to a later one, row by row."""
    spans: list[list[Span]] = [[] for _ in range(turns)]
    for place, row in enumerate(several):
        turn = 0
        for start in np.flatnonzero(row.mask).tolist():
            turn = draw(st.integers(turn, turns - 1))
            last = spans[turn][-1] if spans[turn] else None
            if last is not None and (last.row, last.start + last.tokens) == (place, start):
                spans[turn][-1] = Span(place, last.start, last.tokens + 1)
            else:
                spans[turn].append(Span(place, start, 1))
    rewards = draw(st.lists(st.floats(-1e6, 1e6), min_size=turns, max_size=turns))
    states = draw(st.lists(st.none() | st.binary(max_size=64), min_size=turns, max_size=turns))
    parts = draw(st.lists(NAMED, min_size=turns, max_size=turns))
    return tuple(TurnReward(r, tuple(s), k, p) for r, s, k, p in zip(rewards, spans, states, parts, strict=True))


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    several = draw(st.lists(rows(), min_size=1, max_size=3).filter(lambda rs: any(r.mask.any() for r in rs)))
    records = tuple(draw(st.lists(TURN_RECORDS, max_size=4)))
    earned = draw(turn_rewards(several, len(records))) if records and draw(st.booleans()) else ()
    return Trajectory(
        id=draw(IDS),
        attempt=draw(ATTEMPTS),
        kind=draw(st.sampled_from(["train", "eval"])),
        actor=draw(st.text(max_size=8)),
        task_id=draw(st.text(max_size=8)),
        env=draw(st.text(max_size=8)),
        rows=tuple(several),
        reward=sum(turn.reward for turn in earned) if earned else draw(st.floats(-1e20, 1e20)),
        rewards=draw(NAMED),
        turns=len(records) or draw(st.integers(0, 2**31 - 1)),
        stop_reason=draw(st.sampled_from(["done", "max_turns", "max_tokens", "length", "aborted"])),
        timings=draw(NAMED),
        metrics=draw(NAMED),
        turn_records=records,
        turn_rewards=earned,
    )


def on_the_wire(t: Trajectory) -> list[bytes]:
    return [bytes(frame) for frame in encode_trajectory(t)]


def same(a: Trajectory, b: Trajectory) -> bool:
    plain = ("id", "attempt", "kind", "actor", "task_id", "env", "reward", "rewards", "turns", "stop_reason", "timings",
             "metrics", "turn_records", "turn_rewards")  # fmt: skip
    return all(getattr(a, f) == getattr(b, f) for f in plain) and a.digest() == b.digest()


@settings(deadline=None, max_examples=60)
@given(trajectories())
def test_a_trajectory_comes_back(t: Trajectory) -> None:
    back = decode_trajectory(on_the_wire(t))
    assert same(t, back)
    for row in back.rows:
        assert (row.token_ids.dtype, row.mask.dtype, row.logprobs.dtype, row.versions.dtype) == (
            np.int32, np.bool_, np.float32, np.int32,
        )  # fmt: skip


@settings(deadline=None, max_examples=40)
@given(trajectories())
def test_decoding_copies_nothing_and_gives_read_only_arrays(t: Trajectory) -> None:
    frames = on_the_wire(t)
    token_ids = decode_trajectory(frames).rows[0].token_ids
    assert np.shares_memory(token_ids, np.frombuffer(frames[1], np.int32))
    with pytest.raises(ValueError, match="read-only"):
        token_ids[0] = 1


@settings(deadline=None, max_examples=150)
@given(trajectories(), st.data())
def test_bytes_changed_on_the_way_never_crash(t: Trajectory, data: st.DataObject) -> None:
    frames = [bytearray(frame) for frame in on_the_wire(t)]
    for _ in range(data.draw(st.integers(1, 4))):
        frame = frames[data.draw(st.integers(0, len(frames) - 1))]
        if frame:
            frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    try:
        back = decode_trajectory([bytes(frame) for frame in frames])
    except WireError:
        return
    # What was let through is a record: it goes out and comes back as itself.
    assert same(back, decode_trajectory(on_the_wire(back)))
    assert back.oldest_version >= 0


@settings(deadline=None, max_examples=60)
@given(trajectories(), st.data())
def test_frames_lost_cut_or_added_are_refused(t: Trajectory, data: st.DataObject) -> None:
    frames = on_the_wire(t)
    at = data.draw(st.integers(0, len(frames) - 1))
    change = data.draw(st.sampled_from(["lose", "cut", "grow", "add"]))
    if change == "lose":
        del frames[at]
    elif change == "cut":
        frames[at] = frames[at][:-1]
    elif change == "grow":
        frames[at] += b"\x01"
    else:
        frames.insert(at, b"\x00\x00\x00\x00")
    with pytest.raises(WireError):
        decode_trajectory(frames)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@settings(deadline=None, max_examples=200)
@given(trajectories(), st.data())
def test_any_value_in_any_field_is_taken_or_refused(t: Trajectory, data: st.DataObject) -> None:
    frames = on_the_wire(t)
    header = unpack(frames[0])
    header[data.draw(st.sampled_from(sorted(header)))] = data.draw(JSON)
    frames[0] = pack(header)
    with contextlib.suppress(WireError):
        decode_trajectory(frames)


@settings(deadline=None, max_examples=200)
@given(st.lists(st.binary(max_size=40), max_size=6))
def test_noise_is_refused(frames: list[bytes]) -> None:
    with pytest.raises(WireError):
        decode_trajectory(frames)


def one(**fields: Any) -> list[bytes]:
    """A valid trajectory of one row of two tokens, with header fields or arrays replaced."""
    arrays = {
        "token_ids": np.array([5, 6], np.int32),
        "mask": np.array([0, 1], np.uint8),
        "logprobs": np.array([0.0, -1.0], np.float32),
        "versions": np.array([CONTEXT, 3], np.int32),
    }
    header = {
        "id": [0, 1, 2], "attempt": 0, "kind": "train", "actor": "a", "task_id": "t", "env": "e", "lengths": [2],
        "reward": 1.0, "rewards": {}, "turns": 1, "stop_reason": "done", "timings": {}, "metrics": {},
    }  # fmt: skip
    for name, value in fields.items():
        (arrays if name in arrays else header)[name] = value
    return [pack(header), *(array.tobytes() for array in arrays.values())]


def test_the_record_of_the_next_test_is_valid() -> None:
    assert decode_trajectory(one()).oldest_version == 3


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"reward": float("nan")}, "reward"),
        ({"reward": float("inf")}, "reward"),
        ({"reward": 1e31}, "reward"),
        ({"reward": True}, "reward"),
        ({"rewards": {"x": float("nan")}}, "rewards.x"),
        ({"attempt": -1}, "attempt"),
        ({"turns": 2**62}, "turns"),
        ({"kind": "test"}, "kind"),
        ({"kind": ["train"]}, "kind"),
        ({"stop_reason": "bored"}, "stop_reason"),
        ({"id": [0, 1]}, "id"),
        ({"id": [0, 1, -2]}, "id"),
        ({"actor": "a" * 2000}, "actor"),
        ({"lengths": [3]}, "token_ids"),
        ({"lengths": []}, "lengths"),
        ({"lengths": [0]}, "lengths"),
        ({"lengths": [1] * 5000}, "lengths"),
        ({"token_ids": np.array([5, -6], np.int32)}, "token_ids"),
        ({"mask": np.array([0, 2], np.uint8)}, "mask"),
        ({"mask": np.array([0, 0], np.uint8), "versions": np.array([-1, -1], np.int32)}, "sampled"),
        ({"logprobs": np.array([0.0, np.nan], np.float32)}, "logprobs"),
        ({"logprobs": np.array([0.0, -np.inf], np.float32)}, "logprobs"),
        ({"logprobs": np.array([0.0, 0.5], np.float32)}, "logprobs"),
        ({"versions": np.array([CONTEXT, -1], np.int32)}, "versions"),
        ({"turn_records": [[None, 1.0, None, 2, 3]] * 2}, "turn_records has 2 entries, expected one per turn: 1"),
        ({"turn_records": [[None, 1.0, None, 2, 3]], "turns": 2}, "turn_records"),
        ({"turn_records": [[None, 1.0, None, 2, 3]], "turns": 0}, "turn_records"),
        ({"turn_records": [[None, None, None, 2, 3]]}, "turn_records"),
        ({"turn_records": [[float("nan"), 1.0, None, 2, 3]]}, "turn_records"),
        ({"turn_records": [[None, float("nan"), None, 2, 3]]}, "turn_records"),
        ({"turn_records": [[None, 1.0, float("inf"), 2, 3]]}, "turn_records"),
        ({"turn_records": [[None, -1e-9, None, 2, 3]]}, "turn_records"),
        ({"turn_records": [[None, 1.0, None, -2, 3]]}, "turn_records"),
        ({"turn_records": [[None, 1.0, None, 2, 0.5]]}, "turn_records"),
        ({"turn_records": [[None, 1.0, None, 2, 2**63]]}, "turn_records"),
        ({"turn_records": [[None, 1.0, None, 2]]}, "turn_records"),
        ({"turn_records": [{"generate": 1.0}]}, "turn_records"),
        ({"turn_records": None}, "turn_records"),
        (
            {"turn_records": [[None, 1.0, None, 2, 3]] * (MAX_TURNS_RECORDED + 1), "turns": MAX_TURNS_RECORDED + 1},
            "length",
        ),
        ({"versions": np.array([3, 3], np.int32)}, "versions"),
        ({"turn_rewards": [[1.0, [[0, 1, 1]], None, {}]] * 2}, "turn_rewards has 2 entries, expected one per turn: 1"),
        ({"turn_rewards": [[1.0, [[0, 1, 1]], None, {}]], "turns": 2}, "turn_rewards has 1 entries"),
        ({"turn_rewards": None}, "turn_rewards"),
        ({"turn_rewards": [[1.0]]}, "turn_rewards"),
        ({"turn_rewards": [{"reward": 1.0}]}, "turn_rewards"),
        ({"turn_rewards": [[float("nan"), [[0, 1, 1]], None, {}]]}, "turn_rewards"),
        ({"turn_rewards": [[float("inf"), [[0, 1, 1]], None, {}]]}, "turn_rewards"),
        ({"turn_rewards": [[True, [[0, 1, 1]], None, {}]]}, "turn_rewards"),
        ({"turn_rewards": [[0.5, [[0, 1, 1]], None, {}]]}, "sum to 0.5, and reward is 1.0"),
        ({"turn_rewards": [[1e308, [[0, 1, 1]]], [1e308, []], [-1e308, []]], "turns": 3}, "turn_rewards sum to"),
        ({"turn_rewards": [[1.0, [], None, {}]]}, "not those of rows.0. that the policy sampled"),
        ({"turn_rewards": [[1.0, [[0, 0, 2]], None, {}]]}, "not those of rows.0. that the policy sampled"),
        ({"turn_rewards": [[1.0, [[0, 1, 2]], None, {}]]}, "outside of its row"),
        ({"turn_rewards": [[1.0, [[1, 1, 1]], None, {}]]}, "outside of its row"),
        ({"turn_rewards": [[1.0, [[0, 2**63 - 1, 2**63 - 1]], None, {}]]}, "outside of its row"),
        ({"turn_rewards": [[1.0, [[0, 1, 1], [0, 1, 1]], None, {}]]}, "not behind the span before"),
        ({"turn_rewards": [[1.0, [[0, -1, 1]], None, {}]]}, "turn_rewards"),
        ({"turn_rewards": [[1.0, [[0, 1, 0]], None, {}]]}, "turn_rewards"),
        ({"turn_rewards": [[1.0, [[0, 1, 2**63]], None, {}]]}, "turn_rewards"),
        ({"turn_rewards": [[1.0, [[0, 1]], None, {}]]}, "turn_rewards"),
        ({"turn_rewards": [[1.0, [[0, 1, 1]], b"k" * 65, {}]]}, "turn_rewards"),
        ({"turn_rewards": [[1.0, [[0, 1, 1]], "kitchen", {}]]}, "turn_rewards"),
        ({"turn_rewards": [[1.0, [[0, 1, 1]], None, {"x": float("nan")}]]}, "turn_rewards"),
        ({"turn_rewards": [[1.0, [[0, 1, 1]], None, {f"x{i}": 0.0 for i in range(1025)}]]}, "turn_rewards"),
    ],
)
def test_an_impossible_record_is_refused_with_the_field_named(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(WireError, match=named):
        decode_trajectory(one(**fields))


def test_a_record_of_later_code_is_read_and_one_of_earlier_code_gets_the_defaults() -> None:
    """How the reward of a turn, its state key or its actor will come in without a change of what is stored."""

    class Later(TurnRecord, frozen=True, array_like=True, gc=False):
        reward: float | None = None
        key: bytes = b""

    later = msgspec.to_builtins(Later(0.5, 1.0, 2.0, 3, 4, reward=0.25, key=b"k" * 64), builtin_types=(bytes,))
    (read,) = decode_trajectory(one(turn_records=[later])).turn_records
    assert read == TurnRecord(0.5, 1.0, 2.0, 3, 4)
    earlier = msgspec.msgpack.encode(TurnRecord(0.5, 1.0, 2.0, 3, 4))
    assert msgspec.msgpack.decode(earlier, type=Later) == Later(0.5, 1.0, 2.0, 3, 4)


def test_a_record_that_was_made_before_turns_had_rewards_is_read() -> None:
    t = decode_trajectory(one(turn_rewards=[[1.0, [[0, 1, 1]], b"k" * 64, {"x": 0.5}]]))
    assert t.turn_rewards == (TurnReward(1.0, (Span(0, 1, 1),), b"k" * 64, {"x": 0.5}),)
    before = decode_trajectory(one())
    assert before.turn_rewards == ()
    assert (
        before.digest() == "ad9be0b6bbe83adc8f8ee248f9798c6a"
    )  # as every asyncrl of this ledger's version computes it
    assert before.digest() != t.digest()


def test_parts_of_rewards_that_no_header_could_hold_are_left_out() -> None:
    """The episode is kept, and its digest is the same."""
    t = decode_trajectory(one(turn_rewards=[[1.0, [[0, 1, 1]], None, {}]]))
    parts = {"part" * 200 + str(i): 0.5 for i in range(1000)}
    many = dataclasses.replace(
        t, turns=40, turn_rewards=(replace(t.turn_rewards[0], rewards=parts), *[TurnReward(0.0, (), None, parts)] * 39)
    )
    back = decode_trajectory(on_the_wire(many))
    assert [turn.rewards for turn in back.turn_rewards] == [{}] * 40
    assert back.digest() == many.digest()


def test_an_episode_with_all_turns_that_are_recorded_has_room() -> None:
    t = decode_trajectory(one(turn_rewards=[[1.0, [[0, 1, 1]], None, {}]], reward=1.0))
    rest = [TurnReward(0.0, (), bytes(64))] * (MAX_TURNS_RECORDED - 1)
    records = (TurnRecord(1.5, 1.5, 1.5, 2**62, 2**62),) * MAX_TURNS_RECORDED
    full = dataclasses.replace(
        t, turns=MAX_TURNS_RECORDED, turn_rewards=(t.turn_rewards[0], *rest), turn_records=records
    )
    assert same(decode_trajectory(on_the_wire(full)), full)
    more = dataclasses.replace(
        full, turns=MAX_TURNS_RECORDED + 1, turn_rewards=(*full.turn_rewards, TurnReward(0.0, ()))
    )
    more = dataclasses.replace(more, turn_records=())
    back = decode_trajectory(on_the_wire(more))
    assert (back.turn_rewards, back.digest()) == ((), more.digest())


def test_turn_records_take_few_bytes() -> None:
    t = decode_trajectory(one(turns=20, turn_records=[[0.01, 1.5, 0.25, 300, 40]] * 20))
    bare = dataclasses.replace(t, turn_records=())
    assert (len(on_the_wire(t)[0]) - len(on_the_wire(bare)[0])) / 20 < 36


def test_an_episode_of_more_turns_than_are_recorded_is_kept() -> None:
    t = decode_trajectory(one(turns=MAX_TURNS_RECORDED + 1))
    long = dataclasses.replace(t, turn_records=(TurnRecord(None, 1.0, None, 2, 3),) * (MAX_TURNS_RECORDED + 1))
    assert same(decode_trajectory(on_the_wire(long)), t)


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1",
        msgpack.packb([1, 2]),
        msgpack.packb({1: 2}),
        msgpack.packb({"a": 1}) + b"\x00",
        b"\x91" * 5000,
        b"\x81\xa1a\xc1",
        b"\xde\xff\xff",
        b"\x81\xa1\xff\x00",
        b"\x00" * (5 << 20),
    ],
)
def test_a_header_that_is_none_is_refused(frame: bytes) -> None:
    with pytest.raises(WireError):
        unpack(frame)
