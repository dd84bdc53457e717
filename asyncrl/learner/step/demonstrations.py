"""Demonstrations beside the groups of a training step: cross entropy with a weight of its own, in every update.

They enter no baseline, no correction and no guard by effective sample size: the groups know nothing of them. An update
takes an equal share of the batch's demonstrations, and divides by the tokens of that share.
"""

from __future__ import annotations

from torch import Tensor

from asyncrl.config.learner import LearnerConfig
from asyncrl.learner.backends.protocol import Packed, Scores, Want
from asyncrl.learner.ragged import masked
from asyncrl.learner.step.apply import learning_rate
from asyncrl.learner.step.micro_batches import minibatches, plan
from asyncrl.learner.step.prepare import Step
from asyncrl.learner.step.record import Found

WANTS: frozenset[Want] = frozenset(("logprobs", "entropy"))


def weight_at(learner: LearnerConfig, version: int) -> float:
    """The weight in the step from `version` on."""
    of = learner.demonstrations
    return learning_rate(version, learner.steps, peak=of.weight, warmup=0, schedule=of.schedule)


class Beside:
    """The demonstrations of update `number` of a step."""

    def __init__(self, step: Step, number: int, found: Found) -> None:
        """`found`: where the losses are recorded."""
        self._found = found
        self._weight = weight_at(step.learner, step.version)
        self._shown = step.batch.demonstrations
        self._parts: list[Tensor] = []
        if self._shown is None or not self._weight:
            return
        step.record.shown_weight = self._weight
        shares = minibatches(self._shown, len(step.plans))
        if number < len(shares):
            limit, ranks = step.learner.tokens_per_micro_batch, step.backend.dp_size
            self._parts = plan(self._shown, shares[number], limit, ranks, None).parts
            self._tokens = float(self._shown.take(shares[number]).mask.sum())

    def packed(self) -> list[Packed]:
        """The micro-batches; none if there are no demonstrations, or their weight is 0."""
        return [] if self._shown is None else [self._shown.take(row_ids).packed(WANTS) for row_ids in self._parts]

    def loss(self, part: int, scores: Scores) -> Tensor:
        """The share of micro-batch `part` in the objective, a scalar with gradient."""
        assert self._shown is not None
        mask = self._shown.take(self._parts[part]).mask
        nats = -masked(scores.logprobs.to("cpu"), mask).sum()
        self._found.shown_nats += float(nats.detach())
        self._found.shown_tokens += int(mask.sum())
        loss = self._weight * nats / self._tokens
        self._found.loss += float(loss.detach())
        return loss
