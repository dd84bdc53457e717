"""The clipped family: PPO, its decoupled form, and its forms with one ratio for a row."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from asyncrl.learner.losses.policy_loss import LossInputs, PolicyLoss, loss
from asyncrl.learner.ragged import clamped_exp, masked, masked_mean, row_mean, row_tokens, share, spread


@loss(linear_in_advantage=True, row_by_row=True)
def ppo(
    inputs: LossInputs,
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
    return _clipped(inputs, clamped_exp(inputs.log_ratio()), clip_low, clip_high, dual_clip, delta)


@loss(linear_in_advantage=True, row_by_row=True, correction="inside")
def decoupled_ppo(
    inputs: LossInputs,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float | None = 3.0,
    delta: float | None = None,
) -> PolicyLoss:
    """Decoupled PPO (2110.00641; AReaL, 2505.24298): the trust region is around the proximal policy, the learner's own
    at the start of the step, and `weights[T]` = w(proximal / behaviour) corrects for the policy that sampled the token.

    L = w * ppo(current, proximal). The weights are constant: computed once per step, and the same in all its updates.
    """
    plain = ppo(inputs, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip, delta=delta)
    weights = masked(inputs.weights.detach(), inputs.mask).to(plain.per_token.dtype)
    return PolicyLoss(weights * plain.per_token, plain.metrics, plain.clipped)


@loss(linear_in_advantage=True, row_by_row=True)
def gspo(
    inputs: LossInputs,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    variant: Literal["sequence", "token"] = "sequence",
    row_advantage: bool = False,
    mean_over: Literal["all", "kept"] = "all",
) -> PolicyLoss:
    """GSPO (2507.18071): PPO's clip with one ratio for the row, s = exp(mean of log r), on each of its tokens.

    `variant`: `sequence`, gradient through the mean (the paper; slime, NeMo, TRL, PipelineRL, AReaL); `token`,
    GSPO-token, s constant and the token's own gradient (verl, SkyRL). They differ where A varies within the row.
    `row_advantage` replaces A by its row mean (AReaL, PipelineRL). Aggregate with `seq_mean_token_mean`. `mean_over`:
    the mean is over `all` policy tokens of the row (slime), or over those that the corrections `kept` (verl, which
    takes rejected tokens out of the mask beforehand).
    """
    mask, lengths, advantages = inputs.mask, inputs.lengths, inputs.advantages
    of_mean = mask & (inputs.weights != 0) if mean_over == "kept" else mask
    log_s = spread(row_mean(inputs.log_ratio(), of_mean, lengths), lengths, mask.numel())
    if variant == "token":
        log_s = log_s.detach() + masked(inputs.current - inputs.current.detach(), mask)
    if row_advantage:
        advantages = spread(row_mean(advantages, mask, lengths), lengths, mask.numel())
    return _clipped(inputs, clamped_exp(log_s), clip_low, clip_high, None, None, advantages)


@loss(row_by_row=True)
def luspo(inputs: LossInputs, *, clip_low: float = 3e-4, clip_high: float = 4e-4) -> PolicyLoss:
    """LUSPO (2602.05261; TRL): GSPO times the row's policy tokens, so that a row weighs as much as its tokens."""
    plain = gspo(inputs, clip_low=clip_low, clip_high=clip_high)
    count = spread(row_tokens(inputs.mask, inputs.lengths), inputs.lengths, inputs.mask.numel())
    return PolicyLoss(plain.per_token * count.to(plain.per_token.dtype), plain.metrics, plain.clipped)


