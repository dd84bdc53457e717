"""Decides whether an update is safe to apply, and at which learning rate.

The decisions keep no state between steps; what the schedule needs, `Schedule` keeps (companions.py).

>>> [round(learning_rate(u, 6, peak=1.0, warmup=2, schedule="linear"), 2) for u in range(6)]
[0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
"""

from __future__ import annotations

import math
from typing import Literal, Protocol

from torch import Tensor

from asyncrl.config.learner import LearnerConfig
from asyncrl.learner.batch import Batch
from asyncrl.learner.step.diagnostics import sequence_effective_sample_size


class Trained(Protocol):
    """A backend or a critic: what has a gradient and an optimizer."""

    def apply(self, lr: float) -> None: ...
    def discard(self) -> None: ...


def refuse(*, ess: float, min_ess: float, loss: float, gradient_norm: float | None = None) -> str | None:
    """Why a batch must not be applied (its outcome is `skipped: guard`, its payload is kept), or None.

    `ess`: normalised effective sample size, in (0, 1]; `gradient_norm` None: not known yet. Numbers that are not finite
    are refused whatever `min_ess` is. With a gradient of exactly 0 there is nothing to apply, and `ess` says nothing.
    """
    if gradient_norm == 0:
        ess = 1.0
    for name, value in (("loss", loss), ("gradient norm", gradient_norm), ("effective sample size", ess)):
        if value is not None and not math.isfinite(value):
            return f"{name} is {value}, expected a finite number"
    if ess < min_ess:
        return (
            f"effective sample size {ess:.3g} is below learner.min_ess {min_ess:.3g}: the batch is too far off-policy. "
            f"Lower buffer.max_staleness (where that is auto, buffer.staleness_limit) or weights.every, or lower "
            f"learner.min_ess"
        )
    return None


def learning_rate_scale(ess: float, *, base_ess: float = 1.0, rule: Literal["sqrt", "linear"] = "sqrt") -> float:
    """VCPO (2602.17616): the factor of one optimizer step's learning rate, s^1/2 or s with s = min(1, ess / base_ess).

    `ess` over sequences (`diagnostics.sequence_effective_sample_size`). base_ess: 1 for maths, 0.55 for tool use in the
    paper. Apply it to the one step and restore the rate.
    """
    if not 0 < base_ess <= 1:
        raise ValueError(f"learning_rate_scale: base_ess is {base_ess}, expected in (0, 1].")
    s = min(1.0, max(ess, 0.0) / base_ess)
    return math.sqrt(s) if rule == "sqrt" else s


def learning_rate(
    update: int, total: int, *, peak: float, warmup: int, schedule: Literal["constant", "cosine", "linear"]
) -> float:
    """Learning rate of update 0..total-1.

    It rises to `peak` over `warmup` updates, then stays, or falls so that at update `total` it is 0.
    """
    if update < warmup:
        return peak * (update + 1) / warmup
    if schedule == "constant" or total <= warmup:
        return peak
    done = min((update - warmup) / (total - warmup), 1.0)
    return peak * (1 - done if schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done)))


def scheduled(learner: LearnerConfig, place: int, number: int, peak: float) -> float:
    """Learning rate of update `number` of the training step that has `place` in the schedule, counted from 0."""
    update, total = place * learner.minibatches + number, learner.steps * learner.minibatches
    return learning_rate(update, total, peak=peak, warmup=learner.warmup_steps, schedule=learner.schedule)


def apply_or_discard(trained: Trained, norm: float, lr: float) -> None:
    """One update with the gradient of that norm; none at all if it is exactly 0, where momentum and weight decay would
    still change the weights."""
    if norm:
        trained.apply(lr)
    else:
        trained.discard()


def ess_scale(learner: LearnerConfig, rows: Batch, current: Tensor) -> float:
    """Factor of the learning rate under `learner.ess_lr`, from the mini-batch's `current[T]` logprobs."""
    if learner.ess_lr == "off":
        return 1.0
    ess = sequence_effective_sample_size(current, rows.behaviour, rows.mask, rows.lengths)
    return learning_rate_scale(float(ess), base_ess=learner.ess_lr_base, rule=learner.ess_lr)
