"""Policy objectives, one function each, readable beside the paper: the table, and the clipped family.

Every function takes `(current[T], proximal[T], advantages[T], mask[T], lengths[B], **options) -> PolicyLoss`.
`current` carries the gradient; everything else is treated as constant. With r = exp(current - proximal), the log-ratio
clamped to ±20, L is what is minimised. Aggregation to a scalar is apart (`AGGREGATIONS`), and so is the correction for
tokens that another policy sampled (`corrections.py`): an objective that has a `weights` parameter applies the weights
itself; the result of any other is multiplied by them. See docs/algorithms.md for who uses which variant.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from asyncrl.learner.losses.aggregation import AGGREGATIONS
from asyncrl.learner.losses.covariance import clip_cov, kl_cov
from asyncrl.learner.losses.divergence import dppo_kl, dppo_tv
from asyncrl.learner.losses.policy_loss import PolicyLoss
from asyncrl.learner.losses.score import cispo, dro, gpg, reinforce, rollout_is, topr, vespo
from asyncrl.learner.losses.value import value_loss
from asyncrl.learner.ragged import (
    check_flat,
    clamped_exp,
    log_ratio,
    masked,
    masked_mean,
    require,
    row_mean,
    row_tokens,
    share,
    spread,
)

__all__ = ["AGGREGATIONS", "LOSSES", "PolicyLoss", "corrected_where", "value_loss"]


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
    return _clipped(clamped_exp(log_r), log_r, advantages, mask, clip_low, clip_high, dual_clip, delta)


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


def gspo(
    current: Tensor,
    proximal: Tensor,
    advantages: Tensor,
    mask: Tensor,
    lengths: Tensor,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    variant: Literal["sequence", "token"] = "sequence",
    row_advantage: bool = False,
) -> PolicyLoss:
    """GSPO (2507.18071): PPO's clip with one ratio for the row, s = exp(mean of log r), on each of its tokens.

    `variant`: `sequence`, gradient through the mean (the paper; slime, NeMo, TRL, PipelineRL, AReaL); `token`,
    GSPO-token, s constant and the token's own gradient (verl, SkyRL). They differ where A varies within the row.
    `row_advantage` replaces A by its row mean (AReaL, PipelineRL). Aggregate with `seq_mean_token_mean`.
    """
    check_flat("gspo", mask, lengths, current=current, proximal=proximal, advantages=advantages)
    log_r = log_ratio(current, proximal.detach(), mask)
    log_s = spread(row_mean(log_r, mask, lengths), lengths, mask.numel())
    if variant == "token":
        log_s = log_s.detach() + masked(current - current.detach(), mask)
    if row_advantage:
        advantages = spread(row_mean(advantages, mask, lengths), lengths, mask.numel())
    return _clipped(clamped_exp(log_s), log_r, advantages, mask, clip_low, clip_high, None, None)


def luspo(
    current: Tensor,
    proximal: Tensor,
    advantages: Tensor,
    mask: Tensor,
    lengths: Tensor,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> PolicyLoss:
    """LUSPO (2602.05261; TRL): GSPO times the row's policy tokens, so that a long row weighs what its tokens do."""
    plain = gspo(current, proximal, advantages, mask, lengths, clip_low=clip_low, clip_high=clip_high)
    count = spread(row_tokens(mask, lengths), lengths, mask.numel()).to(plain.per_token.dtype)
    return PolicyLoss(plain.per_token * count, plain.metrics, plain.clipped)


def gmpo(
    current: Tensor,
    proximal: Tensor,
    advantages: Tensor,
    mask: Tensor,
    lengths: Tensor,
    *,
    weights: Tensor | None = None,
    clip_low: float = 0.4,
    clip_high: float = 0.4,
) -> PolicyLoss:
    """GMPO (2507.20673): the geometric mean of the clipped ratios, L = -mean(A) exp(mean z) on each token of the row.

    z = sign(A) min(sign(A) log r, sign(A) clip(log r, -clip_low, clip_high)): the clip is in log space, per token.
    `weights[T]` enter as exp(mean log(w + 1e-10)) of the row (verl). Aggregate with `seq_mean_token_mean`, `rows: all`.
    """
    check_flat("gmpo", mask, lengths, current=current, proximal=proximal, advantages=advantages, weights=weights)
    log_r = log_ratio(current, proximal.detach(), mask)
    a = masked(advantages.detach(), mask).to(log_r.dtype)
    bounded = log_r.clamp(-clip_low, clip_high)
    z = a.sign() * torch.minimum(a.sign() * log_r, a.sign() * bounded)
    per_row = -row_mean(a, mask, lengths) * clamped_exp(row_mean(z, mask, lengths))
    if weights is not None:
        per_row = per_row * row_mean((masked(weights.detach(), mask) + 1e-10).log(), mask, lengths).exp()
    clipped = mask & (z != log_r)
    metrics = {"clip_fraction": share(clipped, mask), "proximal_kl": masked_mean(-log_r.detach(), mask)}
    return PolicyLoss(masked(spread(per_row, lengths, mask.numel()), mask), metrics, clipped)


def sapo(
    current: Tensor,
    proximal: Tensor,
    advantages: Tensor,
    mask: Tensor,
    lengths: Tensor,
    *,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
) -> PolicyLoss:
    """SAPO (2511.20347): a soft gate for the clip, L = -A sigmoid(tau (r - 1)) 4 / tau, tau by the sign of A.

    verl, SkyRL, TRL, AReaL.
    """
    check_flat("sapo", mask, lengths, current=current, proximal=proximal, advantages=advantages)
    log_r = log_ratio(current, proximal.detach(), mask)
    a = masked(advantages.detach(), mask).to(log_r.dtype)
    tau = torch.full_like(a, tau_negative).masked_fill(a > 0, tau_positive)
    per_token = -a * torch.sigmoid(tau * (clamped_exp(log_r) - 1)) * 4 / tau
    metrics = {"proximal_kl": masked_mean(-log_r.detach(), mask)}
    return PolicyLoss(masked(per_token, mask), metrics, torch.zeros_like(mask))


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
    "gspo": gspo,
    "luspo": luspo,
    "gmpo": gmpo,
    "sapo": sapo,
    "cispo": cispo,
    "gpg": gpg,
    "reinforce": reinforce,
    "topr": topr,
    "rollout_is": rollout_is,
    "vespo": vespo,
    "dro": dro,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
}


def corrected_where(objective: Callable[..., PolicyLoss]) -> Literal["inside", "itself", "outside"]:
    """Where an objective, the user's own too, meets the off-policy correction, read from its signature.

    `inside`: it has a `weights` parameter; pass the correction's weights. `itself`: it has a `behaviour` parameter and
    takes its ratio against that; multiply its result by the correction's `keep` alone. `outside`: neither; multiply
    its result by the weights.
    """
    parameters = inspect.signature(objective).parameters
    return "inside" if "weights" in parameters else "itself" if "behaviour" in parameters else "outside"
