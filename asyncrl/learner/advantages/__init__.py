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

from torch import Tensor

from asyncrl.learner.advantages.episodes import Advantages, Singleton, gather, shared_by_rows
from asyncrl.learner.advantages.group_baselines import (
    gdpo,
    gpg,
    grpo_passk,
    max_rl,
    normalised_in_group,
    opo,
    reinforce_pp_baseline,
)
from asyncrl.learner.advantages.returns import gae, reinforce_pp, remax, vapo_gae, vtrace
from asyncrl.learner.advantages.token_baseline import optimal_token_baseline

__all__ = ["ESTIMATORS", "Advantages"]


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
    return shared_by_rows(normalised_in_group(e, e.reward, eps, scale_by_std, variant), e, mask, lengths, singleton)


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
    return shared_by_rows(e.centred(e.reward), e, mask, lengths, singleton)


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
    return shared_by_rows(e.centred(e.reward) * e.over_others, e, mask, lengths, singleton)


ESTIMATORS: dict[str, Callable[..., Advantages]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "opo": opo,
    "gpg": gpg,
    "grpo_passk": grpo_passk,
    "max_rl": max_rl,
    "gdpo": gdpo,
    "reinforce_pp_baseline": reinforce_pp_baseline,
    "reinforce_pp": reinforce_pp,
    "remax": remax,
    "gae": gae,
    "vapo_gae": vapo_gae,
    "vtrace": vtrace,
    "optimal_token_baseline": optimal_token_baseline,
}
