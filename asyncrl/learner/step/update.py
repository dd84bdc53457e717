"""The passes of one optimizer update: micro-batches in, a gradient in the backend, numbers in the record.

    micro-batches ─> backend: each rank's own ─> loss(i, scores) ─> gradient, summed by the backend
                                                    └> Found ─> added up over the ranks, once ─> Record

A rank computes the loss of its own micro-batches alone. What depends on the whole mini-batch and cannot be computed
row by row (`_at_once`) is computed on every rank alike.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from asyncrl.learner.backends.distribution import alone
from asyncrl.learner.backends.protocol import Packed, Scores, Want
from asyncrl.learner.batch import Batch
from asyncrl.learner.losses.value import ValueInputs
from asyncrl.learner.objective.objective import Norm
from asyncrl.learner.step.critic import Critic, OfValues
from asyncrl.learner.step.demonstrations import Beside
from asyncrl.learner.step.micro_batches import Plan, score
from asyncrl.learner.step.prepare import Step
from asyncrl.learner.step.record import Found, nothing_found
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
        taught = step.objective.teacher.in_updates
        self._found = step.record if alone() else nothing_found(len(step.batch.token_ids), compared=taught)
        """What this rank's micro-batches say"""
        self._beside = Beside(step, number, self._found)
        # The entropy of every update is recorded.
        self._wants: frozenset[Want] = frozenset(("logprobs", "entropy"))
        if taught:
            self._wants |= {"teacher"}
        self._shared_critic = step.critic if step.critic is not None and step.critic.shared else None

    def backward(self) -> None:
        """Leaves the gradient of the mini-batch in the backend and in the critic, and its numbers in the record."""
        at_once = not self._step.objective.row_by_row and len(self._plan.parts) > 1
        if self._step.objective.row_by_row:
            self._by_parts()
        elif at_once:
            self._at_once()
        else:
            self._in_one_pass()
        record = self._step.record
        if self._found is not record:
            record.include(self._found, self.t, self._told(at_once), self._step.backend.add_up)
        self._record_proximal()
        if self._shared_critic is not None:
            self._shared_critic.add_up_gradient()
        elif self._step.critic is not None:
            self._separate_critic(self._step.critic)
        refuse_unusable(record, self._step.batch)

    def _told(self, at_once: bool) -> list[str]:
        """Fields of what was found of tokens that the other ranks do not know."""
        told = ["entropy"]
        if "teacher" in self._wants:
            told.append("teacher")
        if at_once:  # the rest was computed everywhere
            return told
        told += ("current", "weights", "clipped", "keep")
        return told if self._step.reference is None else [*told, "reference_kl"]

    def _record_proximal(self) -> None:
        """Both follow from the current logprobs of the mini-batch."""
        proximal, record, t = self._step.proximal, self._step.record, self.t
        record.anchor[t] = proximal.anchor(self.minibatch, t, record.current[t])
        record.proximal[t] = proximal.recorded(t, record.current[t])

    def _by_parts(self) -> None:
        """Every micro-batch computes its share of the loss from its own scores."""
        step, norm = self._step, self._step.objective.norm(self.minibatch)

        def loss(row_ids: Tensor, scores: Scores) -> Tensor:
            share = norm.take(torch.tensor([self._place[int(row)] for row in row_ids]))
            return self._loss(row_ids, scores, share)

        if parts := self._plan.without_gradient:
            packed = [step.batch.take(row_ids).packed(self._wants) for row_ids in parts]
            step.backend.visit(packed, lambda i, scores: loss(parts[i], scores))
        self._accumulate(lambda i, scores: loss(self._plan.parts[i], scores))

    def _in_one_pass(self) -> None:
        """The only micro-batch holds the whole mini-batch."""
        (row_ids,) = self._plan.parts
        self._accumulate(lambda _, scores: self._loss(row_ids, scores, Norm()))

    def _at_once(self) -> None:
        """The objective is computed once over the mini-batch; the passes carry its gradient into the model.

        A pass without gradient comes first, unless the proximal logprobs are those that it would compute.
        """
        step, found = self._step, self._found
        logprobs = step.proximal.logprobs if self._first else None
        if logprobs is None:
            whole = Plan(self._plan.row_ids, self._plan.parts, [])
            logprobs = score(step.backend, step.batch, [whole]).logprobs
        current = logprobs[self.t].clone().requires_grad_()
        evaluated = self._evaluate(self.minibatch, self.t, current, Norm(), step.record)
        evaluated.backward()  # type: ignore[no-untyped-call]
        taught = step.objective.teacher.in_updates
        lessons = Lessons(step.objective, found, self._teacher_slope() if taught else None)
        slope = torch.zeros_like(logprobs)
        slope[self.t] = current.grad if current.grad is not None else 0.0
        entropy_slope = self._entropy_slope(logprobs)

        def carried(i: int, scores: Scores) -> Tensor:
            t = step.batch.tokens_of(self._plan.parts[i])
            found.entropy[t] = scores.entropy.detach().to("cpu")
            loss = (scores.logprobs.to("cpu") * slope[t]).sum() + self._shared_value_loss(t, scores)
            if taught:
                loss = loss + lessons.loss(step.batch.take(self._plan.parts[i]), t, scores, Norm())
            if entropy_slope is None:
                return loss
            bonus = (scores.entropy.to("cpu") * entropy_slope[t]).sum()
            found.loss += float(bonus.detach())
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

    def _separate_critic(self, critic: Critic) -> None:
        step = self._step
        parts = [step.batch.tokens_of(row_ids) for row_ids in self._plan.parts]
        step.record.value_loss += critic.accumulate(self._packed(), lambda i: self._value_loss(parts[i]))

    def _loss(self, row_ids: Tensor, scores: Scores, norm: Norm) -> Tensor:
        """Objective, entropy bonus and the shared critic's loss of a micro-batch, from its scores."""
        step = self._step
        rows, t = step.batch.take(row_ids), step.batch.tokens_of(row_ids)
        loss = self._evaluate(rows, t, scores.logprobs.to("cpu"), norm, self._found)
        self._found.entropy[t] = scores.entropy.detach().to("cpu")
        if step.objective.teacher.in_updates:
            loss = loss + Lessons(step.objective, self._found).loss(rows, t, scores, norm)
        if step.learner.entropy_coef == 0:
            return loss + self._shared_value_loss(t, scores)
        bonus = step.objective.entropy_bonus(scores.entropy.to("cpu"), rows, norm)
        self._found.loss += float(bonus.detach())
        return loss + (bonus + self._shared_value_loss(t, scores))

    def _evaluate(self, rows: Batch, t: Tensor, current: Tensor, norm: Norm, found: Found) -> Tensor:
        step, detached = self._step, current.detach()
        anchor = step.proximal.anchor(rows, t, detached)
        reference = None if step.reference is None else step.reference.take(t)
        evaluated = step.objective.evaluate(
            rows, step.record.advantages[t], current, anchor, reference, norm, self._generator
        )
        found.current[t] = detached
        found.weights[t], found.keep[t], found.clipped[t] = evaluated.weights, evaluated.keep, evaluated.clipped
        if evaluated.reference_kl is not None:
            found.reference_kl[t] = evaluated.reference_kl
        found.loss += float(evaluated.loss.detach())
        found.policy_loss += float(evaluated.policy_loss)
        return evaluated.loss

    def _shared_value_loss(self, t: Tensor, scores: Scores) -> Tensor:
        if self._shared_critic is None:
            return torch.zeros(())
        loss = self._shared_critic.loss(scores.hidden, self._value_loss(t))
        self._found.value_loss += float(loss.detach())
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
