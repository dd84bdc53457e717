"""DPPO: a trust region measured in probability, not in ratio (2602.04879).

A ratio of 3 means little for a token of probability 1e-5 and very much for one of 0.3; PPO's clip treats them alike.
Here a token leaves the loss when its own probability p has moved too far from q, the one it was sampled with, and its
update would move it further. Both the ratio and q are those of `behaviour[T]`: the loss corrects itself.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from asyncrl.learner.losses.policy_loss import LossInputs, PolicyLoss, loss
from asyncrl.learner.ragged import clamped_exp, masked, masked_mean, share

Variant = Literal["score", "ratio"]


@loss(row_by_row=True, correction="itself")
def dppo_tv(
    inputs: LossInputs,
    *,
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
    moved = masked(inputs.current.detach().exp() - inputs.behaviour.detach().exp(), inputs.mask)
    not_above, not_below = moved <= clip_high, moved >= -clip_low
    keep = not_above & not_below if symmetric else torch.where(inputs.advantages > 0, not_above, not_below)
    return _dppo(inputs, keep, cap, variant, kl_tau)


@loss(row_by_row=True, correction="itself")
def dppo_kl(
    inputs: LossInputs,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    cap: float = 20.0,
    variant: Variant = "score",
    kl_tau: float = 0.0,
) -> PolicyLoss:
    """Binary KL: keep where q log(q/p) + (1-q) log((1-q)/(1-p)) <= the bound of A's sign, or the move is inward.

    clip_high bounds tokens with A > 0, clip_low the others. verl, SkyRL; the variants are those of `dppo_tv`.
    """
    log_p, log_q = masked(inputs.current.detach(), inputs.mask), masked(inputs.behaviour.detach(), inputs.mask)
    p, q = log_p.exp(), log_q.exp()
    kl = q * (log_q - log_p) + (1 - q) * ((1 - q + 1e-8) / (1 - p + 1e-8)).log()
    keep = torch.where(inputs.advantages > 0, (kl <= clip_high) | (p <= q), (kl <= clip_low) | (p >= q))
    return _dppo(inputs, keep, cap, variant, kl_tau)


def _dppo(inputs: LossInputs, keep: Tensor, cap: float, variant: Variant, kl_tau: float) -> PolicyLoss:
    mask, log_r = inputs.mask, inputs.log_behaviour_ratio()
    logprob = masked(inputs.current, mask)
    a = masked(inputs.advantages.detach(), mask & keep).to(log_r.dtype)
    ratio = clamped_exp(log_r)
    per_token = -a * ratio if variant == "ratio" else -a * ratio.detach().clamp(max=cap) * logprob
    if kl_tau:
        per_token = per_token + kl_tau * log_r.square()
    clipped = ~keep & mask
    metrics = {"clip_fraction": share(clipped, mask), "behaviour_kl": masked_mean(-log_r.detach(), mask)}
    return PolicyLoss(per_token, metrics, clipped)
