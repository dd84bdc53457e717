"""The contract of a policy loss: its inputs, its result and its properties."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from asyncrl.learner.declared import Function, declare, declared
from asyncrl.learner.ragged import check_flat, log_ratio, masked


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """Some rows of a mini-batch, or all of them: `[T]` tokens in `[B]` rows. Only `current` carries a gradient."""

    current: Tensor
    """[T] float: logprobs of the sampled tokens under the weights being optimised"""
    proximal: Tensor
    """[T] float: the same under the learner's weights at the start of the training step (`learner.proximal`)"""
    behaviour: Tensor
    """[T] float: the same under the weights that sampled the token, as the engine reported them"""
    advantages: Tensor
    """[T] float"""
    weights: Tensor
    """[T] float: importance weights of the corrections, constant; 0 where a correction rejected the token"""
    mask: Tensor
    """[T] bool: policy tokens that carry loss. Elsewhere the other tensors may hold anything, NaN too"""
    lengths: Tensor
    """[B] int64: tokens of each row"""
    groups: Tensor
    """[B] int64: the prompt group of each row"""
    episodes: Tensor
    """[B] int64: the episode of each row"""
    rewards: Tensor
    """[T] float: an episode's reward, on its last policy token"""
    generator: torch.Generator
    """Seeded by the step and the update, for a loss that draws"""

    def __post_init__(self) -> None:
        check_flat(
            "LossInputs",
            self.mask,
            self.lengths,
            current=self.current,
            proximal=self.proximal,
            behaviour=self.behaviour,
            advantages=self.advantages,
            weights=self.weights,
            rewards=self.rewards,
        )

    def log_ratio(self) -> Tensor:
        """log r = current - proximal, `[T]`, with gradient; 0 outside the mask."""
        return log_ratio(self.current, self.proximal.detach(), self.mask)

    def log_behaviour_ratio(self) -> Tensor:
        """log(r w) = current - behaviour, `[T]`, with gradient; 0 outside the mask."""
        return log_ratio(self.current, self.behaviour.detach(), self.mask)

    def masked_advantages(self) -> Tensor:
        """A, `[T]`, constant; 0 outside the mask."""
        return masked(self.advantages.detach(), self.mask).to(self.current.dtype)


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """A loss per token, before aggregation."""

    per_token: Tensor
    """[T] float, differentiable in the current logprobs; exactly 0 outside the mask."""

    metrics: dict[str, Tensor]
    """Detached scalars: means over the policy tokens of this call."""

    clipped: Tensor
    """[T] bool: the policy tokens whose gradient the trust region removed."""


Loss = Callable[..., PolicyLoss]
"""`(inputs: LossInputs, *, options) -> PolicyLoss`"""


@dataclass(frozen=True, slots=True)
class LossProperties:
    """The properties that `@loss` declares; the defaults hold for a function that declares nothing."""

    linear_in_advantage: bool = False
    """A row whose advantages are all 0 has loss 0 and gradient 0, so its backward pass is left out."""
    row_by_row: bool = False
    """The loss of a row depends on that row alone, and on nothing drawn, so each micro-batch can compute its own share,
    on the rank that scores it. Otherwise the loss is computed over a whole mini-batch at once, on every rank, which
    costs one more forward pass."""
    correction: Literal["outside", "inside", "itself"] = "outside"
    """`outside`: the training step multiplies the result by the correction's weights. `inside`: the loss has used
    `inputs.weights` itself. `itself`: its ratio is against `inputs.behaviour`, so only rejected tokens are removed."""


def loss(
    *,
    linear_in_advantage: bool = False,
    row_by_row: bool = False,
    correction: Literal["outside", "inside", "itself"] = "outside",
) -> Callable[[Function], Function]:
    """Declares the properties of a loss."""
    return declare(LossProperties(linear_in_advantage, row_by_row, correction))


def properties_of(function: Loss) -> LossProperties:
    return declared(function, LossProperties())
