"""The logprobs that the current policy is compared with: proximal, its anchor in the loss, and the KL reference.

proximal    the learner at the start of the training step; computed before the first update where an estimator
            reads it, or where `recompute` needs it
anchor      what the loss and the corrections take for the proximal logprobs:

learner.proximal   one update                      several updates
recompute          the current logprobs (*)        computed before the first update
approximate        the current logprobs (*)        between behaviour and current (A-3PO)
behaviour          the behaviour logprobs          the behaviour logprobs

(*) Before its only update, the current policy is the proximal one. A loss that is not row by row, over several
    micro-batches, has them computed in a pass of their own under `recompute`. Whatever was computed for an
    estimator is the anchor of `recompute` and `approximate` too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from asyncrl.config.learner import LearnerConfig
from asyncrl.learner.backends.protocol import Backend, Scores, Want
from asyncrl.learner.batch import Batch
from asyncrl.learner.objective.objective import Objective, Reference
from asyncrl.learner.step.micro_batches import Plan, score


@dataclass(frozen=True, slots=True)
class Proximal:
    """The proximal logprobs of one training step, as the loss and the record take them."""

    logprobs: Tensor | None
    """[T], where they were computed before the first update"""
    behaviour: bool
    """`learner.proximal: behaviour`"""
    several: bool
    """The step has several updates"""
    version: int
    """The learner's at the start of the step"""

    def anchor(self, rows: Batch, t: Tensor, current: Tensor) -> Tensor:
        """[t] for `rows`, whose tokens are at `t`; `current[t]` carries no gradient."""
        if self.behaviour:
            return rows.behaviour
        if self.logprobs is not None:
            return self.logprobs[t]
        if self.several:
            return approximate_proximal(rows.behaviour, current, rows.versions, self.version)
        return current

    def recorded(self, t: Tensor, current: Tensor) -> Tensor:
        """[t] for the record: computed before the first update, or else the learner's as the update had them. An
        approximation lies near the behaviour logprobs and would hide how far the learner is from them."""
        return current if self.logprobs is None else self.logprobs[t]


def score_proximal(
    backend: Backend, objective: Objective, batch: Batch, learner: LearnerConfig, plans: Sequence[Plan]
) -> Scores | None:
    """Scores of the learner at the start of the step, or None where nothing reads them."""
    spans_micro_batches = not objective.row_by_row and any(len(plan.parts) > 1 for plan in plans)
    is_anchor = learner.proximal == "recompute" and (len(plans) > 1 or spans_micro_batches)
    if objective.supervised or not (objective.advantage_needs_logprobs or is_anchor):
        return None
    wants: frozenset[Want] = frozenset(
        ("logprobs", "sum_pi_sq") if objective.advantage_needs_sum_pi_sq else ("logprobs",)
    )
    if objective.teacher.in_advantage:
        wants |= {"teacher"}
    return score(backend, batch, plans, wants=wants)


def score_reference(
    backend: Backend, batch: Batch, learner: LearnerConfig, plans: Sequence[Plan], coefficient: float
) -> Reference | None:
    """The KL reference, or None without a KL term."""
    if learner.kl_coef == 0:
        return None
    return Reference(score(backend, batch, plans, reference=True).logprobs, coefficient)


def approximate_proximal(behaviour: Tensor, current: Tensor, token_versions: Tensor, version: int) -> Tensor:
    """A-3PO: proximal logprobs without the forward pass that computes them, `[T]`, constant.

    Log-linear between the policy that sampled the token and the one being optimised (2512.06547; AReaL `loglinear`).
    The learner makes version + 1 out of `version`, and a token was sampled at u = `token_versions[T]`: the proximal
    policy lies alpha = (version - u) / (version + 1 - u) of the way from behaviour to current, alpha within [0, 1], and
    0 for a token without a version (u < 0). At u = version it is the behaviour itself.
    """
    steps = (version + 1 - token_versions).to(behaviour.dtype)
    alpha = torch.where(steps > 0, (steps - 1) / steps.clamp(min=1), 0.0).clamp(0, 1)
    alpha = torch.where(token_versions < 0, 0.0, alpha)
    return (behaviour + alpha * (current.detach() - behaviour)).detach()
