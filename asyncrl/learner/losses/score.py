"""Losses whose gradient is a constant factor times the gradient of the logprob.

L = -sg(factor) * A * logprob: only the logprob carries gradient, so a clip scales the update of a token and never
removes it. `reinforce`, `topr` and `rollout_is` take their ratio against the behaviour policy, which sampled the token,
and so correct themselves.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from asyncrl.learner.losses.policy_loss import LossInputs, PolicyLoss, loss
from asyncrl.learner.ragged import LOG_RATIO_LIMIT, clamped_exp, masked, masked_mean, row_sum, share, spread


@loss(linear_in_advantage=True, row_by_row=True)
def gpg(inputs: LossInputs) -> PolicyLoss:
    """GPG (2504.02546), the plain policy gradient: L = -A log p. verl."""
    return _score(inputs, torch.ones_like(inputs.advantages))


@loss(linear_in_advantage=True, row_by_row=True, correction="itself")
def reinforce(
    inputs: LossInputs,
    *,
    cap: float = 2.0,
    level: Literal["token", "sequence"] = "token",
    variant: Literal["score", "ratio"] = "score",
) -> PolicyLoss:
    """REINFORCE with a truncated importance ratio: L = -sg(min(ratio, cap)) A log p.

    verl bypass mode (cap 2, per token or of the row's summed log-ratio), PipelineRL (cap 1 + clip_high), ROLL `tis`
    (cap 1). `variant: ratio`: L = -ratio A with the gradient through the ratio, no cap (SkyRL `importance_sampling`).
    """
    ratio = _behaviour_ratio(inputs, level)
    if variant == "ratio":
        per_token = masked(-inputs.masked_advantages() * ratio, inputs.mask)
        return PolicyLoss(per_token, _metrics(inputs), torch.zeros_like(inputs.mask))
    plain = _score(inputs, ratio.clamp(max=cap))
    return PolicyLoss(plain.per_token, plain.metrics | {"truncated": share(ratio > cap, inputs.mask)}, plain.clipped)


@loss(linear_in_advantage=True, row_by_row=True)
def cispo(
    inputs: LossInputs,
    *,
    clip_low: float = 1.0,
    clip_high: float = 4.0,
    variant: Literal["interval", "bound"] = "interval",
) -> PolicyLoss:
    """CISPO (MiniMax-M1, 2506.13585; ScaleRL, 2510.13786): L = -sg(clip(r, 1 - clip_low, 1 + clip_high)) A log p.

    Clips the weight, never the gradient. 1 and 4 (no lower bound, 5 above) in SkyRL, AReaL's advice; verl reuses PPO's
    0.2 and 0.2, ROLL 0.1. `variant: bound`: min(r, clip_high), clip_high being the bound itself, 5 (TRL).
    """
    ratio = clamped_exp(inputs.log_ratio().detach())
    low, high = (1 - clip_low, 1 + clip_high) if variant == "interval" else (0.0, clip_high)
    weight = ratio.clamp(low, high)
    plain = _score(inputs, weight)
    clipped = {"clip_fraction": share(weight != ratio, inputs.mask)}
    return PolicyLoss(plain.per_token, plain.metrics | clipped, plain.clipped)


@loss(linear_in_advantage=True, row_by_row=True, correction="itself")
def topr(
    inputs: LossInputs,
    *,
    outcomes: Tensor | None = None,
    variant: Literal["token", "sequence"] = "token",
    positive_weight: float = 1.0,
    negative_weight: float = 1.0,
) -> PolicyLoss:
    """TOPR (2503.14286): good samples by supervised learning, bad ones by a tapered ratio.

    L = -A log p where the outcome is above 0, else -sg(min(ratio, 1)) A log p. `variant`: the ratio of the token
    (ROLL), or of the whole row (the paper). The outcome is `outcomes[B]` where given, else the token's advantage.
    """
    outcome = inputs.advantages if outcomes is None else spread(outcomes, inputs.lengths, inputs.mask.numel())
    taper = _behaviour_ratio(inputs, variant).detach().clamp(max=1.0)
    return _score(inputs, torch.where(outcome > 0, positive_weight, negative_weight * taper))


@loss(row_by_row=True, correction="itself")
def rollout_is(inputs: LossInputs, *, clip_low: float = 0.2, clip_high: float = 0.28) -> PolicyLoss:
    """GLM-5 (2602.15763), SkyRL: L = -sg(ratio) A log p where 1 - clip_low < ratio < 1 + clip_high, else nothing."""
    ratio = clamped_exp(inputs.log_behaviour_ratio().detach())
    keep = (ratio > 1 - clip_low) & (ratio < 1 + clip_high)
    plain = _score(inputs, torch.where(keep, ratio, 0.0))
    clipped = {"clip_fraction": share(~keep, inputs.mask)}
    return PolicyLoss(plain.per_token, plain.metrics | clipped, ~keep & inputs.mask)


@loss(row_by_row=True, correction="inside")
def vespo(
    inputs: LossInputs,
    *,
    k_positive: float = 2.0,
    lambda_positive: float = 3.0,
    k_negative: float = 3.0,
    lambda_negative: float = 2.0,
) -> PolicyLoss:
    """VESPO (2602.10693; TRL): L = -sg(phi(W)) A log p, with W the row's whole ratio and phi a smooth taper around it.

    phi = exp(lambda + k log W - lambda W), (k, lambda) by the sign of A; log W is the row's sum of clamped log-ratios,
    plus that of log `weights[T]`, kept within [log 1e-8, 20].
    """
    mask, lengths = inputs.mask, inputs.lengths
    log_r = inputs.log_ratio().detach().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    total = row_sum(log_r, lengths)
    total = total + row_sum(masked(inputs.weights.detach().clamp(min=1e-8).log(), mask).to(total.dtype), lengths)
    log_w = spread(total.clamp(math.log(1e-8), LOG_RATIO_LIMIT), lengths, mask.numel())
    good = inputs.advantages.detach() >= 0
    k = torch.full_like(log_w, k_negative).masked_fill(good, k_positive)
    lam = torch.full_like(log_w, lambda_negative).masked_fill(good, lambda_positive)
    phi = (lam + k * log_w - lam * log_w.exp()).exp()
    plain = _score(inputs, phi)
    return PolicyLoss(plain.per_token, plain.metrics | {"phi_mean": masked_mean(phi, mask)}, plain.clipped)


@loss(row_by_row=True)
def dro(inputs: LossInputs, *, beta: float) -> PolicyLoss:
    """DRO (verl): L = -(A log p - beta/2 (current - proximal)²), a policy gradient held by a squared log-ratio."""
    plain = _score(inputs, torch.ones_like(inputs.advantages))
    pull = 0.5 * beta * inputs.log_ratio().square()
    return PolicyLoss(plain.per_token + pull, plain.metrics, plain.clipped)


def _behaviour_ratio(inputs: LossInputs, level: str) -> Tensor:
    """current / behaviour, `[T]`: of the token, or of the whole row."""
    log_r = inputs.log_behaviour_ratio()
    if level == "token":
        return clamped_exp(log_r)
    return spread(clamped_exp(row_sum(log_r, inputs.lengths)), inputs.lengths, inputs.mask.numel())


def _score(inputs: LossInputs, factor: Tensor) -> PolicyLoss:
    logprob = masked(inputs.current, inputs.mask)
    a = masked((factor * inputs.advantages).detach(), inputs.mask).to(logprob.dtype)
    return PolicyLoss(-a * logprob, _metrics(inputs), torch.zeros_like(inputs.mask))


def _metrics(inputs: LossInputs) -> dict[str, Tensor]:
    return {"proximal_kl": masked_mean(-inputs.log_ratio().detach(), inputs.mask)}
