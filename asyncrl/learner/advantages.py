"""Advantage estimators: the table, and those that compare an episode's reward with its group's.

Every function takes `(rewards[T], mask[T], lengths[B], groups[B], values=None, episodes=None, **options)` and returns
`Advantages`. R is an episode's reward (the sum over all its rows), G the size of its group. All tokens of all rows of
an episode share one advantage A. Two rules hold unless an option says otherwise: a group of one has A = 0
(`singleton: reward` gives A = R), and a group whose rewards are all equal has exactly 0 (before any whitening over the
batch). Estimators with a value per token are in `returns.py` and `token_baseline.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from asyncrl.learner.episodes import Advantages, Episodes, gather, on_tokens

__all__ = ["ESTIMATORS", "Advantages"]

Singleton = Literal["zero", "reward"]


def grpo(
    rewards: Tensor,
    mask: Tensor,
    lengths: Tensor,
    groups: Tensor,
    values: Tensor | None = None,
    episodes: Tensor | None = None,
    *,
    eps: float = 1e-6,
    scale_by_std: bool = True,
    variant: Literal["group", "leave_one_out_mean", "leave_one_out", "batch_std"] = "group",
    singleton: Singleton = "zero",
) -> Advantages:
    """GRPO (2402.03300): A = (R - mean) / (std + eps), std with Bessel's correction, eps outside the root.

    `variant`: `group` (verl, SkyRL; TRL with eps 1e-4); `leave_one_out_mean`: the mean of the others, the std of all
    (PipelineRL, eps 1e-4); `leave_one_out`: mean and std of the others, divided only where that std is above 0 (NeMo);
    `batch_std`: the std over all episodes of the batch (TRL `scale_rewards: batch`).
    """
    e = gather("grpo", rewards, mask, lengths, groups, episodes)
    return _advantages(_grpo(e, e.reward, eps, scale_by_std, variant), e, mask, lengths, singleton)


def dr_grpo(
    rewards: Tensor,
    mask: Tensor,
    lengths: Tensor,
    groups: Tensor,
    values: Tensor | None = None,
    episodes: Tensor | None = None,
    *,
    singleton: Singleton = "zero",
) -> Advantages:
    """Dr.GRPO (2503.20783): A = R - mean; no division by the std, which favours easy and hard prompts. prime-rl."""
    e = gather("dr_grpo", rewards, mask, lengths, groups, episodes)
    return _advantages(_centred(e, e.reward), e, mask, lengths, singleton)


def rloo(
    rewards: Tensor,
    mask: Tensor,
    lengths: Tensor,
    groups: Tensor,
    values: Tensor | None = None,
    episodes: Tensor | None = None,
    *,
    singleton: Singleton = "zero",
) -> Advantages:
    """RLOO (2402.14740): A = R - mean of the others = G / (G - 1) * (R - mean)."""
    e = gather("rloo", rewards, mask, lengths, groups, episodes)
    return _advantages(_centred(e, e.reward) * _others_factor(e), e, mask, lengths, singleton)


def _grpo(e: Episodes, reward: Tensor, eps: float, scale_by_std: bool, variant: str) -> Tensor:
    """GRPO's advantage of each episode, `[E]`, for one reward `[E]`."""
    centred = _centred(e, reward)
    if variant in ("leave_one_out_mean", "leave_one_out"):
        centred = centred * _others_factor(e)
    if not scale_by_std:
        return centred
    if variant == "leave_one_out":
        std = _std_of_others(e, reward)
        return torch.where(std > 0, centred / (std + eps), centred)
    if variant == "batch_std":
        return centred / (reward.std() + eps) if reward.numel() > 1 else centred
    return centred / (e.group_std(reward)[e.group] + eps)


def _centred(e: Episodes, x: Tensor) -> Tensor:
    """x - mean of its group, exactly 0 where the group's x are all equal, `[E]`."""
    return torch.where(e.constant(x), 0.0, x - e.group_mean(x)[e.group])


def _others_factor(e: Episodes) -> Tensor:
    """G / (G - 1) of each episode's group, `[E]`, 1 in a group of one: turns x - mean into x - mean of the others."""
    size = e.size[e.group]
    return size / (size - 1).clamp(min=1)


def _std_of_others(e: Episodes, x: Tensor) -> Tensor:
    """Standard deviation (Bessel) of the group's other episodes, `[E]`; exactly 0 where those are equal."""
    deviation = x - e.group_mean(x)[e.group]
    size = e.size[e.group]
    # Taking one of G away: sum of squares - G/(G-1) * its own; this leaves G-1 values, G-2 degrees of freedom.
    squares = e.group_sum(deviation.square())[e.group] - deviation.square() * size / (size - 1).clamp(min=1)
    std = (squares / (size - 2).clamp(min=1)).clamp(min=0).sqrt()
    highest, lowest = e.group_max(x)[e.group], -e.group_max(-x)[e.group]
    at_highest, at_lowest = e.group_sum((x == highest).to(x.dtype)), e.group_sum((x == lowest).to(x.dtype))
    others_equal = (
        (highest == lowest)
        | ((at_highest[e.group] == size - 1) & (x != highest))
        | ((at_lowest[e.group] == size - 1) & (x != lowest))
        | (size <= 2)
    )
    return torch.where(others_equal, 0.0, std)


def _advantages(value: Tensor, e: Episodes, mask: Tensor, lengths: Tensor, singleton: Singleton) -> Advantages:
    value = torch.where(e.alone, e.reward if singleton == "reward" else 0.0, value)
    advantages = on_tokens(value, e, mask, lengths)
    return Advantages(advantages, advantages)


ESTIMATORS: dict[str, Callable[..., Advantages]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
}
