"""Objectives that hold entropy up by sparing the tokens that would cost most of it (2505.22617).

The covariance of a token's logprob with its advantage, cov = (A - mean A)(log p - mean log p), is what moves entropy;
a few tokens carry nearly all of it. Both look at the whole call's tokens: use them without micro-batches, or accept
that the choice is made in each. Listed with the others in `__init__.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.learner.losses.policy_loss import PolicyLoss
from asyncrl.learner.ragged import check_flat, clamped_exp, log_ratio, masked, masked_mean, require, share


def clip_cov(
    current: Tensor,
    proximal: Tensor,
    advantages: Tensor,
    mask: Tensor,
    lengths: Tensor,
    *,
    generator: torch.Generator,
    ratio: float = 2e-4,
    cov_low: float = 1.0,
    cov_high: float = 5.0,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> PolicyLoss:
    """Clip-Cov: PPO's clip, and of the tokens with cov_low < cov < cov_high that it leaves, max(1, floor(ratio * N)),
    drawn at random by `generator`, lose their gradient. verl, SkyRL."""
    require("clip_cov", generator=generator)
    check_flat("clip_cov", mask, lengths, current=current, proximal=proximal, advantages=advantages)
    log_r = log_ratio(current, proximal.detach(), mask)
    a = masked(advantages.detach(), mask).to(log_r.dtype)
    free, bounded = -a * clamped_exp(log_r), -a * clamped_exp(log_r).clamp(1 - clip_low, 1 + clip_high)
    clipped = bounded > free
    cov = _covariance(current, a, mask)
    candidates = (mask & ~clipped & (cov > cov_low) & (cov < cov_high)).nonzero().squeeze(1)
    count = max(int(ratio * int(mask.sum())), 1)
    order = torch.randperm(candidates.numel(), generator=generator, device=generator.device).to(candidates.device)
    spared = torch.zeros_like(mask).index_fill(0, candidates[order[:count]], True)
    per_token = torch.where(spared, 0.0, torch.maximum(free, bounded))
    metrics = {
        "clip_fraction": share(clipped, mask),
        "spared_fraction": share(spared, mask),
        "proximal_kl": masked_mean(-log_r.detach(), mask),
    }
    return PolicyLoss(masked(per_token, mask), metrics, (clipped | spared) & mask)


def kl_cov(
    current: Tensor,
    proximal: Tensor,
    advantages: Tensor,
    mask: Tensor,
    lengths: Tensor,
    *,
    ratio: float = 2e-4,
    coefficient: float = 0.1,
) -> PolicyLoss:
    """KL-Cov: L = -A r, no clip, plus coefficient * |current - proximal| on the max(1, floor(ratio * N)) tokens of
    largest cov. verl (2e-4, 0.1); SkyRL (0.2, 1)."""
    check_flat("kl_cov", mask, lengths, current=current, proximal=proximal, advantages=advantages)
    log_r = log_ratio(current, proximal.detach(), mask)
    a = masked(advantages.detach(), mask).to(log_r.dtype)
    inside = mask.nonzero().squeeze(1)
    count = min(max(int(ratio * inside.numel()), 1), inside.numel())
    largest = _covariance(current, a, mask)[inside].topk(count).indices
    held = torch.zeros_like(mask).index_fill(0, inside[largest], True)
    penalty = torch.where(held, coefficient * log_r.abs(), 0.0)
    metrics = {"held_fraction": share(held, mask), "proximal_kl": masked_mean(-log_r.detach(), mask)}
    return PolicyLoss(masked(-a * clamped_exp(log_r), mask) + penalty, metrics, torch.zeros_like(mask))


def _covariance(current: Tensor, a: Tensor, mask: Tensor) -> Tensor:
    logprob = masked(current.detach(), mask)
    return masked((a - masked_mean(a, mask)) * (logprob - masked_mean(logprob, mask)), mask)