@loss(linear_in_advantage=True, row_by_row=True, correction="inside")
def gmpo(inputs: LossInputs, *, clip_low: float = 0.4, clip_high: float = 0.4) -> PolicyLoss:
    """GMPO (2507.20673): the geometric mean of the clipped ratios, L = -mean(A) exp(mean z) on each token of the row.

    z = sign(A) min(sign(A) log r, sign(A) clip(log r, -clip_low, clip_high)): the clip is in log space, per token.
    `weights[T]` enter as exp(mean log(w + 1e-10)) of the row (verl). Aggregate with `seq_mean_token_mean`, `rows: all`.
    """
    mask, lengths = inputs.mask, inputs.lengths
    log_r, a = inputs.log_ratio(), inputs.masked_advantages()
    bounded = log_r.clamp(-clip_low, clip_high)
    z = a.sign() * torch.minimum(a.sign() * log_r, a.sign() * bounded)
    per_row = -row_mean(a, mask, lengths) * clamped_exp(row_mean(z, mask, lengths))
    per_row = per_row * row_mean((masked(inputs.weights.detach(), mask) + 1e-10).log(), mask, lengths).exp()
    clipped = mask & (z != log_r)
    metrics = {"clip_fraction": share(clipped, mask), "proximal_kl": masked_mean(-log_r.detach(), mask)}
    return PolicyLoss(masked(spread(per_row, lengths, mask.numel()), mask), metrics, clipped)


@loss(linear_in_advantage=True, row_by_row=True)
def sapo(inputs: LossInputs, *, tau_positive: float = 1.0, tau_negative: float = 1.05) -> PolicyLoss:
    """SAPO (2511.20347): a soft gate for the clip, L = -A sigmoid(tau (r - 1)) 4 / tau, tau by the sign of A.

    verl, SkyRL, TRL, AReaL.
    """
    mask, log_r, a = inputs.mask, inputs.log_ratio(), inputs.masked_advantages()
    tau = torch.full_like(a, tau_negative).masked_fill(a > 0, tau_positive)
    per_token = -a * torch.sigmoid(tau * (clamped_exp(log_r) - 1)) * 4 / tau
    metrics = {"proximal_kl": masked_mean(-log_r.detach(), mask)}
    return PolicyLoss(masked(per_token, mask), metrics, torch.zeros_like(mask))


def _clipped(
    inputs: LossInputs,
    ratio: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
    delta: float | None,
    advantages: Tensor | None = None,
) -> PolicyLoss:
    _check_clip(clip_low, clip_high, dual_clip, delta)
    mask = inputs.mask
    a = inputs.masked_advantages() if advantages is None else masked(advantages.detach(), mask).to(ratio.dtype)
    free = -a * (ratio if delta is None else ratio.clamp(max=delta))
    bounded = -a * ratio.clamp(1 - clip_low, 1 + clip_high)
    per_token = torch.maximum(free, bounded)
    clipped = bounded > free
    metrics = {
        "clip_fraction": share(clipped, mask),
        "proximal_kl": masked_mean(-inputs.log_ratio().detach(), mask),
    }
    if dual_clip is not None:
        ceiling = -dual_clip * a
        beyond = (a < 0) & (per_token > ceiling)
        per_token = torch.where(beyond, ceiling, per_token)
        clipped = clipped | beyond
        metrics["dual_clip_fraction"] = share(beyond, mask)
    if delta is not None:
        clipped = clipped | ((a < 0) & (ratio > delta))
    return PolicyLoss(masked(per_token, mask), metrics, clipped & mask)


def _check_clip(clip_low: float, clip_high: float, dual_clip: float | None, delta: float | None) -> None:
    if not 0 <= clip_low <= 1 or clip_high < 0:
        raise ValueError(
            f"clip_low, clip_high: {clip_low}, {clip_high}; the interval is [1 - clip_low, 1 + clip_high]: "
            f"expected clip_low in [0, 1] and clip_high at least 0."
        )
    if dual_clip is not None and dual_clip <= 1:
        raise ValueError(f"dual_clip: {dual_clip}, expected above 1 (3 is usual), or null for none.")
    if delta is not None and delta <= 1 + clip_high:
        raise ValueError(f"delta: {delta}, expected above 1 + clip_high = {1 + clip_high}, or null for none.")
