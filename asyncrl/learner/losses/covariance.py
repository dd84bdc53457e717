"""Losses that keep entropy up by sparing the tokens that would cost most of it (2505.22617).

The covariance of a token's logprob with its advantage, cov = (A - mean A)(log p - mean log p), is what moves entropy;
a few tokens carry nearly all of it. Both losses look at all tokens of a mini-batch, so neither is row by row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.learner.losses.policy_loss import LossInputs, PolicyLoss
from asyncrl.learner.ragged import clamped_exp, masked, masked_mean, share


def clip_cov(
    inputs: LossInputs,
    *,
    ratio: float = 2e-4,
    cov_low: float = 1.0,
    cov_high: float = 5.0,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> PolicyLoss:
    """Clip-Cov: PPO's clip; max(1, floor(ratio * N)) of the tokens that it leaves with cov_low < cov < cov_high, drawn
    at random by `generator`, lose their gradient. verl, SkyRL."""
    mask, log_r, a = inputs.mask, inputs.log_ratio(), inputs.masked_advantages()
    free, bounded = -a * clamped_exp(log_r), -a * clamped_exp(log_r).clamp(1 - clip_low, 1 + clip_high)
    clipped = bounded > free
    cov = _covariance(inputs, a)
    candidates = (mask & ~clipped & (cov > cov_low) & (cov < cov_high)).nonzero().squeeze(1)
    count = max(int(ratio * int(mask.sum())), 1)
    generator = inputs.generator
    order = torch.randperm(candidates.numel(), generator=generator, device=generator.device).to(candidates.device)
    spared = torch.zeros_like(mask).index_fill(0, candidates[order[:count]], True)
    per_token = torch.where(spared, 0.0, torch.maximum(free, bounded))
    metrics = {
        "clip_fraction": share(clipped, mask),
        "spared_fraction": share(spared, mask),
        "proximal_kl": masked_mean(-log_r.detach(), mask),
    }
    return PolicyLoss(masked(per_token, mask), metrics, (clipped | spared) & mask)


def kl_cov(inputs: LossInputs, *, ratio: float = 2e-4, coefficient: float = 0.1) -> PolicyLoss:
    """KL-Cov: L = -A r, no clip, plus coefficient * |current - proximal| on the max(1, floor(ratio * N)) tokens of
    largest cov. verl (2e-4, 0.1); SkyRL (0.2, 1)."""
    mask, log_r, a = inputs.mask, inputs.log_ratio(), inputs.masked_advantages()
    policy_tokens = mask.nonzero().squeeze(1)
    count = min(max(int(ratio * policy_tokens.numel()), 1), policy_tokens.numel())
    largest = _covariance(inputs, a)[policy_tokens].topk(count).indices
    penalised = torch.zeros_like(mask).index_fill(0, policy_tokens[largest], True)
    penalty = torch.where(penalised, coefficient * log_r.abs(), 0.0)
    metrics = {"held_fraction": share(penalised, mask), "proximal_kl": masked_mean(-log_r.detach(), mask)}
    return PolicyLoss(masked(-a * clamped_exp(log_r), mask) + penalty, metrics, torch.zeros_like(mask))


def _covariance(inputs: LossInputs, a: Tensor) -> Tensor:
    """(A - mean A)(log p - mean log p), `[T]`, 0 outside the mask."""
    logprob = masked(inputs.current.detach(), inputs.mask)
    return masked((a - masked_mean(a, inputs.mask)) * (logprob - masked_mean(logprob, inputs.mask)), inputs.mask)
