"""Corrections that only reject: a token stays as it is, or leaves the loss."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from asyncrl.learner.corrections.correction import Correction, CorrectionInputs, correction, within_bounds, within_mask
from asyncrl.learner.ragged import (
    clamped_exp,
    log_ratio,
    masked,
    row_mean,
    row_of_token,
    row_sum,
    share,
    spread,
)


@correction(row_by_row=True)
def kl_reject(
    inputs: CorrectionInputs,
    *,
    kind: Literal["k1", "k2", "k3"] = "k3",
    level: Literal["token", "seq_sum", "seq_mean", "seq_max"] = "token",
    low: float | None = None,
    high: float | None = None,
    variant: Literal["kl", "ratio"] = "kl",
    direction: Literal["behaviour", "proximal"] = "behaviour",
) -> Correction:
    """Keep where low <= estimate of KL(behaviour || proximal) <= high, per token or per row (its sum, mean or largest).

    k1 = -log w, k2 = (log w)² / 2, k3 = w - 1 - log w. verl (rollout rejection), AReaL (`kl_k1` to `kl_k3`).
    `direction: proximal`: k1 = log w, as in AReaL, so that its bounds change sides; k2 and k3 are the same in both.
    `variant: ratio`, for k1: the bounds are of the ratio behaviour / proximal, so compared as logarithms, and one
    `high` u alone means [1/u, u]; that is verl's reading of its "0.5_2".
    """
    if low is None and high is None:
        raise ValueError("kl_reject: neither low nor high is set. Set at least one.")
    log_w = inputs.log_weights()
    estimate = {
        "k1": -log_w if direction == "behaviour" else log_w,
        "k2": 0.5 * log_w.square(),
        "k3": clamped_exp(log_w) - 1 - log_w,
    }[kind]
    if variant == "ratio":
        if direction == "proximal":
            raise ValueError("kl_reject: variant 'ratio' is of behaviour / proximal: leave `direction` at behaviour.")
        low, high = _log_bounds(kind, low, high)
    if level != "token":
        per_row = _per_row(estimate, inputs, level)
        estimate = spread(per_row, inputs.lengths, inputs.mask.numel())
    return within_mask(
        "kl_reject", torch.ones_like(log_w), within_bounds("kl_reject", estimate, low, high), inputs.mask
    )


@correction(row_by_row=True)
def veto(inputs: CorrectionInputs, *, low: float | None = 1e-4, high: float | None = None) -> Correction:
    """One policy token with w < low or w > high drops its whole row. slime (`rs_veto_threshold`), SkyRL (low, 100)."""
    w = clamped_exp(inputs.log_weights())
    outside = inputs.mask & ~within_bounds("veto", w, low, high)
    keep = spread(row_sum(outside.long(), inputs.lengths) == 0, inputs.lengths, inputs.mask.numel())
    return within_mask("veto", torch.ones_like(w), keep, inputs.mask)


@correction(row_by_row=True)
def opsm(
    inputs: CorrectionInputs,
    *,
    delta: float = 1e-4,
    anchor: Literal["proximal", "behaviour"] = "proximal",
    variant: Literal["token", "sequence"] = "token",
) -> Correction:
    """Off-policy sequence masking (DeepSeek-V3.2, 2512.02556, eq. 9): where A < 0, drop a row that the policy has moved
    away from, mean(anchor - current) > delta: bad samples that it would no longer draw teach nothing good.

    `variant`: the sign of A of each token (slime, delta 1e-4), or of the row's mean A (TRL, delta 0.5). `anchor`:
    slime's is the proximal policy, from which the current one differs only where a step has several updates; TRL's and
    the paper's is the behaviour policy.
    """
    mask, lengths = inputs.mask, inputs.lengths
    start = inputs.proximal if anchor == "proximal" else inputs.behaviour
    moved = row_mean(-log_ratio(inputs.current.detach(), start.detach(), mask), mask, lengths) > delta
    a = masked(inputs.advantages.detach(), mask)
    negative = a < 0 if variant == "token" else spread(row_mean(a, mask, lengths) < 0, lengths, mask.numel())
    return within_mask("opsm", torch.ones_like(a), ~(negative & spread(moved, lengths, mask.numel())), mask)


def m2po(
    inputs: CorrectionInputs,
    *,
    tau: float = 0.04,
    variant: Literal["paper", "cap", "all"] = "paper",
    min_clip_low: float = 0.3,
    min_clip_high: float = 0.5,
) -> Correction:
    """M2PO (2510.01161): bound the second moment of the log-ratio, and reject only what exceeds it.

    With x = current - behaviour, the tokens in question are those whose update moves further away: A > 0 with x > 0,
    A < 0 with x < 0. `paper` (Algorithm 1): drop their largest x² until the mean of the rest is at most tau. `cap`
    (the authors' code): the largest |x| of a token, c, for which the mean of min(|x|, c)² is at most tau gives one clip
    range for the ratio, [e^-c, e^c], never tighter than [1 - min_clip_low, 1 + min_clip_high]; tokens beyond it are
    dropped, as PPO's clip would.
    `all` (AReaL): x = behaviour - proximal of every policy token; drop the largest until the mean is below tau, keep
    one. Use a loss without a clip of its own for `paper`. All look at the whole batch.
    """
    mask, log_w = inputs.mask, inputs.log_weights()
    if variant == "all":
        x, concerned = log_w, mask
    else:
        x = log_ratio(inputs.current.detach(), inputs.behaviour.detach(), mask)
        a = inputs.advantages
        concerned = mask & (((a > 0) & (x > 0)) | ((a < 0) & (x < 0)))
    square, order = x[concerned].square().sort()
    if variant == "cap":
        c = _second_moment_cap(square, tau)
        clip_low = (1 - (-c).exp()).clamp(min=min_clip_low)
        clip_high = c.exp().sub(1).clamp(min=min_clip_high)
        ratio = clamped_exp(x)
        keep = mask & ~(concerned & ((ratio > 1 + clip_high) | (ratio < 1 - clip_low)))
        metrics = {"clip_low": clip_low, "clip_high": clip_high}
    else:
        # Means of the k smallest squares never fall as k grows: keep the longest prefix within the bound.
        means = square.double().cumsum(0) / torch.arange(1, square.numel() + 1, device=square.device)
        kept = (means < tau) if variant == "all" else (means <= tau)
        if variant == "all" and kept.numel():
            kept[0] = True
        keep = mask.clone()
        keep[concerned] = torch.empty_like(kept).scatter(0, order, kept)
        metrics = {"concerned": share(concerned, mask)}
    return within_mask("m2po", torch.ones_like(log_w), keep, mask, metrics)


def _log_bounds(kind: str, low: float | None, high: float | None) -> tuple[float | None, float | None]:
    """Bounds of a ratio as bounds of its logarithm; `high` alone bounds both sides."""
    if kind != "k1" or (low is not None and low <= 0) or (high is not None and high <= 0):
        raise ValueError(f"kl_reject: kind {kind}, bounds {low} to {high}: 'ratio' needs k1 and bounds above 0.")
    low = 1 / high if low is None and high is not None else low
    return (None if low is None else math.log(low)), (None if high is None else math.log(high))


def _second_moment_cap(ascending: Tensor, tau: float) -> Tensor:
    """The largest |x| among `ascending` x² at which the mean of min(x², c²) is at most tau, a scalar; infinite if their
    mean is, 0 if already the smallest exceeds it."""
    n = ascending.numel()
    if n == 0 or bool(ascending.double().mean() <= tau):
        return ascending.new_full((), torch.inf)
    wide = ascending.double()
    capped = wide.cumsum(0) + wide * torch.arange(n - 1, -1, -1, device=wide.device)
    within = int((capped <= n * tau).sum())  # capped never falls
    return ascending[within - 1].sqrt() if within else ascending.new_zeros(())


def _per_row(x: Tensor, inputs: CorrectionInputs, level: str) -> Tensor:
    """Sum, mean or largest of `x[T]` over the policy tokens of each row, `[B]`."""
    if level == "seq_sum":
        return row_sum(x, inputs.lengths)
    if level == "seq_mean":
        return row_mean(x, inputs.mask, inputs.lengths)
    lowest = torch.full((inputs.lengths.numel(),), -torch.inf, dtype=x.dtype, device=x.device)
    rows = row_of_token(inputs.lengths, x.numel())
    return lowest.scatter_reduce(0, rows[inputs.mask], x[inputs.mask], "amax")
