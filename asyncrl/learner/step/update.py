"""The passes of one optimizer update: micro-batches in, a gradient in the backend, numbers in the record."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from asyncrl.learner.backends.protocol import Packed, Scores, Want
from asyncrl.learner.batch import Batch
from asyncrl.learner.losses.value import ValueInputs
from asyncrl.learner.objective.objective import Norm
from asyncrl.learner.step.critic import OfValues
from asyncrl.learner.step.demonstrations import Beside
from asyncrl.learner.step.micro_batches import Plan, score
from asyncrl.learner.step.prepare import Step
from asyncrl.learner.step.teacher import Lessons, refuse_unusable, slope_of


class Update:
    """The update from mini-batch `number` of a step."""

    def __init__(self, step: Step, number: int) -> None:
        self._step, self._first = step, number == 0
        self._plan = step.plans[number]
        self.minibatch = step.batch.take(self._plan.row_ids)
        self.t = step.batch.tokens_of(self._plan.row_ids)
        """[t]: indices of the mini-batch's tokens in the batch"""
        self._tokens_with_loss = float(self.minibatch.mask.sum())
        self._place = {int(row): i for i, row in enumerate(self._plan.row_ids)}
        self._generator = torch.Generator().manual_seed((step.learner.seed * 1_000_003 + step.version) * 1009 + number)
        self._token_weights = step.objective.token_weights(step.batch)
        self._beside = Beside(step, number)
        # The entropy of every update is recorded.
        self._wants: frozenset[Want] = frozenset(("logprobs", "entropy"))
        if step.objective.teacher.in_updates:
            self._wants |= {"teacher"}
        self._shared_critic = step.critic if step.critic is not None and step.critic.shared else None

    def backward(self) -> None:
        """Leaves the gradient of the mini-batch in the backend and in the critic."""
        if self._step.objective.row_by_row:
            self._by_parts()
        elif len(self._plan.parts) == 1:
            self._in_one_pass()
        else:
            self._at_once()
        if self._step.critic is not None and not self._step.critic.shared:
            self._separate_critic()
        refuse_unusable(self._step.record, self._step.batch)

    def _by_parts(self) -> None:
        """Every micro-batch computes its share of the loss from its own scores."""
        step, norm = self._step, self._step.objective.norm(self.minibatch)

        def loss(row_ids: Tensor, scores: Scores) -> Tensor:
            share = norm.take(torch.tensor([self._place[int(row)] for row in row_ids]))
            return self._loss(row_ids, scores, share)

        if parts := self._plan.without_gradient:
            scored = step.backend.logprobs([step.batch.take(row_ids).packed(self._wants) for row_ids in parts])
            for row_ids, scores in zip(parts, scored, strict=True):
                loss(row_ids, scores)
        self._accumulate(lambda i, scores: loss(self._plan.parts[i], scores))

    def _in_one_pass(self) -> None:
        """The only micro-batch holds the whole mini-batch."""
        (row_ids,) = self._plan.parts
        self._accumulate(lambda _, scores: self._loss(row_ids, scores, Norm()))

    def _at_once(self) -> None:
        """The objective is computed once over the mini-batch; the passes carry its gradient into the model.

        A pass without gradient comes first, unless the proximal logprobs are those that it would compute.
        """
        step, record = self._step, self._step.record
        logprobs = step.proximal.logprobs if self._first else None
        if logprobs is None:
            whole = Plan(self._plan.row_ids, self._plan.parts, [])
            logprobs = score(step.backend, step.batch, [whole]).logprobs
        current = logprobs[self.t].clone().requires_grad_()
        self._evaluate(self.minibatch, self.t, current, Norm()).backward()  # type: ignore[no-untyped-call]
        taught = step.objective.teacher.in_updates
        lessons = Lessons(step.objective, record, self._teacher_slope() if taught else None)
        slope = torch.zeros_like(logprobs)
        slope[self.t] = current.grad if current.grad is not None else 0.0
        entropy_slope = self._entropy_slope(logprobs)

        def carried(i: int, scores: Scores) -> Tensor:
            t = step.batch.tokens_of(self._plan.parts[i])
            record.entropy[t] = scores.entropy.detach().to("cpu")
            loss = (scores.logprobs.to("cpu") * slope[t]).sum() + self._shared_value_loss(t, scores)
            if taught:
                loss = loss + lessons.loss(step.batch.take(self._plan.parts[i]), t, scores, Norm())
            if entropy_slope is None:
                return loss
            bonus = (scores.entropy.to("cpu") * entropy_slope[t]).sum()
            record.loss += float(bonus.detach())
            return loss + bonus

        self._accumulate(carried)

    def _accumulate(self, loss: Callable[[int, Scores], Tensor]) -> None:
        """Forward and backward of the mini-batch, `loss(i, scores)` for part i, and of the demonstrations beside it.

        These have calls of their own, since no teacher and no critic reads them: ranks that compute at the same time
        must want the same.
        """
        self._step.backend.accumulate(self._packed(), loss)
        if beside := self._beside.packed():
            self._step.backend.accumulate(beside, self._beside.loss)

    def _entropy_slope(self, logprobs: Tensor) -> Tensor | None:
        """Gradient of the entropy bonus by each token's entropy, `[T]`."""
        if not self._step.learner.entropy_coef:
            return None
        entropy = torch.zeros_like(logprobs).requires_grad_()
        bonus = self._step.objective.entropy_bonus(entropy[self.t], self.minibatch, Norm())
        bonus.backward()  # type: ignore[no-untyped-call]
        return entropy.grad

    def _separate_critic(self) -> None:
        step = self._step
        assert step.critic is not None
        parts = [step.batch.tokens_of(row_ids) for row_ids in self._plan.parts]
        step.record.value_loss += step.critic.accumulate(self._packed(), lambda i: self._value_loss(parts[i]))

    def _loss(self, row_ids: Tensor, scores: Scores, norm: Norm) -> Tensor:
        """Objective, entropy bonus and the shared critic's loss of a micro-batch, from its scores."""
        step = self._step
        rows, t = step.batch.take(row_ids), step.batch.tokens_of(row_ids)
        loss = self._evaluate(rows, t, scores.logprobs.to("cpu"), norm)
        step.record.entropy[t] = scores.entropy.detach().to("cpu")
        if step.objective.teacher.in_updates:
            loss = loss + Lessons(step.objective, step.record).loss(rows, t, scores, norm)
        if step.learner.entropy_coef == 0:
            return loss + self._shared_value_loss(t, scores)
        bonus = step.objective.entropy_bonus(scores.entropy.to("cpu"), rows, norm)
        step.record.loss += float(bonus.detach())
        return loss + (bonus + self._shared_value_loss(t, scores))

    def _evaluate(self, rows: Batch, t: Tensor, current: Tensor, norm: Norm) -> Tensor:
        step, record = self._step, self._step.record
        detached = current.detach()
        anchor = step.proximal.anchor(rows, t, detached)
        reference = None if step.reference is None else step.reference.take(t)
        evaluated = step.objective.evaluate(
            rows, record.advantages[t], current, anchor, reference, norm, self._generator
        )
        record.anchor[t], record.current[t] = anchor, detached
        record.proximal[t] = step.proximal.recorded(t, anchor, detached)
        record.weights[t], record.keep[t], record.clipped[t] = evaluated.weights, evaluated.keep, evaluated.clipped
        if evaluated.reference_kl is not None:
            record.reference_kl[t] = evaluated.reference_kl
        record.loss += float(evaluated.loss.detach())
        record.policy_loss += float(evaluated.policy_loss)
        return evaluated.loss

    def _shared_value_loss(self, t: Tensor, scores: Scores) -> Tensor:
        if self._shared_critic is None:
            return torch.zeros(())
        loss = self._shared_critic.loss(scores.hidden, self._value_loss(t))
        self._step.record.value_loss += float(loss.detach())
        return loss

    def _value_loss(self, t: Tensor) -> OfValues:
        record, batch = self._step.record, self._step.batch
        mask, sampled = batch.mask[t], batch.sampled[t].nonzero()[:, 0]
        assert record.values is not None
        old, returns = record.values[t], record.returns[t]
        weights = None if self._token_weights is None else self._token_weights[t]

        def of_values(values: Tensor) -> Tensor:
            on_tokens = torch.zeros(len(t)).index_put((sampled,), values.to("cpu"))
            return self._step.objective.value_loss(
                ValueInputs(on_tokens, old, returns, mask, self._tokens_with_loss, weights)
            )

        return of_values

    def _packed(self) -> list[Packed]:
        wants = self._wants
        if self._shared_critic is not None:
            wants |= {"hidden"}
        return [self._step.batch.take(row_ids).packed(wants) for row_ids in self._plan.parts]

    def _teacher_slope(self) -> Tensor:
        return slope_of(self._step.objective, self.minibatch, self.t, len(self._step.batch.token_ids))
