"""Policy objectives, one function each, readable beside the paper: the table, and the clipped family.

Every function takes `(current[T], proximal[T], advantages[T], mask[T], lengths[B], **options) -> PolicyLoss`.
`current` carries the gradient; everything else is treated as constant. With r = exp(current - proximal), the log-ratio
clamped to ±20, L is what is minimised. Aggregation to a scalar is apart (`AGGREGATIONS`), and so is the correction for
tokens that another policy sampled (`corrections.py`): an objective that has a `weights` parameter applies the weights
itself; the result of any other is multiplied by them. See docs/algorithms.md for who uses which variant.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from asyncrl.learner.aggregation import AGGREGATIONS
from asyncrl.learner.policy_loss import PolicyLoss
from asyncrl.learner.ragged import check_flat, log_ratio, masked, masked_mean, require, share

__all__ = ["AGGREGATIONS", "LOSSES", "PolicyLoss"]


def ppo(
    current: Tensor,
    proximal: Tensor,
    advantages: Tensor,
    mask: Tensor,
    lengths: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float | None = 3.0,
    delta: float | None = None,
) -> PolicyLoss:
    """PPO's clipped objective (1707.06347), with DAPO's higher upper clip (2503.14476).

    L = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)). For A < 0, r is unbounded in it: `dual_clip` c (1912.09729)
    makes that min(L, -c A), and `delta` (two-sided GRPO, 2505.07291, TRL) replaces the free r by min(r, delta).
    """
    check_flat("ppo", mask, lengths, current=current, proximal=proximal, advantages=advantages)
    log_r = log_ratio(current, proximal.detach(), mask)
    return _clipped(log_r.exp(), log_r, advantages, mask, clip_low, clip_high, dual_clip, delta)


def decoupled_ppo(
    current: Tensor,
    proximal: Tensor,
    advantages: Tensor,
    mask: Tensor,
    lengths: Tensor,
    *,
    weights: Tensor | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float | None = 3.0,
    delta: float | None = None,
) -> PolicyLoss:
    """Decoupled PPO (2110.00641; AReaL, 2505.24298): the trust region is around the proximal policy, the learner's own
    at the start of the step, and `weights[T]` = w(proximal / behaviour) corrects for who sampled the token.

    L = w * ppo(current, proximal). The weights are constant, made once per step, and frozen over its updates.
    """
    require("decoupled_ppo", weights=weights)
    assert weights is not None
    check_flat("decoupled_ppo", mask, lengths, weights=weights)
    plain = ppo(
        current,
        proximal,
        advantages,
        mask,
        lengths,
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
        delta=delta,
    )
    return PolicyLoss(
        masked(weights.detach(), mask).to(plain.per_token.dtype) * plain.per_token, plain.metrics, plain.clipped
    )


def _clipped(
    ratio: Tensor,
    log_r: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
    delta: float | None,
) -> PolicyLoss:
    if not 0 <= clip_low <= 1 or clip_high < 0:
        raise ValueError(
            f"clip_low, clip_high: {clip_low}, {clip_high}; the interval is [1 - clip_low, 1 + clip_high]: "
            f"expected clip_low in [0, 1] and clip_high at least 0."
        )
    if dual_clip is not None and dual_clip <= 1:
        raise ValueError(f"dual_clip: {dual_clip}, expected above 1 (3 is usual), or null for none.")
    if delta is not None and delta <= 1 + clip_high:
        raise ValueError(f"delta: {delta}, expected above 1 + clip_high = {1 + clip_high}, or null for none.")
    a = masked(advantages.detach(), mask).to(ratio.dtype)
    free = -a * (ratio if delta is None else ratio.clamp(max=delta))
    bounded = -a * ratio.clamp(1 - clip_low, 1 + clip_high)
    per_token = torch.maximum(free, bounded)
    clipped = bounded > free
    metrics = {"clip_fraction": share(clipped, mask), "proximal_kl": masked_mean(-log_r.detach(), mask)}
    if dual_clip is not None:
        ceiling = -dual_clip * a
        beyond = (a < 0) & (per_token > ceiling)
        per_token = torch.where(beyond, ceiling, per_token)
        clipped = clipped | beyond
        metrics["dual_clip_fraction"] = share(beyond, mask)
    if delta is not None:
        clipped = clipped | ((a < 0) & (ratio > delta))
    return PolicyLoss(masked(per_token, mask), metrics, clipped & mask)


LOSSES: dict[str, Callable[..., PolicyLoss]] = {
    "ppo": ppo,
    "decoupled_ppo": decoupled_ppo,
}
