"""One training step: a batch in, a policy version out, or nothing at all.

    batch ─> rewards shaped ─> values ─> advantages ─> for each mini-batch:   update.py: a gradient
                                                                              guard ─> clip ─> AdamW

Three logprobs of a token are kept apart: behaviour (who sampled it, from the trajectory), proximal (the learner at the
start of the step) and current (the learner now). With one mini-batch the proximal logprobs are the current ones,
detached, and no forward pass is made for them; `learner.proximal` names other anchors for the loss. How rows are cut
into micro-batches does not change the result. Rows without any advantage (groups whose rewards are all equal: many,
once a task is nearly solved) have no gradient, so they are scored for the record and not differentiated.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from asyncrl.config.learner import LearnerConfig
from asyncrl.learner.backends.protocol import Backend, Scores, Want
from asyncrl.learner.batch import Batch
from asyncrl.learner.objective.kl import FixedKL
from asyncrl.learner.objective.objective import Objective, Reference
from asyncrl.learner.ragged import masked_mean, spread
from asyncrl.learner.step.apply import learning_rate, learning_rate_scale, refuse
from asyncrl.learner.step.auxiliary import Companions
from asyncrl.learner.step.diagnostics import effective_sample_size, sequence_effective_sample_size
from asyncrl.learner.step.micro_batches import Plan, minibatches, on_tokens, parts_of, plan, score
from asyncrl.learner.step.proximal import approximate_proximal
from asyncrl.learner.step.record import Record, blank
from asyncrl.learner.step.update import Anchor, Step, Update

Outcome = Literal["applied", "guard"]


@dataclass(frozen=True, slots=True)
class StepResult:
    outcome: Outcome
    why: str
    """Of a guard: which number was refused."""
    record: Record
    compute_s: float


def train_step(
    backend: Backend,
    objective: Objective,
    batch: Batch,
    learner: LearnerConfig,
    *,
    version: int,
    companions: Companions | None = None,
) -> StepResult:
    """Takes the policy from `version` to `version + 1`. Under outcome `guard` everything trained is as before.

    `companions`: what lives beside the policy; none are needed without a critic and a steered KL coefficient.
    """
    started = time.perf_counter()
    beside = companions or _none(learner)
    critic = beside.critic
    batch = objective.prepared(batch, version)
    updates = minibatches(batch, learner.minibatches)
    several = len(updates) > 1
    # What needs nothing but rewards is known now, and says which rows have no gradient.
    early = critic is None and not objective.advantage_needs_logprobs
    estimated = objective.advantages(batch) if early else None
    live = None
    if estimated is not None and objective.linear_in_advantage:
        live = estimated.advantages * spread(batch.loss_weights, batch.lengths, len(batch.token_ids))
    plans = [plan(batch, rows, learner.tokens_per_micro_batch, backend.dp_size, live) for rows in updates]

    scored = _at_start(backend, objective, batch, learner, plans)
    proximal = None if scored is None else scored.logprobs
    proximal_s = 0.0 if scored is None else time.perf_counter() - started
    reference = None
    if learner.kl_coef > 0:
        reference = Reference(score(backend, batch, plans, reference=True).logprobs, beside.kl.value)
    values = None
    if critic is not None:
        parts = parts_of(plans)
        values = on_tokens(batch, parts, critic.values([batch.take(rows).packed() for rows in parts]))
    if estimated is None:
        squares = None if scored is None else scored.sum_pi_sq
        estimated = objective.advantages(
            batch, proximal=proximal, sum_pi_sq=squares, values=values, reference=reference
        )
    record = blank(batch, estimated, values, proximal)
    record.proximal_s, record.kl_coef = proximal_s, beside.kl.value
    if learner.shaping:
        record.shaped_reward = float(batch.rewards.sum()) / len(torch.unique(batch.episodes))

    anchor = _anchor(learner, proximal, version, several=several)
    step = Step(backend, objective, batch, learner, record, proximal, anchor, reference, critic)
    why = ""
    if several:
        for trained in (backend, critic):
            if trained is not None:
                trained.mark()
    for i, (rows, planned) in enumerate(zip(updates, plans, strict=True)):
        update = Update(step, rows, planned, (version, i))
        update.whole(first=i == 0) if not objective.row_by_row else update.by_parts()
        update.critic()
        norm = backend.clip(learner.max_grad_norm)
        record.grad_norms.append(norm)
        if critic is not None:
            record.critic_grad_norms.append(critic.clip(learner.max_grad_norm))
            norm = math.hypot(norm, record.critic_grad_norms[-1])
        ess = float(effective_sample_size(record.weights[update.tokens], batch.mask[update.tokens]))
        loss = record.loss + record.value_loss
        why = refuse(ess=ess, min_ess=learner.min_ess, loss=loss, gradient_norm=norm) or ""
        if why:
            for trained in (backend, critic):
                if trained is not None:
                    trained.discard()
                    if i > 0:
                        trained.rollback()
            break
        number = version * learner.minibatches + i
        if critic is not None:
            critic.apply(_rate(learner, number, learner.critic_lr))
        if version < learner.critic_warmup_steps:
            backend.discard()
            continue
        record.lr_scale = _lr_scale(learner, batch.take(rows), record.current[update.tokens])
        record.lr = record.lr_scale * _rate(learner, number, learner.lr)
        backend.apply(record.lr)
    if not why:
        _afterwards(backend, learner, batch, record, beside, version)
    return StepResult("guard" if why else "applied", why, record, time.perf_counter() - started)


def _none(learner: LearnerConfig) -> Companions:
    if learner.critic != "none" or learner.kl_controller != "fixed":
        raise ValueError("learner.critic and learner.kl_controller live longer than a step: companions are missing")
    return Companions(FixedKL(learner.kl_coef))


def _at_start(
    backend: Backend, objective: Objective, batch: Batch, learner: LearnerConfig, plans: list[Plan]
) -> Scores | None:
    """Of the learner at the start of the step, where somebody reads them before, or after, the first update."""
    # Several updates move the current policy away from the proximal one; what spans rows needs all of them at once.
    spans_passes = not objective.row_by_row and any(len(one.parts) > 1 for one in plans)
    anchored = learner.proximal == "recompute" and (len(plans) > 1 or spans_passes)
    if not (objective.advantage_needs_logprobs or anchored):
        return None
    wants: frozenset[Want] = frozenset(
        ("logprobs", "sum_pi_sq") if objective.advantage_needs_sum_pi_sq else ("logprobs",)
    )
    return score(backend, batch, plans, wants=wants)


def _afterwards(
    backend: Backend, learner: LearnerConfig, batch: Batch, record: Record, beside: Companions, version: int
) -> None:
    """What an applied step changes beside weights and optimizers."""
    if learner.kl_coef > 0:
        beside.kl.update(float(masked_mean(record.reference_kl, batch.mask)), len(torch.unique(batch.episodes)))
    if learner.reference_every and (version + 1) % learner.reference_every == 0:
        backend.refresh_reference()


def _anchor(learner: LearnerConfig, proximal: Tensor | None, version: int, *, several: bool) -> Anchor:
    if learner.proximal == "behaviour":
        return lambda rows, t, current: rows.behaviour
    if proximal is not None:
        return lambda rows, t, current: proximal[t]
    if several:
        return lambda rows, t, current: approximate_proximal(rows.behaviour, current, rows.versions, version)
    return lambda rows, t, current: current


def _rate(learner: LearnerConfig, number: int, peak: float) -> float:
    total = learner.steps * learner.minibatches
    return learning_rate(number, total, peak=peak, warmup=learner.warmup_steps, schedule=learner.schedule)


def _lr_scale(learner: LearnerConfig, rows: Batch, current: Tensor) -> float:
    if learner.ess_lr == "off":
        return 1.0
    ess = sequence_effective_sample_size(current, rows.behaviour, rows.mask, rows.lengths)
    return learning_rate_scale(float(ess), base_ess=learner.ess_lr_base, rule=learner.ess_lr)
