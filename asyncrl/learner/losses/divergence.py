"""DPPO: a trust region measured in probability, not in ratio (2602.04879). Listed with the others in `__init__.py`.

A ratio of 3 is nothing for a token of probability 1e-5 and everything for one of 0.3; PPO's clip sees them alike. Here
a token leaves the loss when its own probability p has moved too far from q, the one it was sampled with, and its
update would move it further. Both the ratio and q are those of `behaviour[T]`: the objective corrects itself.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from asyncrl.learner.losses.policy_loss import PolicyLoss
from asyncrl.learner.ragged import check_flat, clamped_exp, log_ratio, masked, masked_mean, require, share

Variant = Literal["score", "ratio"]


def dppo_tv(
    current: Tensor,
    proximal: Tensor,
    advantages: Tensor,
    mask: Tensor,
    lengths: Tensor,
    *,
    behaviour: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    cap: float = 20.0,
    variant: Variant = "score",
    symmetric: bool = False,
    kl_tau: float = 0.0,
) -> PolicyLoss:
    """Total variation: keep where p - q <= clip_high for A > 0, p - q >= -clip_low otherwise.

    `variant: score` (verl): L = -A sg(min(ratio, cap)) log p. `ratio` (SkyRL, prime-rl): L = -A ratio, gradient
    through it. prime-rl adds `kl_tau` (1e-3) times (current - behaviour)² on every token. Its IPO is `symmetric`, both
    bounds for either sign, at 0.1.
    """
    require("dppo_tv", behaviour=behaviour)
    _check("dppo_tv", current, proximal, advantages, mask, lengths, behaviour)
    moved = masked(current.detach().exp() - behaviour.detach().exp(), mask)
    not_above, not_below = moved <= clip_high, moved >= -clip_low
    keep = not_above & not_below if symmetric else torch.where(advantages > 0, not_above, not_below)
    return _dppo(keep, current, advantages, mask, behaviour, cap, variant, kl_tau)


def dppo_kl(
    current: Tensor,
    proximal: Tensor,
    advantages: Tensor,
    mask: Tensor,
    lengths: Tensor,
    *,
    behaviour: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    cap: float = 20.0,
    variant: Variant = "score",
    kl_tau: float = 0.0,
) -> PolicyLoss:
    """Binary KL: keep where q log(q/p) + (1-q) log((1-q)/(1-p)) <= the bound of A's sign, or the move is inward.

    clip_high bounds tokens with A > 0, clip_low the others. verl, SkyRL; the variants are those of `dppo_tv`.
    """
    require("dppo_kl", behaviour=behaviour)
    _check("dppo_kl", current, proximal, advantages, mask, lengths, behaviour)
    log_p, log_q = masked(current.detach(), mask), masked(behaviour.detach(), mask)
    p, q = log_p.exp(), log_q.exp()
    kl = q * (log_q - log_p) + (1 - q) * ((1 - q + 1e-8) / (1 - p + 1e-8)).log()
    keep = torch.where(advantages > 0, (kl <= clip_high) | (p <= q), (kl <= clip_low) | (p >= q))
    return _dppo(keep, current, advantages, mask, behaviour, cap, variant, kl_tau)


def _dppo(
    keep: Tensor,
    current: Tensor,
    advantages: Tensor,
    mask: Tensor,
    behaviour: Tensor,
    cap: float,
    variant: Variant,
    kl_tau: float,
) -> PolicyLoss:
    log_r = log_ratio(current, behaviour.detach(), mask)
    logprob = masked(current, mask)
    a = masked(advantages.detach(), mask & keep).to(log_r.dtype)
    ratio = clamped_exp(log_r)
    per_token = -a * ratio if variant == "ratio" else -a * ratio.detach().clamp(max=cap) * logprob
    if kl_tau:
        per_token = per_token + kl_tau * masked(current - behaviour.detach(), mask).square()
    clipped = ~keep & mask
    metrics = {"clip_fraction": share(clipped, mask), "behaviour_kl": masked_mean(-log_r.detach(), mask)}
    return PolicyLoss(per_token, metrics, clipped)


def _check(
    where: str,
    current: Tensor,
    proximal: Tensor,
    advantages: Tensor,
    mask: Tensor,
    lengths: Tensor,
    behaviour: Tensor,
) -> None:
    check_flat(where, mask, lengths, current=current, proximal=proximal, advantages=advantages, behaviour=behaviour)
