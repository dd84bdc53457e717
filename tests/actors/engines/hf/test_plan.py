"""The parts of a prefill pass: every tail in one of them, and little padding."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from asyncrl.actors.engines.hf.plan import PART_TOKENS, prefill, widths
from asyncrl.actors.engines.hf.slots import KVSlots
from asyncrl.actors.engines.protocol import Sampling


def cost(tails: np.ndarray, chosen: np.ndarray) -> int:
    """Tokens with padding, and `PART_TOKENS` for each part."""
    return int(chosen[np.searchsorted(chosen, tails)].sum()) + PART_TOKENS * len(chosen)


@pytest.mark.parametrize("seed", range(20))
def test_no_other_widths_cost_less(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tails = rng.integers(2, rng.integers(4, 120), rng.integers(1, 30))
    lengths = np.unique(tails)[:8]
    tails = tails[np.isin(tails, lengths)]
    chosen = widths(tails)
    every = [
        np.array([*some, lengths[-1]]) for n in range(len(lengths)) for some in combinations(lengths[:-1].tolist(), n)
    ]
    assert set(chosen.tolist()) <= set(tails.tolist())
    assert cost(tails, chosen) == min(cost(tails, other) for other in every)


def test_sequences_that_are_computed_again_are_padded_little() -> None:
    """Lengths as the quickstart's under new weights: with parts up to 8, 32 and 128 tokens wide, two fifths were
    padding."""
    lengths = [*range(36, 76, 2), 90, 95, 113]
    slots = KVSlots(len(lengths), 256, 1000)
    for row, length in enumerate(lengths):
        slots.place(np.full(length, row, np.int32), Sampling(8, 1.0, (), 0))
    planned = list(prefill(slots, 256))
    assert sorted(row for plan in planned for row in plan.rows.tolist()) == list(range(len(lengths)))
    for plan in planned:
        assert plan.prefilled == slots.length[plan.rows].sum()
        assert plan.part.tokens.shape == (len(plan.rows), slots.length[plan.rows].max())
    computed = sum(plan.part.tokens.numel() for plan in planned)
    assert sum(lengths) <= computed <= 1.15 * sum(lengths)
