"""Estimators that subtract the mean reward of the group: GRPO, Dr.GRPO, RLOO."""

from __future__ import annotations

from typing import Literal

from asyncrl.learner.advantages.episodes import Singleton, gather, normalised_in_group, shared_by_rows
from asyncrl.learner.advantages.estimator import Advantages, EstimatorInputs


def grpo(
    inputs: EstimatorInputs,
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
    e = gather(inputs)
    return shared_by_rows(normalised_in_group(e, e.reward, eps, scale_by_std, variant), e, inputs, singleton)


def dr_grpo(inputs: EstimatorInputs, *, singleton: Singleton = "zero") -> Advantages:
    """Dr.GRPO (2503.20783): A = R - mean; no division by the std, which favours easy and hard prompts. prime-rl."""
    e = gather(inputs)
    return shared_by_rows(e.centred(e.reward), e, inputs, singleton)


def rloo(inputs: EstimatorInputs, *, singleton: Singleton = "zero") -> Advantages:
    """RLOO (2402.14740): A = R - mean of the others = G / (G - 1) * (R - mean)."""
    e = gather(inputs)
    return shared_by_rows(e.centred(e.reward) * e.over_others, e, inputs, singleton)
