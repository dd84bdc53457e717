"""What a training step saw of each token: what its metrics, and the audit's list, are made of."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from asyncrl.learner.advantages.estimator import Advantages
from asyncrl.learner.batch import Batch


@dataclass(slots=True)
class Record:
    """Filled in as micro-batches pass: of the step's last update where there were several."""

    advantages: Tensor
    """[T] float32, like all below but the bools"""
    returns: Tensor
    """What the critic is trained towards"""
    values: Tensor | None
    """The critic's at the start of the step, or None without one"""
    proximal: Tensor
    """The learner at the start of the step; where nobody computed that, at its last update, or as approximated"""
    anchor: Tensor
    """What the loss took for it: the behaviour under `learner.proximal: behaviour`, else the same"""
    current: Tensor
    entropy: Tensor
    weights: Tensor
    reference_kl: Tensor
    clipped: Tensor
    """[T] bool"""
    keep: Tensor
    """[T] bool"""
    loss: float = 0.0
    """Summed over the updates, like policy_loss and value_loss"""
    policy_loss: float = 0.0
    value_loss: float = 0.0
    grad_norms: list[float] = field(default_factory=list)
    critic_grad_norms: list[float] = field(default_factory=list)
    lr: float = 0.0
    """Of the last update; 0 while only the critic learns"""
    lr_scale: float = 1.0
    """Of the last update, under `learner.ess_lr`"""
    kl_coef: float = 0.0
    shaped_reward: float | None = None
    """Mean over the episodes, after `learner.shaping`; None without any"""
    proximal_s: float = 0.0


def blank(batch: Batch, estimated: Advantages, values: Tensor | None, proximal: Tensor | None) -> Record:
    def zeros() -> Tensor:
        return torch.zeros(len(batch.token_ids))

    def none() -> Tensor:
        return torch.zeros(len(batch.token_ids), dtype=torch.bool)

    return Record(
        advantages=estimated.advantages,
        returns=estimated.returns,
        values=values,
        proximal=zeros() if proximal is None else proximal.clone(),
        anchor=zeros(),
        current=zeros(),
        entropy=zeros(),
        weights=zeros(),
        reference_kl=zeros(),
        clipped=none(),
        keep=none(),
    )
