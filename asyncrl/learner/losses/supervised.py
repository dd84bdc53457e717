"""Cross entropy on tokens that nobody sampled: demonstrations (`learner.loss: sft`)."""

from __future__ import annotations

import torch

from asyncrl.learner.losses.policy_loss import LossInputs, PolicyLoss, loss
from asyncrl.learner.ragged import masked


@loss(row_by_row=True, correction="itself")
def sft(inputs: LossInputs) -> PolicyLoss:
    """L = -log p, the cross entropy of the token `[T]`: under `token_mean` that of transformers' own loss.

    It reads no advantage, and there is no policy of the past to correct for.
    """
    return PolicyLoss(-masked(inputs.current, inputs.mask), {}, torch.zeros_like(inputs.mask))
