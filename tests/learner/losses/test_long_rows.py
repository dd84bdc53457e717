"""Sums over a row of 64k tokens are as exact as float32 can store them: loss and gradient against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from asyncrl.learner.losses import LOSSES
from asyncrl.learner.losses.policy_loss import LossInputs

TOKENS = 1 << 16


def evaluated(name: str, dtype: torch.dtype) -> tuple[float, Tensor]:
    """The mean loss of two long rows and its gradient by each token's logprob, in `dtype`."""
    generator = torch.Generator().manual_seed(3)
    lengths = torch.tensor([TOKENS, TOKENS])
    drift = 2e-4 + 1e-2 * torch.randn(2 * TOKENS, generator=generator)
    proximal = -torch.rand(2 * TOKENS, generator=generator)
    current = (proximal.to(dtype) + drift.to(dtype)).requires_grad_()
    advantages = torch.tensor([0.7, -1.3]).repeat_interleave(TOKENS)
    loss = LOSSES[name](
        LossInputs(
            current=current, proximal=proximal.to(dtype), behaviour=proximal.to(dtype), advantages=advantages.to(dtype),
            weights=torch.ones(2 * TOKENS, dtype=dtype), mask=torch.ones(2 * TOKENS, dtype=torch.bool),
            lengths=lengths, groups=torch.zeros(2, dtype=torch.long), episodes=torch.arange(2),
            rewards=torch.zeros(2 * TOKENS, dtype=dtype), generator=generator,
        )
    ).per_token.double().mean()  # fmt: skip
    (gradient,) = torch.autograd.grad(loss, current)
    return float(loss.detach()), gradient.double()


@pytest.mark.parametrize("name", ["gspo", "luspo", "gmpo"])
def test_a_ratio_of_the_row_is_exact(name: str) -> None:
    exact, slope = evaluated(name, torch.float64)
    loss, gradient = evaluated(name, torch.float32)
    assert loss == pytest.approx(exact, rel=3e-7)
    assert float((gradient - slope).norm() / slope.norm()) < 3e-7
