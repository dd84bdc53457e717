"""What every policy objective returns."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """A loss per token, before aggregation."""

    per_token: Tensor
    """[T], differentiable in the current logprobs; exactly 0 outside the mask."""

    metrics: dict[str, Tensor]
    """Detached scalars: means over the policy tokens of this call."""

    clipped: Tensor
    """[T] bool: the policy tokens whose gradient the trust region removed."""
