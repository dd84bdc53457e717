"""A made-up batch on which an objective is tried before anything starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from asyncrl.learner.batch import Batch
from asyncrl.learner.ragged import masked
from asyncrl.trajectory import CONTEXT


def made_up(advantage_options: Mapping[str, Any], greedy_baseline: bool = False, env: str = "") -> Batch:
    """Two groups of two one-row episodes of environment `env`, with as many named rewards as the options weigh; the
    first of each group may be the greedy one."""
    weights = advantage_options.get("weights")
    names = tuple(weights) if isinstance(weights, (Mapping, list, tuple)) else ("reward",)
    mask = torch.tensor([False, True, True] * 4)
    ids = torch.zeros(12, dtype=torch.long)
    greedy = torch.tensor([greedy_baseline, False] * 2)
    rewards = torch.zeros(12)
    rewards[[2, 8]] = 1.0
    return Batch(
        token_ids=ids,
        mask=mask & ~greedy.repeat_interleave(3),
        behaviour=masked(torch.linspace(-1.0, -0.5, 12), mask),
        versions=ids.masked_fill(~mask, CONTEXT),
        rewards=rewards,
        turn_of=torch.tensor([-1, 0, 1] * 4, dtype=torch.int32),
        turn_rewards=rewards,
        states=torch.tensor([-1, 0, 1, -1, 0, 2] * 2, dtype=torch.int32),
        reward_components=rewards.expand(len(names), -1),
        reward_names=names,
        lengths=torch.tensor([3, 3, 3, 3]),
        groups=torch.tensor([0, 0, 1, 1]),
        episodes=torch.arange(4),
        row_weights=torch.ones(4),
        loss_weights=torch.ones(4),
        replayed=torch.zeros(4, dtype=torch.bool),
        turns=torch.ones(4, dtype=torch.long),
        truncated=torch.zeros(4, dtype=torch.bool),
        greedy=greedy,
        envs=torch.zeros(4, dtype=torch.long),
        env_names=(env,),
    )
