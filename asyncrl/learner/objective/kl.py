"""KL(policy || reference) estimated from the sampled tokens, and controllers of its coefficient.

With x = logprobs - reference of the sampled token (Schulman, joschu.net/blog/kl-approx.html):

    k1   x                 unbiased value, high variance; as a loss its gradient has mean 0, so it has no effect
    abs  |x|
    k2   x² / 2            biased value; its gradient is the right one on-policy
    k3   e^-x - 1 + x      unbiased value, low variance, never negative; its gradient is the reverse direction's

A `+` (verl) keeps the value and takes the gradient of k2, straight through.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from asyncrl.learner.ragged import LOG_RATIO_LIMIT, clamped_exp, masked


def k1(logprobs: Tensor, reference: Tensor, *, limit: float | None = None) -> Tensor:
    """x, `[T]`, clamped to ±`limit` if given. verl, AReaL, slime; NeMo at 10."""
    return limited(logprobs - reference.detach(), limit)


def abs_kl(logprobs: Tensor, reference: Tensor, *, limit: float | None = None) -> Tensor:
    """|x|, `[T]`, at most `limit`. verl, SkyRL."""
    return limited((logprobs - reference.detach()).abs(), limit)


def k2(logprobs: Tensor, reference: Tensor, *, limit: float | None = None) -> Tensor:
    """x² / 2, `[T]`, at most `limit`. verl (`mse`), AReaL; NeMo at 10."""
    return limited(0.5 * (logprobs - reference.detach()).square(), limit)


def k3(logprobs: Tensor, reference: Tensor, *, limit: float | None = 10.0) -> Tensor:
    """e^-x - 1 + x, `[T]`, with -x clamped to ±20 before exp.

    `limit`: the result is clamped to it, and has no gradient there: 10 in verl, SkyRL, NeMo, AReaL, slime's
    `low_var_kl`; None in TRL and slime's `k3`.
    """
    y = (reference.detach() - logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return limited(y.exp() - y - 1, limit)


def limited(kl: Tensor, limit: float | None) -> Tensor:
    """`kl[T]` clamped to ±`limit`, without gradient where the clamp acts; None: as it is."""
    return kl if limit is None else kl.clamp(-limit, limit)


def _straight_through(estimate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(estimate)
    def plus(logprobs: Tensor, reference: Tensor, **options: float | None) -> Tensor:
        gradient = k2(logprobs, reference)
        return estimate(logprobs, reference, **options).detach() + gradient - gradient.detach()

    return plus


KL: dict[str, Callable[..., Tensor]] = {"k1": k1, "abs": abs_kl, "k2": k2, "k3": k3}
LIMITS: dict[str, float | None] = {"k3": 10.0, "k3+": 10.0}
"""The default of `limit`, where it is not None."""
KL |= {f"{name}+": _straight_through(estimate) for name, estimate in KL.items()}


def unbiased(kl: Tensor, current: Tensor, sampled_under: Tensor) -> Tensor:
    """r * kl with r = exp(current - sampled_under) carrying gradient, `[T]`: the KL, from another policy's tokens.

    DeepSeek-V3.2 (2512.02556); slime `--use-unbiased-kl`, TRL `use_bias_correction_kl`.
    """
    return clamped_exp(current - sampled_under.detach()) * kl


def penalise_rewards(rewards: Tensor, kl: Tensor, mask: Tensor, coefficient: float) -> Tensor:
    """KL in the reward: `rewards[T] - coefficient * kl[T]` on policy tokens, constant.

    (KL in the loss: add `coefficient * kl` per token to the policy loss before it is aggregated.)
    """
    return rewards - coefficient * masked(kl.detach(), mask).to(rewards.dtype)


class Controller(Protocol):
    """Sets the coefficient; `value` is its whole state."""

    value: float

    def update(self, measured: float, steps: int) -> None: ...


@dataclass(slots=True)
class FixedKL:
    """A constant coefficient."""

    value: float

    def update(self, measured: float, steps: int) -> None:
        """Does nothing."""


@dataclass(slots=True)
class AdaptiveKL:
    """Steered to a target KL (1909.08593): value *= 1 + clip(measured / target - 1, ±0.2) * steps / horizon."""

    value: float
    target: float
    horizon: int = 10_000

    def __post_init__(self) -> None:
        if self.target <= 0 or self.horizon <= 0:
            raise ValueError(f"AdaptiveKL: target {self.target}, horizon {self.horizon}: both must be above 0.")

    def update(self, measured: float, steps: int) -> None:
        """`measured`: the mean KL of the step, in nats a token; `steps`: samples it was measured on."""
        error = min(max(measured / self.target - 1, -0.2), 0.2)
        self.value *= 1 + error * steps / self.horizon


CONTROLLERS: dict[str, Callable[..., Controller]] = {"fixed": FixedKL, "adaptive": AdaptiveKL}
