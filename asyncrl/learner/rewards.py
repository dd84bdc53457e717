"""The rewards that a step trains on: as the environments gave them, shaped as `learner.shaping` says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from asyncrl.learner.advantages.returns import steps_of
from asyncrl.learner.batch import Batch
from asyncrl.learner.objective.choice import Chosen
from asyncrl.learner.objective.shaping import pf_ppo_draws
from asyncrl.learner.ragged import row_sum, segment_sum, spread, unit_ids

OF_EPISODES = ("rewards", "tokens", "output_tokens", "input_tokens", "turns", "truncated", "groups")
"""Inputs of a shaping function, each [E]: what it has parameters for is passed."""


def shaped(batch: Batch, shaping: Sequence[Chosen]) -> Batch:
    """The batch with each episode's reward shaped by one function after another, and paid where it was."""
    if not shaping:
        return batch
    index, count = unit_ids(batch.lengths, batch.episodes)
    known = _of_episodes(batch, index, count)
    for one in shaping:
        known["rewards"] = one(known)
    steps = steps_of(batch.sampled, batch.lengths, batch.episodes)
    last = steps.token[steps.last]
    episode_of_token = spread(index, batch.lengths, len(batch.token_ids))
    paid = torch.zeros_like(batch.rewards)
    paid[last] = known["rewards"][episode_of_token[last]].to(paid.dtype)
    return replace(batch, rewards=paid)


def drawn(batch: Batch, *, method: Any, power: float, generator: torch.Generator) -> Batch:
    """The batch with each episode weighing in the loss as often as PF-PPO drew it."""
    index, count = unit_ids(batch.lengths, batch.episodes)
    rewards = _of_episodes(batch, index, count)["rewards"]
    draws = pf_ppo_draws(rewards, method=method, power=power, generator=generator)
    return replace(batch, loss_weights=batch.loss_weights * draws[index])


def _of_episodes(batch: Batch, index: Tensor, count: int) -> dict[str, Tensor]:
    def total(per_token: Tensor) -> Tensor:
        return segment_sum(row_sum(per_token, batch.lengths), index, count)

    def of_rows(per_row: Tensor) -> Tensor:
        return torch.zeros(count, dtype=per_row.dtype).scatter(0, index, per_row)

    tokens = total(batch.sampled.long())
    return {
        "rewards": total(batch.rewards),
        "tokens": tokens,
        "output_tokens": tokens,
        "input_tokens": total((~batch.sampled).long()),
        "turns": of_rows(batch.turns),
        "truncated": of_rows(batch.truncated),
        "groups": of_rows(batch.groups),
    }
