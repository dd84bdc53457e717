"""One training step: a batch in, a policy version out, or nothing at all.

    batch ─> advantages ─> for each mini-batch:   micro-batches ─> scores ─> corrections, loss ─> gradient
                                                  guard ─> clip ─> AdamW

Three logprobs of a token are kept apart: behaviour (who sampled it, from the trajectory), proximal (the learner at the
start of the step) and current (the learner now). With one mini-batch the proximal logprobs are the current ones,
detached, and no forward pass is made for them; `learner.proximal` names other anchors for the loss. How rows are cut
into micro-batches does not change the result. Rows without any advantage (groups whose rewards are all equal: many,
once a task is nearly solved) have no gradient, so they are scored for the record and not differentiated.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from asyncrl.config import LearnerConfig
from asyncrl.learner.approximate_proximal import approximate_proximal
from asyncrl.learner.backends.protocol import Backend, Packed, Scores
from asyncrl.learner.batch import Batch
from asyncrl.learner.diagnostics import effective_sample_size, sequence_effective_sample_size
from asyncrl.learner.guard import learning_rate_scale, refuse
from asyncrl.learner.objective import Norm, Objective
from asyncrl.learner.packing import pack
from asyncrl.learner.ragged import row_sum
from asyncrl.learner.schedule import learning_rate

Outcome = Literal["applied", "guard"]


@dataclass(slots=True)
class Record:
    """What the step saw of each token, filled in as micro-batches pass: of its last update where there were several."""

    advantages: Tensor
    proximal: Tensor
    """[T] float32, like all below but the bools: the learner at the start of the step; where nobody computed that, at
    its last update, or as approximated"""
    anchor: Tensor
    """What the loss took for it: the behaviour under `learner.proximal: behaviour`, else the same"""
    current: Tensor
    entropy: Tensor
    weights: Tensor
    reference_kl: Tensor
    clipped: Tensor
    """[T] bool"""
    keep: Tensor
    """[T] bool"""
    loss: float = 0.0
    """Summed over the updates, like policy_loss"""
    policy_loss: float = 0.0
    grad_norms: list[float] = field(default_factory=list)
    lr: float = 0.0
    lr_scale: float = 1.0
    """Of the last update, under `learner.ess_lr`"""
    proximal_s: float = 0.0


@dataclass(frozen=True, slots=True)
class StepResult:
    outcome: Outcome
    why: str
    """Of a guard: which number was refused."""
    record: Record
    compute_s: float


def train_step(
    backend: Backend, objective: Objective, batch: Batch, learner: LearnerConfig, *, version: int
) -> StepResult:
    """Takes the policy from `version` to `version + 1`. Under outcome `guard` weights and optimizer are as before."""
    started = time.perf_counter()
    updates = _minibatches(batch, learner.minibatches)
    limit = learner.tokens_per_micro_batch
    advantages = None if objective.advantage_needs_logprobs else objective.advantages(batch, None)
    plans = [
        _plan(batch, rows, limit, backend.dp_size, advantages if objective.linear_in_advantage else None)
        for rows in updates
    ]
    # Several updates move the current policy away from the proximal one; what spans rows needs all of them at once.
    spans_passes = not objective.row_by_row and any(len(plan.parts) > 1 for plan in plans)
    known = advantages is None or (learner.proximal == "recompute" and (len(updates) > 1 or spans_passes))
    proximal = _score_all(backend, batch, plans) if known else None
    if advantages is None:
        advantages = objective.advantages(batch, proximal)
    record = _blank(batch, advantages, proximal)
    record.proximal_s = time.perf_counter() - started if known else 0.0
    reference = _score_all(backend, batch, plans, reference=True) if learner.kl_coef > 0 else None

    why = ""
    anchor = _anchor(learner, proximal, version, several=len(updates) > 1)
    if len(updates) > 1:
        backend.mark()
    for i, (rows, plan) in enumerate(zip(updates, plans, strict=True)):
        pass_ = _Pass(backend, objective, batch, learner, record, proximal, anchor, reference, rows, plan, (version, i))
        pass_.whole(first=i == 0) if not objective.row_by_row else pass_.by_parts()
        norm = backend.clip(learner.max_grad_norm)
        record.grad_norms.append(norm)
        ess = float(effective_sample_size(record.weights[pass_.tokens], batch.mask[pass_.tokens]))
        why = refuse(ess=ess, min_ess=learner.min_ess, loss=record.loss, gradient_norm=norm) or ""
        if why:
            backend.discard()
            if i > 0:
                backend.rollback()
            break
        record.lr_scale = _lr_scale(learner, batch.take(rows), record.current[pass_.tokens])
        record.lr = record.lr_scale * learning_rate(
            version * learner.minibatches + i,
            learner.steps * learner.minibatches,
            peak=learner.lr,
            warmup=learner.warmup_steps,
            schedule=learner.schedule,
        )
        backend.apply(record.lr)
    return StepResult("guard" if why else "applied", why, record, time.perf_counter() - started)


class _Pass:
    """The forward and backward of one optimizer update."""

    def __init__(
        self,
        backend: Backend,
        objective: Objective,
        batch: Batch,
        learner: LearnerConfig,
        record: Record,
        proximal: Tensor | None,
        anchor: _Anchor,
        reference: Tensor | None,
        rows: Tensor,
        plan: _Plan,
        seed: tuple[int, int],
    ) -> None:
        self._backend, self._objective, self._batch, self._learner = backend, objective, batch, learner
        self._record, self._proximal, self._anchor, self._reference = record, proximal, anchor, reference
        self._parts, self._silent = plan.parts, plan.silent
        self._minibatch = batch.take(rows)
        self.tokens = batch.tokens_of(rows)
        self._at = {int(row): i for i, row in enumerate(rows)}
        self._generator = torch.Generator().manual_seed((learner.seed * 1_000_003 + seed[0]) * 1009 + seed[1])

    def by_parts(self) -> None:
        """Every micro-batch computes its share of the loss from its own scores."""
        norm = self._objective.norm(self._minibatch)

        def loss(part: Tensor, scores: Scores) -> Tensor:
            rows = self._batch.take(part)
            t = self._batch.tokens_of(part)
            share = norm.take(torch.tensor([self._at[int(r)] for r in part]))
            return self._evaluate(rows, t, scores.logprobs.to("cpu"), share) + self._entropy(rows, t, scores, share)

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
            norm = Norm(None, None)

            def direct(_: int, scores: Scores) -> Tensor:
                return self._evaluate(rows, t, scores.logprobs.to("cpu"), norm) + self._entropy(rows, t, scores, norm)

            self._backend.accumulate(self._packed(), direct)
            return
        known = self._proximal if first else None
        seen = _score_all(self._backend, self._batch, [_Plan(self._parts, [])]) if known is None else known
        current = seen[self.tokens].clone().requires_grad_()
        self._evaluate(self._minibatch, self.tokens, current, Norm(None, None)).backward()  # type: ignore[no-untyped-call]
        slope = torch.zeros_like(seen)
        slope[self.tokens] = current.grad if current.grad is not None else 0.0
        entropy = torch.zeros_like(seen).requires_grad_()
        self._objective.entropy_bonus(entropy[self.tokens], self._minibatch, Norm(None, None)).backward()  # type: ignore[no-untyped-call]

        def carried(i: int, scores: Scores) -> Tensor:
            t = self._batch.tokens_of(self._parts[i])
            self._record.entropy[t] = scores.entropy.detach().to("cpu")
            pulled = (scores.logprobs.to("cpu") * slope[t]).sum()
            return pulled if entropy.grad is None else pulled + (scores.entropy.to("cpu") * entropy.grad[t]).sum()

        self._backend.accumulate(self._packed(), carried)

    def _evaluate(self, rows: Batch, t: Tensor, current: Tensor, norm: Norm) -> Tensor:
        record = self._record
        anchor = self._anchor(rows, t, current.detach())
        reference = None if self._reference is None else self._reference[t]
        found = self._objective.evaluate(rows, record.advantages[t], current, anchor, reference, norm, self._generator)
        record.anchor[t], record.current[t] = anchor, current.detach()
        if self._proximal is None:
            record.proximal[t] = current.detach() if self._learner.proximal == "behaviour" else anchor
        record.weights[t], record.keep[t], record.clipped[t] = found.weights, found.keep, found.clipped
        if found.reference_kl is not None:
            record.reference_kl[t] = found.reference_kl
        record.loss += float(found.loss.detach())
        record.policy_loss += float(found.policy_loss)
        return found.loss

    def _entropy(self, rows: Batch, t: Tensor, scores: Scores, norm: Norm) -> Tensor:
        self._record.entropy[t] = scores.entropy.detach().to("cpu")
        if self._learner.entropy_coef == 0:
            return torch.zeros(())
        bonus = self._objective.entropy_bonus(scores.entropy.to("cpu"), rows, norm)
        self._record.loss += float(bonus.detach())
        return bonus

    def _packed(self) -> list[Packed]:
        return [self._batch.take(rows).packed() for rows in self._parts]


_Anchor = Callable[[Batch, Tensor, Tensor], Tensor]
"""(rows, their tokens' indices [t], current[t] detached) -> what the loss takes for the proximal logprobs [t]"""


def _anchor(learner: LearnerConfig, proximal: Tensor | None, version: int, *, several: bool) -> _Anchor:
    if learner.proximal == "behaviour":
        return lambda rows, t, current: rows.behaviour
    if proximal is not None:
        return lambda rows, t, current: proximal[t]
    if several:
        return lambda rows, t, current: approximate_proximal(rows.behaviour, current, rows.versions, version)
    return lambda rows, t, current: current


def _lr_scale(learner: LearnerConfig, rows: Batch, current: Tensor) -> float:
    if learner.ess_lr == "off":
        return 1.0
    ess = sequence_effective_sample_size(current, rows.behaviour, rows.mask, rows.lengths)
    return learning_rate_scale(float(ess), base_ess=learner.ess_lr_base, rule=learner.ess_lr)


def _minibatches(batch: Batch, count: int) -> list[Tensor]:
    """Rows of each mini-batch: an equal share of the groups, in the batch's order."""
    groups = torch.unique(batch.groups)
    return [torch.isin(batch.groups, share).nonzero()[:, 0] for share in groups.tensor_split(count) if len(share)]


@dataclass(frozen=True, slots=True)
class _Plan:
    """How one mini-batch is computed."""

    parts: list[Tensor]
    """Rows [b] of each micro-batch"""
    silent: list[Tensor]
    """The same, of those rows that have no gradient"""


def _plan(batch: Batch, rows: Tensor, limit: int, ranks: int, advantages: Tensor | None) -> _Plan:
    """`advantages[T]`: given when a row without any has no gradient."""
    if advantages is None:
        return _Plan(_cut(batch, rows, limit, ranks), [])
    live = row_sum((advantages != 0).long(), batch.lengths)[rows] > 0
    # One row at least, so that the optimizer sees a gradient of zero rather than none.
    live[0] |= not live.any()
    return _Plan(_cut(batch, rows[live], limit, ranks), _cut(batch, rows[~live], limit, ranks))


def _cut(batch: Batch, rows: Tensor, limit: int, ranks: int) -> list[Tensor]:
    return [rows[torch.tensor(part)] for part in pack(batch.lengths[rows].tolist(), limit, ranks) if part]


def _score_all(backend: Backend, batch: Batch, plans: list[_Plan], *, reference: bool = False) -> Tensor:
    """Logprobs [T] without gradient, made in the very micro-batches of the passes: equal to theirs bit for bit."""
    logprobs = torch.zeros(len(batch.token_ids))
    parts = [rows for plan in plans for rows in plan.parts + plan.silent]
    scored = backend.logprobs([batch.take(rows).packed() for rows in parts], reference=reference)
    for rows, scores in zip(parts, scored, strict=True):
        logprobs[batch.tokens_of(rows)] = scores.logprobs.to("cpu")
    return logprobs


def _blank(batch: Batch, advantages: Tensor, proximal: Tensor | None) -> Record:
    def zeros() -> Tensor:
        return torch.zeros(len(batch.token_ids))

    def none() -> Tensor:
        return torch.zeros(len(batch.token_ids), dtype=torch.bool)

    return Record(
        advantages=advantages,
        proximal=zeros() if proximal is None else proximal.clone(),
        anchor=zeros(),
        current=zeros(),
        entropy=zeros(),
        weights=zeros(),
        reference_kl=zeros(),
        clipped=none(),
        keep=none(),
    )
