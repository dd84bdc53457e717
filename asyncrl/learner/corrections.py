"""Off-policy corrections: what a token sampled by another policy may still teach.

Every function takes `(proximal[T], behaviour[T], mask[T], lengths[B], **options) -> Correction`. With
log w = proximal - behaviour, clamped to ±20: the proximal logprobs are the learner's at the start of the training
step, the behaviour logprobs what the engine reported. w covers two things at once: staleness, and the engine and the
learner disagreeing about the same weights. All of it is constant. Several corrections compose in a list (`compose`).

`keep` says which tokens stay in the loss; `weights` is exactly 0 where `keep` is false, so multiplying by the weights
applies both. The loss's denominator is that of the original mask, so that a batch of which much was rejected makes a
small step, unless `denominator: kept` is asked for. `normalize` and `m2po` look at the whole batch: correct a training
step in one call, before it is cut into micro-batches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from asyncrl.learner.ragged import (
    LOG_RATIO_LIMIT,
    check_flat,
    log_ratio,
    masked,
    masked_mean,
    row_mean,
    row_sum,
    row_tokens,
    share,
    spread,
)


@dataclass(frozen=True, slots=True)
class Correction:
    """What to multiply each token's loss by, and which tokens to keep."""

    weights: Tensor
    """[T] at least 0, constant; exactly 0 outside the mask and where `keep` is false."""

    keep: Tensor
    """[T] bool, false outside the mask."""

    metrics: dict[str, Tensor]
    """Detached scalars, named `correction/what`."""


def none(proximal: Tensor, behaviour: Tensor, mask: Tensor, lengths: Tensor) -> Correction:
    """No correction: every weight 1. Sound only when the behaviour is the proximal policy."""
    return _correction("none", _log_w("none", proximal, behaviour, mask, lengths).exp().new_ones(()), mask, mask)


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
    log_w = _log_w("tis", proximal, behaviour, mask, lengths)
    w = _at_level(log_w, mask, lengths, level).exp()
    weights = w.clamp(max=cap)
    metrics = {"truncated": share(w > cap, mask)}
    if normalize:
        weights = _normalized(weights, mask, lengths, level)
    return _correction("tis", weights, mask, mask, metrics)


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
    log_w = _log_w("mis", proximal, behaviour, mask, lengths)
    ratio = _at_level(log_w, mask, lengths, level).exp()
    keep = _within("mis", ratio, low, high)
    weights = torch.ones_like(ratio) if not use_weight else ratio if weight == "level" else log_w.exp()
    if normalize:
        weights = _normalized(torch.where(keep, weights, 0.0), mask, lengths, level)
    return _correction("mis", weights, keep, mask)


def icepop(
    proximal: Tensor, behaviour: Tensor, mask: Tensor, lengths: Tensor, *, low: float = 0.5, high: float = 5.0
) -> Correction:
    """IcePop (Ring-1T, 2510.18855): the token's w where low <= w <= high, else nothing; the denominator is unchanged.

    0.5 to 5 in verl and NeMo; slime's bounds are 0 to 2.
    """
    w = _log_w("icepop", proximal, behaviour, mask, lengths).exp()
    return _correction("icepop", w, _within("icepop", w, low, high), mask)


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
    w = _log_w("clamp", proximal, behaviour, mask, lengths).exp()
    clamped = w.clamp(min=low, max=high)
    return _correction("clamp", clamped, mask, mask, {"clamped": share(clamped != w, mask)})


CORRECTIONS: dict[str, Callable[..., Correction]] = {
    "none": none,
    "tis": tis,
    "mis": mis,
    "icepop": icepop,
    "clamp": clamp,
}


def compose(corrections: Sequence[Correction]) -> Correction:
    """Several corrections as one: weights multiply, a token is kept if all keep it. Raises ValueError for none at all.

    A metric's name that occurs twice gets `_2`, `_3` in the order of the list.
    """
    if not corrections:
        raise ValueError("compose: the list of corrections is empty. Use the correction 'none'.")
    metrics: dict[str, Tensor] = {}
    for correction in corrections:
        for name, value in correction.metrics.items():
            times = 1 + sum(1 for known in metrics if known == name or known.startswith(f"{name}_"))
            metrics[name if times == 1 else f"{name}_{times}"] = value
    keep = functools.reduce(torch.logical_and, [c.keep for c in corrections])
    weights = functools.reduce(torch.mul, [c.weights for c in corrections])
    return Correction(masked(weights, keep), keep, metrics)


def _log_w(where: str, proximal: Tensor, behaviour: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
    check_flat(where, mask, lengths, proximal=proximal, behaviour=behaviour)
    return log_ratio(proximal.detach(), behaviour.detach(), mask)


def _at_level(log_w: Tensor, mask: Tensor, lengths: Tensor, level: str) -> Tensor:
    """log of the ratio that a level compares, `[T]`: the token's own, the row's sum, or the row's mean."""
    if level == "token":
        return log_w
    per_row = row_sum(log_w, lengths) if level == "sequence" else row_mean(log_w, mask, lengths)
    return spread(per_row.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT), lengths, mask.numel())


def _within(where: str, x: Tensor, low: float | None, high: float | None) -> Tensor:
    if low is not None and high is not None and low > high:
        raise ValueError(f"{where}: low {low} is above high {high}. Swap them.")
    keep = torch.ones_like(x, dtype=torch.bool)
    if low is not None:
        keep &= x >= low
    if high is not None:
        keep &= x <= high
    return keep


def _normalized(weights: Tensor, mask: Tensor, lengths: Tensor, level: str) -> Tensor:
    """Weights over their mean: of the policy tokens, or, for a level of rows, of the rows that have any."""
    if level == "token":
        mean = masked_mean(weights, mask)
    else:
        rows = row_tokens(mask, lengths) > 0
        mean = masked_mean(row_mean(weights, mask, lengths), rows)
    return weights / torch.where(mean > 0, mean, 1.0)


def _correction(
    name: str, weights: Tensor, keep: Tensor, mask: Tensor, metrics: dict[str, Tensor] | None = None
) -> Correction:
    keep = keep & mask
    weights = masked(weights.expand(mask.shape), keep)
    named = {
        "kept": share(keep, mask),
        "weight_mean": masked_mean(weights, mask),
        "weight_max": weights.max() if weights.numel() else weights.sum(),
    } | (metrics or {})
    return Correction(weights, keep, {f"{name}/{key}": value for key, value in named.items()})
