from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from asyncrl.trajectory import CONTEXT, Row, Span, TicketId, Trajectory, TurnRecord, TurnReward


def row(versions: list[int], start: int = 0) -> Row:
    v = np.array(versions, np.int32)
    mask = v != CONTEXT
    return Row(
        token_ids=np.arange(start, start + len(v), dtype=np.int32),
        mask=mask,
        logprobs=np.where(mask, -0.5, 0.0).astype(np.float32),
        versions=v,
    )


def trajectory(*rows: Row) -> Trajectory:
    return Trajectory(
        id=TicketId(0, 7, 3), attempt=1, kind="train", actor="actor-0", task_id="t", env="lookup", rows=rows,
        reward=0.5, rewards={"success": 1.0}, turns=2, stop_reason="done",
    )  # fmt: skip


T = trajectory(row([CONTEXT, CONTEXT, 4, 5]), row([CONTEXT, 3, 6]))


def test_staleness_is_of_the_oldest_token_that_the_policy_sampled() -> None:
    assert (T.oldest_version, T.newest_version) == (3, 6)


def test_a_row_without_policy_tokens_has_no_say() -> None:
    assert trajectory(row([CONTEXT, CONTEXT]), row([8])).oldest_version == 8


def test_tokens_are_counted_over_all_rows() -> None:
    assert (T.num_tokens, T.num_policy_tokens) == (7, 4)


def test_a_record_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        T.reward = 1.0  # type: ignore[misc]


def test_the_digest_is_of_what_is_trained_on() -> None:
    same = dataclasses.replace(T, attempt=2, actor="actor-9", timings={"total": 3.0}, metrics={"calls": 2.0})
    assert T.digest() == same.digest()
    measured = dataclasses.replace(T, turn_records=(TurnRecord(0.1, 2.0, 3.0, 4, 5), TurnRecord(None, 2.0, None, 0, 1)))
    assert T.digest() == measured.digest()


@pytest.mark.parametrize(
    "other",
    [
        TurnReward(0.25, (Span(0, 2, 2),), b"hall"),
        TurnReward(0.5, (Span(0, 2, 1), Span(0, 3, 1)), b"hall"),
        TurnReward(0.5, (Span(0, 2, 2),), b"cellar"),
        TurnReward(0.5, (Span(0, 2, 2),)),
    ],
)
def test_the_digest_is_of_what_each_turn_has_earned(other: TurnReward) -> None:
    first, second = TurnReward(0.5, (Span(0, 2, 2),), b"hall", {"success": 1.0}), TurnReward(0.0, (Span(1, 1, 2),))
    earned = dataclasses.replace(T, turn_rewards=(first, second))
    without_parts = TurnReward(first.reward, first.spans, first.state)
    assert earned.digest() == dataclasses.replace(T, turn_rewards=(without_parts, second)).digest()
    others = (T.digest(), dataclasses.replace(T, turn_rewards=(other, second)).digest())
    assert earned.digest() not in others
    assert dataclasses.replace(T, turn_rewards=(second, first)).digest() != earned.digest()


@pytest.mark.parametrize(
    "changed",
    [
        {"rewards": {"success": 0.25}},  # gdpo has an advantage for each
        {"rewards": {"format": 0.5}},
        {"rewards": {}},
        {"env": "another"},  # learner.advantage_by_env
        {"stop_reason": "length"},  # what was cut off may carry no loss
        {"turns": 9},
    ],
)
def test_the_digest_sees_what_estimators_and_filters_read(changed: dict[str, Any]) -> None:
    named = dataclasses.replace(T, rewards={"success": 0.5})
    assert dataclasses.replace(named, **changed).digest() != named.digest()


def test_the_order_of_named_rewards_changes_no_digest() -> None:
    one, other = ({"a": 0.5, "b": 1.0}, {"b": 1.0, "a": 0.5})
    assert dataclasses.replace(T, rewards=one).digest() == dataclasses.replace(T, rewards=other).digest()


def test_a_turn_record_is_frozen() -> None:
    with pytest.raises(AttributeError):
        TurnRecord(None, 1.0, None, 0, 1).generate = 2.0  # type: ignore[misc]


@pytest.mark.parametrize("name", ["token_ids", "mask", "logprobs", "versions"])
def test_the_digest_sees_every_array(name: str) -> None:
    array = getattr(T.rows[1], name).copy()
    array[-1] = not array[-1] if name == "mask" else array[-1] + 1
    changed = dataclasses.replace(T, rows=(T.rows[0], dataclasses.replace(T.rows[1], **{name: array})))
    assert T.digest() != changed.digest()


def test_the_digest_sees_identity_reward_and_where_rows_end() -> None:
    whole = trajectory(row([1, 1, 1, 1]))
    cut = trajectory(row([1, 1]), row([1, 1], start=2))
    others = [
        dataclasses.replace(T, id=TicketId(0, 7, 4)),
        dataclasses.replace(T, reward=np.nextafter(0.5, 1.0)),
        whole,
    ]
    assert len({t.digest() for t in (T, *others, cut)}) == 5
