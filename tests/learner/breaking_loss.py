"""A user's own loss, by import path, that breaks."""

from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.learner.losses.policy_loss import PolicyLoss

calls = 0


def loss_that_breaks(
    current: Tensor, proximal: Tensor, advantages: Tensor, mask: Tensor, lengths: Tensor, *, after: int
) -> PolicyLoss:
    """Not a number after so many calls."""
    global calls
    calls += 1
    factor = float("nan") if calls > after else 1.0
    return PolicyLoss(torch.where(mask, -current * advantages * factor, 0.0), {}, torch.zeros_like(mask))
