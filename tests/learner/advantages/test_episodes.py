from __future__ import annotations

import numpy as np
import pytest
import torch

from asyncrl.learner.advantages.episodes import trajectory_weights
from asyncrl.learner.batch import flatten
from tests.learner.tiny import random_trajectory


def test_the_weight_of_a_trajectory_is_the_mean_over_its_tokens_that_carry_loss() -> None:
    rng = np.random.default_rng(0)
    trajectories = [random_trajectory(g, i, rng, rows=1 + i, versions=(0, 2)) for g in (7, 3) for i in range(2)]
    batch = flatten(trajectories[::-1], groups=(7, 3), mask_before=1)
    token_weights = torch.rand(len(batch.mask))
    found = trajectory_weights(token_weights, batch, (7, 3))
    assert list(found) == [7, 3]
    start = 0
    for t in trajectories:
        length = t.num_tokens
        carries = np.concatenate([row.mask & (row.versions >= 1) for row in t.rows])
        expected = token_weights[start : start + length][torch.from_numpy(carries)].mean()
        assert found[t.id.group][t.id.index] == pytest.approx(float(expected), abs=1e-5)
        start += length
