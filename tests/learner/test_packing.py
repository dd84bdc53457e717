from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.learner.backends.shared_prefixes import share_prefixes
from asyncrl.learner.packing import pack, row_cost


@given(st.lists(st.integers(1, 300), max_size=60), st.integers(1, 400), st.integers(1, 5))
def test_every_row_once_within_the_limit(lengths: list[int], limit: int, ranks: int) -> None:
    packed = pack(lengths, limit, ranks)
    assert sorted(i for rows in packed for i in rows) == list(range(len(lengths)))
    assert len(packed) % ranks == 0
    assert packed
    for rows in packed:
        assert rows == sorted(rows)
        assert sum(lengths[i] for i in rows) <= limit or len(rows) == 1
    assert pack(lengths, limit, ranks) == packed


@given(st.lists(st.integers(1, 100), min_size=1, max_size=60), st.integers(100, 400))
def test_few_micro_batches(lengths: list[int], limit: int) -> None:
    fewest = -(-sum(lengths) // limit)
    assert len([rows for rows in pack(lengths, limit) if rows]) <= 2 * fewest


@given(st.lists(st.tuples(st.integers(1, 300), st.integers(0, 5)), max_size=60), st.integers(1, 400), st.integers(1, 5))
def test_groups_stay_together_as_far_as_they_fit(rows: list[tuple[int, int]], limit: int, ranks: int) -> None:
    lengths, groups = [length for length, _ in rows], [group for _, group in rows]
    packed = pack(lengths, limit, ranks, groups)
    assert sorted(i for part in packed for i in part) == list(range(len(rows)))
    assert len(packed) % ranks == 0
    for part in packed:
        assert sum(lengths[i] for i in part) <= limit or len(part) == 1
    for group in set(groups):
        members = [i for i in range(len(rows)) if groups[i] == group]
        if ranks == 1 and sum(lengths[i] for i in members) <= limit:
            assert any(set(members) <= set(part) for part in packed)


def test_groups_are_parted_where_ranks_would_wait_for_each_other() -> None:
    packed = pack([100] * 32, 8192, ranks=4, groups=[i // 16 for i in range(32)])
    assert [len(part) for part in packed] == [8, 8, 8, 8]


def test_balanced() -> None:
    lengths = [80 + i % 61 for i in range(192)]
    costs = [sum(row_cost(lengths[i]) for i in rows) for rows in pack(lengths, 4096)]
    assert len(costs) == 6
    assert max(costs) / min(costs) < 1.03


@pytest.mark.parametrize(("limit", "ranks"), [(8192, 1), (16384, 1), (8192, 4)])
@pytest.mark.parametrize("seed", range(3))
def test_long_tailed_lengths_fill_micro_batches(limit: int, ranks: int, seed: int) -> None:
    """What is computed are real tokens only, and of what a pass may hold hardly anything is left empty."""
    drawn = np.random.default_rng(seed).lognormal(mean=4.6, sigma=0.9, size=4096)
    lengths = np.clip(drawn, 16, 4096).astype(int).tolist()
    packed = pack(lengths, limit, ranks)
    room = limit * len([rows for rows in packed if rows])
    assert sum(lengths) / room >= (0.97 if ranks == 1 else 0.95)
    assert len(packed) <= -(-(-(-sum(lengths) // limit) + 1) // ranks) * ranks, "as few as can be, or one more"
    token_ids = torch.arange(sum(lengths[i] for i in packed[0]))
    assert len(share_prefixes(token_ids, [lengths[i] for i in packed[0]]).computed) == len(token_ids), "no padding"


def test_a_row_longer_than_the_limit_stands_alone() -> None:
    assert [2] in pack([10, 20, 500, 3], 100)


def test_nothing_to_pack() -> None:
    assert pack([], 10) == [[]]
    assert pack([3], 10, ranks=3) == [[0], [], []]


@pytest.mark.parametrize(("lengths", "limit", "ranks"), [([1], 0, 1), ([1], 1, 0), ([0], 1, 1)])
def test_impossible(lengths: list[int], limit: int, ranks: int) -> None:
    with pytest.raises(ValueError, match=r"expected at least 1|at least one token"):
        pack(lengths, limit, ranks)
