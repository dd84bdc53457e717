"""The critic's loss, and how much it knows."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from asyncrl.learner.losses.aggregation import AGGREGATIONS
from asyncrl.learner.ragged import masked


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """1 - Var(returns - values) / Var(returns) over the mask: 1 for a critic that knows, 0 for a constant.

    `values[T]`, `returns[T]`. 0 where the returns do not vary.
    """
    known, error = returns[mask].double(), (returns - values)[mask].double()
    if len(known) < 2 or float(known.var()) == 0:
        return 0.0
    return 1.0 - float(error.var() / known.var())


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    clip: float | None = None,
    *,
    scale: float = 0.5,
    huber_delta: float | None = None,
    lengths: Tensor | None = None,
    aggregation: str = "token_mean",
    denominator: Tensor | float | None = None,
    episodes: Tensor | None = None,
    weights: Tensor | None = None,
) -> Tensor:
    """scale * mean of max((V - R)², (V_clipped - R)²), V_clipped within `clip` of the old value; a scalar.

    `values[T]` carries the gradient. `clip`: None (NeMo), 0.5 (verl, AReaL), 0.2 (SkyRL, slime). `scale`: 0.5; slime 1.
    `huber_delta`: Huber's loss, times 2 so that it is the square near 0, in its place (AReaL, 10). `aggregation` and
    `denominator` as for the policy; all but `token_mean` need `lengths[B]`. `weights[T]`: what each token's loss is
    multiplied by. Exactly 0 with a graph without any token.
    """
    if clip is not None and clip <= 0:
        raise ValueError(f"value_loss: clip is {clip}, expected above 0, or null for none.")
    if lengths is None:
        if aggregation != "token_mean":
            raise TypeError(f"value_loss() missing the required input 'lengths' for aggregation {aggregation!r}.")
        lengths = torch.tensor([mask.numel()], device=mask.device)
    v, target, old = masked(values, mask), masked(returns.detach(), mask), masked(old_values.detach(), mask)

    def distance(x: Tensor) -> Tensor:
        if huber_delta is None:
            return (x - target).square()
        return 2 * functional.huber_loss(x, target.to(x.dtype), reduction="none", delta=huber_delta)

    per_token = distance(v)
    if clip is not None:
        per_token = torch.maximum(per_token, distance(old + (v - old).clamp(-clip, clip)))
    if weights is not None:
        per_token = per_token * weights
    return scale * AGGREGATIONS[aggregation](per_token, mask, lengths, denominator, episodes)
