"""Objectives whose gradient is a constant factor times the gradient of the logprob. The table is in `__init__.py`.

L = -sg(factor) * A * logprob: nothing but the logprob carries gradient, so a token is never cut off from learning
by a clip, its update is only scaled. With `behaviour[T]` given, `reinforce`, `topr` and `rollout_is` take their ratio
against the policy that sampled the token, and so correct themselves; without it, against the proximal policy.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from asyncrl.learner.losses.policy_loss import PolicyLoss
from asyncrl.learner.ragged import (
    LOG_RATIO_LIMIT,
    check_flat,
    clamped_exp,
    log_ratio,
    masked,
    masked_mean,
    row_sum,
    share,
    spread,
)


def gpg(current: Tensor, proximal: Tensor, advantages: Tensor, mask: Tensor, lengths: Tensor) -> PolicyLoss:
    """GPG (2504.02546), the plain policy gradient: L = -A log p. verl."""
    check_flat("gpg", mask, lengths, current=current, proximal=proximal, advantages=advantages)
    return _score(torch.ones_like(advantages), current, proximal, advantages, mask)


def reinforce(
    current: Tensor,
    proximal: Tensor,
    advantages: Tensor,
    mask: Tensor,
    lengths: Tensor,
    *,
    behaviour: Tensor | None = None,
    cap: float = 2.0,
    level: Literal["token", "sequence"] = "token",
    variant: Literal["score", "ratio"] = "score",
) -> PolicyLoss:
    """REINFORCE with a truncated importance ratio: L = -sg(min(ratio, cap)) A log p.

    verl bypass mode (cap 2, per token or of the row's summed log-ratio), PipelineRL (cap 1 + clip_high), ROLL `tis`
    (cap 1). `variant: ratio`: L = -ratio A with the gradient through the ratio, no cap (SkyRL `importance_sampling`).
    """
    check_flat("reinforce", mask, lengths, current=current, proximal=proximal, advantages=advantages)
    check_flat("reinforce", mask, lengths, behaviour=behaviour)
    ratio = _ratio(current, proximal if behaviour is None else behaviour, mask, lengths, level)
    if variant == "ratio":
        a = masked(advantages.detach(), mask).to(ratio.dtype)
        return PolicyLoss(masked(-a * ratio, mask), _metrics(current, proximal, mask), torch.zeros_like(mask))
    loss = _score(ratio.clamp(max=cap), current, proximal, advantages, mask)
    return PolicyLoss(loss.per_token, loss.metrics | {"truncated": share(ratio > cap, mask)}, loss.clipped)


def cispo(
    current: Tensor,
    proximal: Tensor,
    advantages: Tensor,
    mask: Tensor,
    lengths: Tensor,
    *,
    clip_low: float = 1.0,
    clip_high: float = 4.0,
    variant: Literal["interval", "bound"] = "interval",
) -> PolicyLoss:
    """CISPO (MiniMax-M1, 2506.13585; ScaleRL, 2510.13786): L = -sg(clip(r, 1 - clip_low, 1 + clip_high)) A log p.

    Clips the weight, never the gradient. 1 and 4 (no lower bound, 5 above) in SkyRL, AReaL's advice; verl reuses PPO's
    0.2 and 0.2, ROLL 0.1. `variant: bound`: min(r, clip_high), clip_high being the bound itself, 5 (TRL).
    """
    check_flat("cispo", mask, lengths, current=current, proximal=proximal, advantages=advantages)
    ratio = clamped_exp(log_ratio(current.detach(), proximal.detach(), mask))
    low, high = (1 - clip_low, 1 + clip_high) if variant == "interval" else (0.0, clip_high)
    weight = ratio.clamp(low, high)
    loss = _score(weight, current, proximal, advantages, mask)
    return PolicyLoss(loss.per_token, loss.metrics | {"clip_fraction": share(weight != ratio, mask)}, loss.clipped)


def topr(
    current: Tensor,
    proximal: Tensor,
    advantages: Tensor,
    mask: Tensor,
    lengths: Tensor,
    *,
    behaviour: Tensor | None = None,
    outcomes: Tensor | None = None,
    variant: Literal["token", "sequence"] = "token",
    positive_weight: float = 1.0,
    negative_weight: float = 1.0,
) -> PolicyLoss:
    """TOPR (2503.14286): good samples by supervised learning, bad ones by a tapered ratio.

    L = -A log p where the outcome is above 0, else -sg(min(ratio, 1)) A log p. `variant`: the ratio of the token
    (ROLL), or of the whole row (the paper). The outcome is `outcomes[B]` where given, else the token's advantage.
    """
    check_flat("topr", mask, lengths, current=current, proximal=proximal, advantages=advantages, behaviour=behaviour)
    good = (advantages if outcomes is None else spread(outcomes, lengths, mask.numel())) > 0
    ratio = _ratio(current.detach(), proximal if behaviour is None else behaviour, mask, lengths, variant)
    taper = ratio.clamp(max=1.0)
    return _score(torch.where(good, positive_weight, negative_weight * taper), current, proximal, advantages, mask)


def rollout_is(
    current: Tensor,
    proximal: Tensor,
    advantages: Tensor,
    mask: Tensor,
    lengths: Tensor,
    *,
    behaviour: Tensor | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
) -> PolicyLoss:
    """GLM-5 (2602.15763), SkyRL: L = -sg(ratio) A log p where 1 - clip_low < ratio < 1 + clip_high, else nothing."""
    check_flat("rollout_is", mask, lengths, current=current, proximal=proximal, advantages=advantages)
    check_flat("rollout_is", mask, lengths, behaviour=behaviour)
    anchor = proximal if behaviour is None else behaviour
    ratio = clamped_exp(log_ratio(current.detach(), anchor.detach(), mask))
    keep = (ratio > 1 - clip_low) & (ratio < 1 + clip_high)
    loss = _score(torch.where(keep, ratio, 0.0), current, proximal, advantages, mask)
    return PolicyLoss(loss.per_token, loss.metrics | {"clip_fraction": share(~keep, mask)}, ~keep & mask)


def vespo(
    current: Tensor,
    proximal: Tensor,
    advantages: Tensor,
    mask: Tensor,
    lengths: Tensor,
    *,
    weights: Tensor | None = None,
    k_positive: float = 2.0,
    lambda_positive: float = 3.0,
    k_negative: float = 3.0,
    lambda_negative: float = 2.0,
) -> PolicyLoss:
    """VESPO (2602.10693; TRL): L = -sg(phi(W)) A log p, with W the row's whole ratio and phi a smooth taper around it.

    phi = exp(lambda + k log W - lambda W), (k, lambda) by the sign of A; log W is the row's sum of clamped log-ratios,
    plus that of log `weights[T]` (per-token ones) where given, kept within [log 1e-8, 20].
    """
    check_flat("vespo", mask, lengths, current=current, proximal=proximal, advantages=advantages, weights=weights)
    log_r = log_ratio(current.detach(), proximal.detach(), mask).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    total = row_sum(log_r, lengths)
    if weights is not None:
        total = total + row_sum(masked(weights.detach().clamp(min=1e-8).log(), mask).to(total.dtype), lengths)
    log_w = spread(total.clamp(math.log(1e-8), LOG_RATIO_LIMIT), lengths, mask.numel())
    good = advantages.detach() >= 0
    k = torch.full_like(log_w, k_negative).masked_fill(good, k_positive)
    lam = torch.full_like(log_w, lambda_negative).masked_fill(good, lambda_positive)
    phi = (lam + k * log_w - lam * log_w.exp()).exp()
    loss = _score(phi, current, proximal, advantages, mask)
    return PolicyLoss(loss.per_token, loss.metrics | {"phi_mean": masked_mean(phi, mask)}, loss.clipped)


def dro(
    current: Tensor, proximal: Tensor, advantages: Tensor, mask: Tensor, lengths: Tensor, *, beta: float
) -> PolicyLoss:
    """DRO (verl): L = -(A log p - beta/2 (current - proximal)²), a policy gradient held by a squared log-ratio."""
    check_flat("dro", mask, lengths, current=current, proximal=proximal, advantages=advantages)
    loss = _score(torch.ones_like(advantages), current, proximal, advantages, mask)
    pull = 0.5 * beta * masked(current - proximal.detach(), mask).square()
    return PolicyLoss(loss.per_token + pull, loss.metrics, loss.clipped)


def _ratio(current: Tensor, anchor: Tensor, mask: Tensor, lengths: Tensor, level: str) -> Tensor:
    log_r = log_ratio(current, anchor.detach(), mask)
    if level == "token":
        return clamped_exp(log_r)
    return spread(clamped_exp(row_sum(log_r, lengths)), lengths, mask.numel())


def _score(factor: Tensor, current: Tensor, proximal: Tensor, advantages: Tensor, mask: Tensor) -> PolicyLoss:
    logprob = masked(current, mask)
    a = masked((factor * advantages).detach(), mask).to(logprob.dtype)
    return PolicyLoss(-a * logprob, _metrics(current, proximal, mask), torch.zeros_like(mask))


def _metrics(current: Tensor, proximal: Tensor, mask: Tensor) -> dict[str, Tensor]:
    return {"proximal_kl": masked_mean(-log_ratio(current.detach(), proximal.detach(), mask), mask)}
