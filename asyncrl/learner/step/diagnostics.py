"""Measures of how far off-policy a batch is."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from asyncrl.learner.ragged import clamped_exp, log_ratio, masked, masked_mean, row_sum, row_tokens, share

STALENESS_BUCKETS = (0, 1, 2, 4, 8, 16)
"""Lower edges in policy versions; the last bucket is open."""


def effective_sample_size(weights: Tensor, mask: Tensor) -> Tensor:
    """(sum w)² / (n sum w²) over the n policy tokens: 1 when all weights are equal, 1/n when one has them all. Scalar.

    0 when every weight is 0, 1 when there is no policy token. verl's `1 / mean((w / mean w)²)`.
    """
    w = masked(weights.detach(), mask)
    w = w / w.max().clamp(min=torch.finfo(w.dtype).tiny) if w.numel() else w
    squares, count = w.square().sum(), mask.sum()
    ess = w.sum().square() / (squares * count).clamp(min=torch.finfo(w.dtype).tiny)
    return torch.where(count > 0, ess, torch.ones_like(ess))


def sequence_effective_sample_size(
    proximal: Tensor, behaviour: Tensor, mask: Tensor, lengths: Tensor, cap: float | None = None
) -> Tensor:
    """The same over rows, each weighing exp(sum log w), capped if asked; rows without policy tokens do not count.

    VCPO (2602.17616).
    """
    total = row_sum(log_ratio(proximal.detach(), behaviour.detach(), mask), lengths)
    w = clamped_exp(total)
    return effective_sample_size(w if cap is None else w.clamp(max=cap), row_tokens(mask, lengths) > 0)


def mismatch(proximal: Tensor, behaviour: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """KL(behaviour || proximal) from the sampled tokens, and the tails of w = exp(proximal - behaviour). Scalars.

    `mismatch_kl` is k3 (never negative, low variance), `mismatch_k1` the plain mean of -log w, both in nats a token;
    `ratio_max`, `ratio_min`; `ratio_above_2`, `ratio_below_half`: shares of the policy tokens.
    """
    log_w = log_ratio(proximal.detach(), behaviour.detach(), mask)
    w = clamped_exp(log_w)
    inside = log_w[mask] if mask.any() else log_w.new_zeros(1)
    return {
        "mismatch_kl": masked_mean(w - 1 - log_w, mask),
        "mismatch_k1": masked_mean(-log_w, mask),
        "ratio_max": clamped_exp(inside.max()),
        "ratio_min": clamped_exp(inside.min()),
        "ratio_above_2": share(w > 2, mask),
        "ratio_below_half": share(w < 0.5, mask),
    }


def engine_mismatch(proximal: Tensor, behaviour: Tensor, mask: Tensor, staleness: Tensor) -> dict[str, Tensor]:
    """Difference of engine and learner on the same tokens under the same weights: those of staleness 0. Scalars, nats.

    Empty if there is no such token. Rounding, kernels and number formats differ, the policy does not: in float32 below
    1e-4. A token whose KV cache older weights wrote (`weights.kv: reuse`) counts too, and its difference is then real.
    """
    same = mask & (staleness == 0)
    if not same.any():
        return {}
    apart = (proximal - behaviour)[same].detach().abs()
    return {
        "engine_mismatch_kl": mismatch(proximal, behaviour, same)["mismatch_kl"],
        "engine_mismatch_mean": apart.mean(),
        "engine_mismatch_max": apart.max(),
        "engine_mismatch_tokens": same.sum(),
    }


def off_policy(
    weights: Tensor,
    proximal: Tensor,
    behaviour: Tensor,
    mask: Tensor,
    *,
    staleness: Tensor | None = None,
    clipped: Tensor | None = None,
    buckets: Sequence[int] = STALENESS_BUCKETS,
) -> dict[str, Tensor]:
    """Effective sample size, mismatch and, given `clipped[T]`, the clip fraction.

    Of the batch and, given `staleness[T]` (learner version minus the token's), of each bucket that has tokens, under
    `staleness_<low>[_<high>|_up]/...`. Scalars.
    """

    def of(part: Tensor) -> dict[str, Tensor]:
        numbers = {"ess": effective_sample_size(weights, part), **mismatch(proximal, behaviour, part)}
        if clipped is not None:
            numbers["clip_fraction"] = share(clipped, part)
        return numbers

    report = of(mask)
    if staleness is None:
        return report
    for name, in_bucket in _buckets(staleness, buckets):
        part = mask & in_bucket
        if part.any():
            numbers = of(part) | {"tokens": part.sum()}
            report |= {f"staleness_{name}/{key}": value for key, value in numbers.items()}
    return report


def _buckets(staleness: Tensor, lowest: Sequence[int]) -> Iterator[tuple[str, Tensor]]:
    """Name and tokens [T] of each bucket, from its lowest staleness to below that of the next."""
    for low, above in itertools.pairwise(lowest):
        name = f"{low}" if above == low + 1 else f"{low}_{above - 1}"
        yield name, (staleness >= low) & (staleness < above)
    yield f"{lowest[-1]}_up", staleness >= lowest[-1]
