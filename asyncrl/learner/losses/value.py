"""The critic's loss, and the share of the returns' variance that it explains."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from asyncrl.learner.losses.aggregation import AGGREGATIONS, AggregationInputs
from asyncrl.learner.ragged import masked


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """1 - Var(returns - values) / Var(returns) over the mask: 1 for a perfect critic, 0 for a constant.

    `values[T]`, `returns[T]`. 0 where the returns do not vary.
    """
    target, error = returns[mask].double(), (returns - values)[mask].double()
    if len(target) < 2 or float(target.var()) == 0:
        return 0.0
    return 1.0 - float(error.var() / target.var())


@dataclass(frozen=True, slots=True)
class ValueInputs:
    """Some tokens of a mini-batch, or all of them. Only `values` carries a gradient."""

    values: Tensor
    """[T] float: the critic's now"""
    old_values: Tensor
    """[T] float: the critic's at the start of the training step"""
    returns: Tensor
    """[T] float: what the values are trained towards"""
    mask: Tensor
    """[T] bool: tokens that carry loss"""
    denominator: Tensor | float | None = None
    """As in `AggregationInputs`"""
    weights: Tensor | None = None
    """[T] float: a factor of each token's loss"""
    aggregation: str = "token_mean"
    lengths: Tensor | None = None
    """[B] int64: tokens of each row; every aggregation but `token_mean` needs them"""
    episodes: Tensor | None = None
    """[B] int64"""


def value_loss(
    inputs: ValueInputs, clip: float | None = None, *, scale: float = 0.5, huber_delta: float | None = None
) -> Tensor:
    """scale * mean of max((V - R)², (V_clipped - R)²), V_clipped within `clip` of the old value; a scalar.

    `clip`: None (NeMo), 0.5 (verl, AReaL), 0.2 (SkyRL, slime). `scale`: 0.5; slime 1. `huber_delta`: Huber's loss,
    times 2 so that it is the square near 0, in its place (AReaL, 10). Exactly 0 with a graph without any token.
    """
    if clip is not None and clip <= 0:
        raise ValueError(f"value_loss: clip is {clip}, expected above 0, or null for none.")
    mask, lengths = inputs.mask, inputs.lengths
    if lengths is None:
        if inputs.aggregation != "token_mean":
            raise TypeError(f"value_loss() missing the input 'lengths' for aggregation {inputs.aggregation!r}.")
        lengths = torch.tensor([mask.numel()], device=mask.device)
    v, target = masked(inputs.values, mask), masked(inputs.returns.detach(), mask)
    old = masked(inputs.old_values.detach(), mask)

    def distance(x: Tensor) -> Tensor:
        if huber_delta is None:
            return (x - target).square()
        return 2 * functional.huber_loss(x, target.to(x.dtype), reduction="none", delta=huber_delta)

    per_token = distance(v)
    if clip is not None:
        per_token = torch.maximum(per_token, distance(old + (v - old).clamp(-clip, clip)))
    if inputs.weights is not None:
        per_token = per_token * inputs.weights
    tokens = AggregationInputs(per_token, mask, lengths, inputs.episodes, denominator=inputs.denominator)
    return scale * AGGREGATIONS[inputs.aggregation](tokens)
