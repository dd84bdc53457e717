"""Off-policy corrections: what a token sampled by another policy may still teach.

Every function takes `(proximal[T], behaviour[T], mask[T], lengths[B], **options) -> Correction`. With
log w = proximal - behaviour (it, or its sum over a row, clamped to ±20 before exp): the proximal logprobs are the
learner's at the start of the training step, the behaviour logprobs what the engine reported. w covers two things at
once: staleness, and the engine and the learner disagreeing about the same weights. All of it is constant. Several
corrections compose in a list (`compose`).

`keep` says which tokens stay in the loss; `weights` is exactly 0 where `keep` is false, so multiplying by the weights
applies both. The loss's denominator is that of the original mask, so that a batch of which much was rejected makes a
small step, unless `denominator: kept` is asked for. `normalize` and `m2po` look at the whole batch: correct a training
step in one call, before it is cut into micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from asyncrl.learner.corrections.correction import Correction, compose, correction, log_weights, within
from asyncrl.learner.corrections.rejections import kl_reject, m2po, opsm, veto
from asyncrl.learner.ragged import clamped_exp, masked_mean, row_mean, row_sum, row_tokens, share, spread

__all__ = ["CORRECTIONS", "Correction", "compose"]


def none(proximal: Tensor, behaviour: Tensor, mask: Tensor, lengths: Tensor) -> Correction:
    """No correction: every weight 1. Sound only when the behaviour is the proximal policy."""
    return correction("none", torch.ones_like(log_weights("none", proximal, behaviour, mask, lengths)), mask, mask)


def tis(
    proximal: Tensor,
    behaviour: Tensor,
    mask: Tensor,
    lengths: Tensor,
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
    log_w = log_weights("tis", proximal, behaviour, mask, lengths)
    w = _ratio(log_w, mask, lengths, level)
    weights = w.clamp(max=cap)
    metrics = {"truncated": share(w > cap, mask)}
    if normalize:
        weights = _normalized(weights, mask, lengths, level)
    return correction("tis", weights, mask, mask, metrics)


def mis(
    proximal: Tensor,
    behaviour: Tensor,
    mask: Tensor,
    lengths: Tensor,
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
    log_w = log_weights("mis", proximal, behaviour, mask, lengths)
    ratio = _ratio(log_w, mask, lengths, level)
    keep = within("mis", ratio, low, high)
    weights = torch.ones_like(ratio) if not use_weight else ratio if weight == "level" else clamped_exp(log_w)
    if normalize:
        weights = _normalized(torch.where(keep, weights, 0.0), mask, lengths, level)
    return correction("mis", weights, keep, mask)


def icepop(
    proximal: Tensor, behaviour: Tensor, mask: Tensor, lengths: Tensor, *, low: float = 0.5, high: float = 5.0
) -> Correction:
    """IcePop (Ring-1T, 2510.18855): the token's w where low <= w <= high, else nothing; the denominator is unchanged.

    0.5 to 5 in verl and NeMo; slime's bounds are 0 to 2.
    """
    w = clamped_exp(log_weights("icepop", proximal, behaviour, mask, lengths))
    return correction("icepop", w, within("icepop", w, low, high), mask)


def clamp(
    proximal: Tensor,
    behaviour: Tensor,
    mask: Tensor,
    lengths: Tensor,
    *,
    low: float | None = None,
    high: float | None = None,
) -> Correction:
    """The token's w clamped into [low, high], on both sides. AReaL `clamp`, slime `tis_clip_low`, TRL."""
    if low is None and high is None:
        raise ValueError("clamp: neither low nor high is set. Set at least one, or use another correction.")
    w = clamped_exp(log_weights("clamp", proximal, behaviour, mask, lengths))
    clamped = w.clamp(min=low, max=high)
    return correction("clamp", clamped, mask, mask, {"clamped": share(clamped != w, mask)})


def _ratio(log_w: Tensor, mask: Tensor, lengths: Tensor, level: str) -> Tensor:
    """The ratio that a level compares, `[T]`: exp of the token's own log w, of the row's sum, or of the row's mean."""
    if level == "token":
        return clamped_exp(log_w)
    per_row = row_sum(log_w, lengths) if level == "sequence" else row_mean(log_w, mask, lengths)
    return spread(clamped_exp(per_row), lengths, mask.numel())


def _normalized(weights: Tensor, mask: Tensor, lengths: Tensor, level: str) -> Tensor:
    """Weights over their mean: of the policy tokens, or, for a level of rows, of the rows that have any."""
    if level == "token":
        mean = masked_mean(weights, mask)
    else:
        rows = row_tokens(mask, lengths) > 0
        mean = masked_mean(row_mean(weights, mask, lengths), rows)
    return weights / torch.where(mean > 0, mean, 1.0)


CORRECTIONS: dict[str, Callable[..., Correction]] = {
    "none": none,
    "tis": tis,
    "mis": mis,
    "icepop": icepop,
    "clamp": clamp,
    "kl_reject": kl_reject,
    "veto": veto,
    "opsm": opsm,
    "m2po": m2po,
}
