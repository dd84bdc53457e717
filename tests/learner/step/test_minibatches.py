"""Which groups an update of a step gets."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from asyncrl.learner.batch import Batch, flatten
from asyncrl.learner.step.micro_batches import minibatches
from tests.learner.tiny import random_trajectory


def a_batch(groups: int, replayed: Mapping[int, float]) -> Batch:
    """Groups of two episodes, of one row and of two."""
    rng = np.random.default_rng(0)
    made = [random_trajectory(g, i, rng, rows=1 + i) for g in range(groups) for i in range(2)]
    return flatten(made, range(groups), loss_weights=replayed)


def shares(batch: Batch, count: int) -> list[list[int]]:
    """Groups of each update, once per row."""
    return [batch.groups[row_ids].tolist() for row_ids in minibatches(batch, count)]


@pytest.mark.parametrize(
    ("replayed", "count", "expected"),
    [
        ((0, 1), 2, [[0, 2, 3], [1, 4, 5]]),
        ((0, 3), 2, [[0, 1, 2], [3, 4, 5]]),
        ((0, 1), 4, [[0, 2], [1, 3], [4], [5]]),
        ((0,), 1, [[0, 1, 2, 3, 4, 5]]),
        ((), 2, [[0, 1, 2], [3, 4, 5]]),
    ],
)
def test_each_update_gets_its_share_of_the_new_and_of_the_replayed_groups(
    replayed: tuple[int, ...], count: int, expected: list[list[int]]
) -> None:
    """Replayed groups have the smaller numbers; a contiguous cut would put them all into the first update."""
    batch = a_batch(6, dict.fromkeys(replayed, 1.0))
    assert shares(batch, count) == [[g for g in groups for _ in range(3)] for groups in expected]


def test_without_replayed_groups_the_cut_is_contiguous() -> None:
    for count in range(1, 6):
        places = [place.tolist() for place in np.array_split(np.arange(4), count) if len(place)]
        assert shares(a_batch(4, {}), count) == [[g for g in of_one for _ in range(3)] for of_one in places]


def test_the_rows_of_a_replayed_group_say_so() -> None:
    """Also where its factor is 1, and among rows that are taken out of the batch."""
    batch = a_batch(3, {0: 1.0, 2: 0.5})
    assert batch.replayed.tolist() == [True] * 3 + [False] * 3 + [True] * 3
    assert batch.take((batch.groups > 0).nonzero()[:, 0]).replayed.tolist() == [False] * 3 + [True] * 3
