"""What every off-policy correction returns, and how several become one."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from asyncrl.learner.ragged import check_flat, log_ratio, masked, masked_mean, share


@dataclass(frozen=True, slots=True)
class Correction:
    """What to multiply each token's loss by, and which tokens to keep."""

    weights: Tensor
    """[T] at least 0, constant; exactly 0 outside the mask and where `keep` is false."""

    keep: Tensor
    """[T] bool, false outside the mask."""

    metrics: dict[str, Tensor]
    """Detached scalars, named `correction/what`."""


def compose(corrections: Sequence[Correction]) -> Correction:
    """Several corrections as one: weights multiply, a token is kept if all keep it. Raises ValueError for none at all.

    A metric's name that occurs twice gets `_2`, `_3` in the order of the list.
    """
    if not corrections:
        raise ValueError("compose: the list of corrections is empty. Use the correction 'none'.")
    metrics: dict[str, Tensor] = {}
    for one in corrections:
        for name, value in one.metrics.items():
            times = next(n for n in itertools.count(1) if _nth(name, n) not in metrics)
            metrics[_nth(name, times)] = value
    keep = functools.reduce(torch.logical_and, [c.keep for c in corrections])
    weights = functools.reduce(torch.mul, [c.weights for c in corrections])
    return Correction(masked(weights, keep), keep, metrics)


def _nth(name: str, times: int) -> str:
    return name if times == 1 else f"{name}_{times}"


def correction(
    name: str, weights: Tensor, keep: Tensor, mask: Tensor, metrics: dict[str, Tensor] | None = None
) -> Correction:
    """A Correction that keeps its promises: constant, 0 outside `keep`, `keep` within the mask, metrics named."""
    keep = keep & mask
    weights = masked(weights, keep)
    named = {
        "kept": share(keep, mask),
        "weight_mean": masked_mean(weights, mask),
        "weight_max": weights.max() if weights.numel() else weights.sum(),
    } | (metrics or {})
    return Correction(weights, keep, {f"{name}/{key}": value for key, value in named.items()})


def log_weights(where: str, proximal: Tensor, behaviour: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
    """log w = proximal - behaviour, `[T]`, 0 outside the mask, constant; clamp it before exp, after any sum."""
    check_flat(where, mask, lengths, proximal=proximal, behaviour=behaviour)
    return log_ratio(proximal.detach(), behaviour.detach(), mask)


def within(where: str, x: Tensor, low: float | None, high: float | None) -> Tensor:
    """low <= x <= high, `[T]` bool; None is no bound."""
    if low is not None and high is not None and low > high:
        raise ValueError(f"{where}: low {low} is above high {high}. Swap them.")
    keep = torch.ones_like(x, dtype=torch.bool)
    if low is not None:
        keep &= x >= low
    if high is not None:
        keep &= x <= high
    return keep
