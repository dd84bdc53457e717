"""The passes of one optimizer update: micro-batches in, a gradient in the backend, numbers in the record."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from asyncrl.config.learner import LearnerConfig
from asyncrl.learner.backends.protocol import Backend, Packed, Scores, Want
from asyncrl.learner.batch import Batch
from asyncrl.learner.losses.value import ValueInputs
from asyncrl.learner.objective.objective import Norm, Objective, Reference
from asyncrl.learner.step.critic import Critic, OfValues
from asyncrl.learner.step.micro_batches import Plan, score
from asyncrl.learner.step.record import Record

Anchor = Callable[[Batch, Tensor, Tensor], Tensor]
"""(rows, their tokens' indices [t], current[t] detached) -> what the loss takes for the proximal logprobs [t]"""


@dataclass(frozen=True, slots=True)
class Step:
    """What the updates of one training step share."""

    backend: Backend
    objective: Objective
    batch: Batch
    learner: LearnerConfig
    record: Record
    proximal: Tensor | None
    """[T], where it was computed before the first update"""
    anchor: Anchor
    reference: Reference | None
    critic: Critic | None


class Update:
    """Of one mini-batch: the rows [b], planned. `seed`: the version, and the number of the update in the step."""

    def __init__(self, step: Step, rows: Tensor, plan: Plan, seed: tuple[int, int]) -> None:
        self._step, self._backend, self._objective = step, step.backend, step.objective
        self._batch, self._learner, self._record = step.batch, step.learner, step.record
        self._parts, self._silent = plan.parts, plan.silent
        self._minibatch = step.batch.take(rows)
        self.tokens = step.batch.tokens_of(rows)
        self._tokens_with_loss = float(self._minibatch.mask.sum())
        self._at = {int(row): i for i, row in enumerate(rows)}
        self._generator = torch.Generator().manual_seed((step.learner.seed * 1_000_003 + seed[0]) * 1009 + seed[1])
        self._token_weights = step.objective.token_weights(step.batch)
        self._shared = step.critic if step.critic is not None and step.critic.shared else None

    def by_parts(self) -> None:
        """Every micro-batch computes its share of the loss from its own scores."""
        norm = self._objective.norm(self._minibatch)

        def loss(part: Tensor, scores: Scores) -> Tensor:
            rows = self._batch.take(part)
            t = self._batch.tokens_of(part)
            share = norm.take(torch.tensor([self._at[int(r)] for r in part]))
            return self._evaluate(rows, t, scores.logprobs.to("cpu"), share) + self._extras(rows, t, scores, share)

        if self._silent:
            silent = self._backend.logprobs([self._batch.take(part).packed() for part in self._silent])
            for part, scores in zip(self._silent, silent, strict=True):
                loss(part, scores)
        self._backend.accumulate(self._packed(), lambda i, scores: loss(self._parts[i], scores))

    def whole(self, *, first: bool) -> None:
        """The objective is computed once over the mini-batch; the passes carry its gradient into the model.

        With one micro-batch that is one pass. With more, a pass without gradient comes first, unless the proximal
        logprobs already are what it would find.
        """
        if len(self._parts) == 1:
            rows, t = self._batch.take(self._parts[0]), self._batch.tokens_of(self._parts[0])
            norm = Norm()

            def direct(_: int, scores: Scores) -> Tensor:
                return self._evaluate(rows, t, scores.logprobs.to("cpu"), norm) + self._extras(rows, t, scores, norm)

            self._backend.accumulate(self._packed(), direct)
            return
        known = self._step.proximal if first else None
        seen = score(self._backend, self._batch, [Plan(self._parts, [])]).logprobs if known is None else known
        current = seen[self.tokens].clone().requires_grad_()
        self._evaluate(self._minibatch, self.tokens, current, Norm()).backward()  # type: ignore[no-untyped-call]
        slope = torch.zeros_like(seen)
        slope[self.tokens] = current.grad if current.grad is not None else 0.0
        entropy_slope = None
        if self._learner.entropy_coef:
            entropy = torch.zeros_like(seen).requires_grad_()
            self._objective.entropy_bonus(entropy[self.tokens], self._minibatch, Norm()).backward()  # type: ignore[no-untyped-call]
            entropy_slope = entropy.grad

        def carried(i: int, scores: Scores) -> Tensor:
            t = self._batch.tokens_of(self._parts[i])
            self._record.entropy[t] = scores.entropy.detach().to("cpu")
            pulled = (scores.logprobs.to("cpu") * slope[t]).sum() + self._values(t, scores)
            if entropy_slope is None:
                return pulled
            bonus = (scores.entropy.to("cpu") * entropy_slope[t]).sum()
            self._record.loss += float(bonus.detach())
            return pulled + bonus

        self._backend.accumulate(self._packed(), carried)

    def critic(self) -> None:
        """The separate critic's own passes."""
        critic = self._step.critic
        if critic is None or critic.shared:
            return
        parts = [self._batch.tokens_of(rows) for rows in self._parts]
        self._record.value_loss += critic.accumulate(self._packed(), lambda i: self._value_loss(parts[i]))

    def _evaluate(self, rows: Batch, t: Tensor, current: Tensor, norm: Norm) -> Tensor:
        record, step = self._record, self._step
        anchor = step.anchor(rows, t, current.detach())
        reference = None if step.reference is None else step.reference.take(t)
        found = self._objective.evaluate(rows, record.advantages[t], current, anchor, reference, norm, self._generator)
        record.anchor[t], record.current[t] = anchor, current.detach()
        if step.proximal is None:
            record.proximal[t] = current.detach() if self._learner.proximal == "behaviour" else anchor
        record.weights[t], record.keep[t], record.clipped[t] = found.weights, found.keep, found.clipped
        if found.reference_kl is not None:
            record.reference_kl[t] = found.reference_kl
        record.loss += float(found.loss.detach())
        record.policy_loss += float(found.policy_loss)
        return found.loss

    def _extras(self, rows: Batch, t: Tensor, scores: Scores, norm: Norm) -> Tensor:
        """The entropy bonus and the shared critic's loss."""
        self._record.entropy[t] = scores.entropy.detach().to("cpu")
        if self._learner.entropy_coef == 0:
            return self._values(t, scores)
        bonus = self._objective.entropy_bonus(scores.entropy.to("cpu"), rows, norm)
        self._record.loss += float(bonus.detach())
        return bonus + self._values(t, scores)

    def _values(self, t: Tensor, scores: Scores) -> Tensor:
        if self._shared is None:
            return torch.zeros(())
        found = self._shared.loss(scores.hidden, self._value_loss(t))
        self._record.value_loss += float(found.detach())
        return found

    def _value_loss(self, t: Tensor) -> OfValues:
        record, mask = self._record, self._batch.mask[t]
        sampled = self._batch.sampled[t].nonzero()[:, 0]
        assert record.values is not None
        old, returns = record.values[t], record.returns[t]
        weights = None if self._token_weights is None else self._token_weights[t]

        def of_values(values: Tensor) -> Tensor:
            on_tokens = torch.zeros(len(t)).index_put((sampled,), values.to("cpu"))
            return self._objective.value_loss(
                ValueInputs(on_tokens, old, returns, mask, self._tokens_with_loss, weights)
            )

        return of_values

    def _packed(self) -> list[Packed]:
        wants: frozenset[Want] = frozenset(("logprobs",) if self._shared is None else ("logprobs", "hidden"))
        return [self._batch.take(rows).packed(wants) for rows in self._parts]
