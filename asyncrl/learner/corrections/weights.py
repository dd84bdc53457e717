"""Corrections that weight: importance sampling, truncated, masked or clamped."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from asyncrl.learner.corrections.correction import Correction, CorrectionInputs, correction, within_bounds, within_mask
from asyncrl.learner.ragged import clamped_exp, masked_mean, row_mean, row_sum, row_tokens, share, spread


@correction(row_by_row=True)
def none(inputs: CorrectionInputs) -> Correction:
    """No correction: every weight 1. Sound only when the behaviour is the proximal policy."""
    return within_mask("none", torch.ones_like(inputs.log_weights()), inputs.mask, inputs.mask)


@correction(row_by_row=True, except_with=("normalize",))
def tis(
    inputs: CorrectionInputs,
    *,
    level: Literal["token", "sequence"] = "token",
    cap: float = 2.0,
    normalize: bool = False,
) -> Correction:
    """Truncated importance sampling: min(w, cap), the bias of the cap bought for bounded variance (1802.01561).

    `level`: w of the token (AReaL, slime, SkyRL, NeMo), or exp of the row's summed log w on all its tokens (verl's
    default, cap 2; SkyRL, cap 5). `normalize` divides by the mean weight (verl, slime): of tokens, or of rows.
    """
    if cap <= 0:
        raise ValueError(f"tis: cap is {cap}, expected above 0 (2 is usual).")
    w = _ratio(inputs, level)
    weights = w.clamp(max=cap)
    metrics = {"truncated": share(w > cap, inputs.mask)}
    if normalize:
        weights = _normalized(weights, inputs, level)
    return within_mask("tis", weights, inputs.mask, inputs.mask, metrics)


@correction(row_by_row=True, except_with=("normalize",))
def mis(
    inputs: CorrectionInputs,
    *,
    low: float,
    high: float,
    level: Literal["token", "sequence", "geometric"] = "token",
    use_weight: bool = True,
    weight: Literal["level", "token"] = "level",
    normalize: bool = False,
) -> Correction:
    """Masked importance sampling: keep what has low <= ratio <= high and weight it; drop the rest, rather than cap it.

    The ratio: w of the token; `sequence`: exp(sum log w) of the row (TRL's `sequence_mask`, high 3; verl `seq_sum_k1`);
    `geometric`: exp(mean log w) of the row (verl `seq_mean_k1`, 0.999 to 1.001; SkyRL 0.99 to 1.01; slime).
    `use_weight: false` keeps with weight 1 (SkyRL `product`, verl). `weight`: what is kept is weighted by that ratio
    (TRL, AReaL, slime), or by the token's own w (NeMo `seq-mask-tis`).
    """
    ratio = _ratio(inputs, level)
    keep = within_bounds("mis", ratio, low, high)
    if not use_weight:
        weights = torch.ones_like(ratio)
    else:
        weights = ratio if weight == "level" else clamped_exp(inputs.log_weights())
    if normalize:
        weights = _normalized(torch.where(keep, weights, 0.0), inputs, level)
    return within_mask("mis", weights, keep, inputs.mask)


@correction(row_by_row=True)
def icepop(inputs: CorrectionInputs, *, low: float = 0.5, high: float = 5.0) -> Correction:
    """IcePop (Ring-1T, 2510.18855): the token's w where low <= w <= high, else nothing; the denominator is unchanged.

    0.5 to 5 in verl and NeMo; slime's bounds are 0 to 2.
    """
    w = clamped_exp(inputs.log_weights())
    return within_mask("icepop", w, within_bounds("icepop", w, low, high), inputs.mask)


@correction(row_by_row=True)
def clamp(inputs: CorrectionInputs, *, low: float | None = None, high: float | None = None) -> Correction:
    """The token's w clamped into [low, high], on both sides. AReaL `clamp`, slime `tis_clip_low`, TRL."""
    if low is None and high is None:
        raise ValueError("clamp: neither low nor high is set. Set at least one, or use another correction.")
    w = clamped_exp(inputs.log_weights())
    clamped = w.clamp(min=low, max=high)
    return within_mask("clamp", clamped, inputs.mask, inputs.mask, {"clamped": share(clamped != w, inputs.mask)})


def _ratio(inputs: CorrectionInputs, level: str) -> Tensor:
    """The ratio that a level compares, `[T]`: exp of the token's own log w, of the row's sum, or of the row's mean."""
    log_w, lengths = inputs.log_weights(), inputs.lengths
    if level == "token":
        return clamped_exp(log_w)
    per_row = row_sum(log_w, lengths) if level == "sequence" else row_mean(log_w, inputs.mask, lengths)
    return spread(clamped_exp(per_row), lengths, inputs.mask.numel())


def _normalized(weights: Tensor, inputs: CorrectionInputs, level: str) -> Tensor:
    """Weights over their mean: of the policy tokens, or, for a level of rows, of the rows that have any."""
    if level == "token":
        mean = masked_mean(weights, inputs.mask)
    else:
        has_tokens = row_tokens(inputs.mask, inputs.lengths) > 0
        mean = masked_mean(row_mean(weights, inputs.mask, inputs.lengths), has_tokens)
    return weights / torch.where(mean > 0, mean, 1.0)
