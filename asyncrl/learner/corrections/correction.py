"""What an off-policy correction receives, returns and declares, and how several become one."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from asyncrl.learner.declared import Function, declare, declared
from asyncrl.learner.ragged import check_flat, log_ratio, masked, masked_mean, share


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionInputs:
    """Some rows of a mini-batch, or all of them: `[T]` tokens in `[B]` rows. Nothing carries a gradient."""

    proximal: Tensor
    """[T] float: logprobs under the learner's weights at the start of the training step (`learner.proximal`)"""
    behaviour: Tensor
    """[T] float: the same under the weights that sampled the token, as the engine reported them"""
    current: Tensor
    """[T] float: the same under the weights being optimised"""
    advantages: Tensor
    """[T] float"""
    mask: Tensor
    """[T] bool: policy tokens that carry loss. Elsewhere the other tensors may hold anything, NaN too"""
    lengths: Tensor
    """[B] int64: tokens of each row"""

    def __post_init__(self) -> None:
        check_flat(
            "CorrectionInputs",
            self.mask,
            self.lengths,
            proximal=self.proximal,
            behaviour=self.behaviour,
            current=self.current,
            advantages=self.advantages,
        )

    def log_weights(self) -> Tensor:
        """log w = proximal - behaviour, `[T]`, 0 outside the mask, constant; clamp it before exp, after any sum."""
        return log_ratio(self.proximal.detach(), self.behaviour.detach(), self.mask)


@dataclass(frozen=True, slots=True)
class Correction:
    """The factor of each token's loss, and which tokens to keep."""

    weights: Tensor
    """[T] at least 0, constant; exactly 0 outside the mask and where `keep` is false."""

    keep: Tensor
    """[T] bool, false outside the mask."""

    metrics: dict[str, Tensor]
    """Detached scalars, named `correction/what`."""


CorrectionFunction = Callable[..., Correction]
"""`(inputs: CorrectionInputs, *, options) -> Correction`"""


@dataclass(frozen=True, slots=True)
class CorrectionProperties:
    """What a correction declares with `@correction`; the defaults hold for a function that declares nothing."""

    row_by_row: bool = False
    """The weights of a row depend on that row alone, so each micro-batch can compute its own."""
    except_with: tuple[str, ...] = ()
    """Options which, when set, make the correction look at all rows after all."""

    def row_by_row_with(self, options: Mapping[str, Any]) -> bool:
        return self.row_by_row and not any(options.get(name) for name in self.except_with)


def correction(*, row_by_row: bool = False, except_with: tuple[str, ...] = ()) -> Callable[[Function], Function]:
    """Declares the properties of a correction."""
    return declare(CorrectionProperties(row_by_row, except_with))


def properties_of(function: CorrectionFunction) -> CorrectionProperties:
    return declared(function, CorrectionProperties())


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


def within_mask(
    name: str, weights: Tensor, keep: Tensor, mask: Tensor, metrics: dict[str, Tensor] | None = None
) -> Correction:
    """A Correction as its fields promise: constant, 0 outside `keep`, `keep` within the mask, metrics named."""
    keep = keep & mask
    weights = masked(weights, keep)
    named = {
        "kept": share(keep, mask),
        "weight_mean": masked_mean(weights, mask),
        "weight_max": weights.max() if weights.numel() else weights.sum(),
    } | (metrics or {})
    return Correction(weights, keep, {f"{name}/{key}": value for key, value in named.items()})


def within_bounds(where: str, x: Tensor, low: float | None, high: float | None) -> Tensor:
    """low <= x <= high, `[T]` bool; None is no bound."""
    if low is not None and high is not None and low > high:
        raise ValueError(f"{where}: low {low} is above high {high}. Swap them.")
    keep = torch.ones_like(x, dtype=torch.bool)
    if low is not None:
        keep &= x >= low
    if high is not None:
        keep &= x <= high
    return keep
