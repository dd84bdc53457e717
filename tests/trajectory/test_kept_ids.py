"""Kept ids: their record, what is refused of it, and how they travel."""

from __future__ import annotations

from typing import Any

import msgpack
import numpy as np
import pytest

from asyncrl.buffer.record import from_record, to_record
from asyncrl.trajectory import CONTEXT, Row, TicketId, Trajectory
from asyncrl.trajectory.kept_ids import MAX_KEPT, KeptIds, joined, kept_ids
from asyncrl.wire import (
    WireError,
    decode_trajectory,
    encode_trajectory,
)
from tests.buffer.fuzzing import mutations


def of(counts: list[int], ids: list[int]) -> KeptIds:
    return KeptIds(np.array(counts, np.uint16), np.array(ids, np.int32))


def a_row(kept: KeptIds | None) -> Row:
    """Two tokens of context, then 3, 9, 5 sampled."""
    mask = np.array([False, False, True, True, True])
    return Row(
        np.array([1, 2, 3, 9, 5], np.int32),
        mask,
        np.where(mask, np.float32(-0.5), np.float32(0)),
        np.where(mask, 4, CONTEXT).astype(np.int32),
        kept,
    )


GOOD = of([2, 0, 3], [3, 17, 4, 5, 212])


def a_trajectory(*rows: Row) -> Trajectory:
    return Trajectory(TicketId(0, 1, 2), 0, "train", "a", "t", "e", rows, 1.0, {}, 1, "done")


def frames(t: Trajectory) -> list[bytes]:
    return [bytes(frame) for frame in encode_trajectory(t)]


def test_they_come_back_and_are_in_the_digest() -> None:
    t = a_trajectory(a_row(GOOD), a_row(of([0, 1, 0], [9])))
    back = from_record(to_record(t))
    assert back.digest() == t.digest() == decode_trajectory(frames(t)).digest()
    kept = back.rows[0].kept
    assert kept is not None
    assert kept.counts.tolist() == [2, 0, 3]
    assert kept.ids.tolist() == [3, 17, 4, 5, 212]
    assert not kept.ids.flags.writeable
    other = a_trajectory(a_row(of([2, 0, 3], [3, 18, 4, 5, 212])), t.rows[1])
    assert other.digest() != t.digest()


def test_without_them_nothing_changes_by_a_bit() -> None:
    """The digest and the bytes of a record, are those of rows without kept ids."""
    t = a_trajectory(a_row(None))
    assert t.digest() == "8e8fbb5303e2d97b93fd3b2b013d6936"
    assert len(frames(t)) == 5
    assert "kept" not in msgpack.unpackb(frames(t)[0])


@pytest.mark.parametrize(
    ("kept", "says"),
    [
        (of([2, 0, 3], [4, 17, 4, 5, 212]), "no id of the sampled token itself"),
        (of([2, 0, 3], [3, 17, 4, 6, 212]), "no id of the sampled token itself"),
        (of([2, 0, 3], [3, 17, 5, 4, 212]), "do not ascend"),
        (of([2, 0, 3], [3, 3, 4, 5, 212]), "do not ascend"),
        (of([2, 0, 3], [-3, 3, 4, 5, 212]), "negative"),
        (of([2, 0, 2], [3, 17, 4, 5, 212]), "counts add up to 4"),
        (of([2, 3], [3, 17, 4, 5, 212]), "2 counts, expected one for each of 3"),
        (of([MAX_KEPT + 1, 0, 0], list(range(MAX_KEPT + 1))), f"at most {MAX_KEPT}"),
    ],
)
def test_impossible_ones_are_refused_with_the_reason(kept: KeptIds, says: str) -> None:
    with pytest.raises(WireError, match=rf"rows\[0\]\.kept .*{says}"):
        decode_trajectory(frames(a_trajectory(a_row(kept))))


def test_rows_with_and_without_them_do_not_mix() -> None:
    with pytest.raises(ValueError, match="some rows have kept ids"):
        encode_trajectory(a_trajectory(a_row(GOOD), a_row(None)))


def test_damaged_bytes_are_refused_or_are_a_record() -> None:
    whole = a_trajectory(a_row(GOOD), a_row(of([1, 1, 1], [3, 9, 5])))
    taken = 0
    for damaged in mutations([frames(whole)], 20_000, seed=5):
        try:
            back = decode_trajectory(damaged)
        except WireError:
            continue
        taken += 1
        assert decode_trajectory(frames(back)).digest() == back.digest()
        for row in back.rows:
            assert row.kept is None or row.kept.problem(row.token_ids[row.mask]) == ""
    assert taken > 100


def test_a_set_larger_than_the_limit_is_not_recorded() -> None:
    kept = kept_ids([[7, 2], [1, 2, 3], np.array([5], np.int32)], 2)
    assert kept.counts.tolist() == [2, 0, 1]
    assert kept.ids.tolist() == [2, 7, 5]
    assert joined([kept.first(1), kept]).counts.tolist() == [2, 2, 0, 1]


@pytest.mark.parametrize("seed", range(20))
def test_sorting_all_tokens_at_once_gives_what_sorting_each_gives(seed: int) -> None:
    rng = np.random.default_rng(seed)
    most = int(rng.integers(0, 9))
    sets: list[Any] = [rng.choice(50, int(n), replace=False) for n in rng.integers(0, 12, int(rng.integers(0, 30)))]
    for kept in sets[:1]:
        kept[:1] = [(-(2**31), -1, 2**31 - 1)[seed % 3]]  # no ids, and sorted all the same
    if seed % 2:
        sets = [np.sort(kept) for kept in sets]
    sets = [kept.tolist() if rng.random() < 0.5 else kept for kept in sets]
    made = kept_ids(sets, most)
    each = [sorted(kept) if len(kept) <= most else [] for kept in sets]
    assert made.counts.tolist() == [len(kept) for kept in each]
    assert made.ids.tolist() == [i for kept in each for i in kept]
    assert [str(made.counts.dtype), str(made.ids.dtype)] == ["uint16", "int32"]
