"""A user's own loss, by import path, that breaks."""

from __future__ import annotations

import torch

from asyncrl.learner.losses import LossInputs, PolicyLoss, loss
from asyncrl.learner.ragged import row_of_token

calls = 0


def loss_that_breaks(inputs: LossInputs, *, after: int) -> PolicyLoss:
    """Not a number after so many calls."""
    global calls
    calls += 1
    factor = float("nan") if calls > after else 1.0
    per_token = torch.where(inputs.mask, -inputs.current * inputs.advantages * factor, 0.0)
    return PolicyLoss(per_token, {}, torch.zeros_like(inputs.mask))


@loss(row_by_row=True)
def loss_that_breaks_on_a_row(inputs: LossInputs) -> PolicyLoss:
    """Not a number on the first row of the last of four groups."""
    row = row_of_token(inputs.lengths, len(inputs.mask))
    first = (inputs.episodes == 12)[row]
    factor = torch.where(first, float("nan"), 1.0)
    per_token = torch.where(inputs.mask, -inputs.current * inputs.advantages * factor, 0.0)
    return PolicyLoss(per_token, {}, torch.zeros_like(inputs.mask))
