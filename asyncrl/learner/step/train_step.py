"""One training step: a batch in, a policy version out, or nothing at all.

    batch ─> prepare: rewards shaped ─> mini-batches ─> proximal logprobs, KL reference, values ─> advantages
                │
                ▼  for each mini-batch
             run_update: gradient (update.py) ─> clip ─> guard ─> optimizers
                │                                         │ refused
                ▼                                         ▼
             version + 1                               Rollback: everything trained is as before the step

Three logprobs of a token are kept apart: behaviour (the policy that sampled it, from the trajectory), proximal (the
learner at the start of the step; proximal.py) and current (the learner now). How rows are cut into micro-batches does
not change the result. Rows without any advantage (groups whose rewards are all equal: many, once a task is nearly
solved) have no gradient: they are scored for the record and not differentiated. An update whose whole gradient is
exactly 0 changes no weights and no optimizer; a step of such updates alone is applied, and has no place in the learning
rate's schedule.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Literal

import torch

from asyncrl.config.learner import LearnerConfig
from asyncrl.learner.backends.protocol import Backend
from asyncrl.learner.batch import Batch
from asyncrl.learner.objective.objective import Objective
from asyncrl.learner.ragged import masked_mean
from asyncrl.learner.step.apply import apply_or_discard, ess_scale, refuse, scheduled
from asyncrl.learner.step.companions import Companions, move_followers, stateless
from asyncrl.learner.step.diagnostics import effective_sample_size
from asyncrl.learner.step.prepare import Step, prepare
from asyncrl.learner.step.record import Record
from asyncrl.learner.step.rollback import Refused, Rollback
from asyncrl.learner.step.update import Update

Outcome = Literal["applied", "guard"]


@dataclass(frozen=True, slots=True)
class StepResult:
    outcome: Outcome
    why: str
    """Under outcome `guard`: which number was refused"""
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

    `companions`: the critic and the KL controller; needed with a critic or an adaptive KL coefficient.
    """
    started = time.perf_counter()
    step = prepare(backend, objective, batch, learner, version, companions or stateless(learner))
    with Rollback(step.trained, len(step.plans)) as rollback:
        for number in range(len(step.plans)):
            run_update(step, number)
            rollback.applied += 1
    if not rollback.why:
        _after_updates(step)
    outcome: Outcome = "guard" if rollback.why else "applied"
    return StepResult(outcome, rollback.why, step.record, time.perf_counter() - started)


def run_update(step: Step, number: int) -> None:
    """One update, from the mini-batch `number` of the step. Raises Refused before anything is applied."""
    learner, record, critic = step.learner, step.record, step.critic
    with record.timed("forward and backward"):
        update = Update(step, number)
        update.backward()
    own = norm = step.backend.clip(learner.max_grad_norm)
    record.grad_norms.append(own)
    if critic is not None:
        record.critic_grad_norms.append(critic.clip(learner.max_grad_norm))
        norm = math.hypot(own, record.critic_grad_norms[-1])
    ess = float(effective_sample_size(record.weights[update.t], step.batch.mask[update.t]))
    loss = record.loss + record.value_loss
    if why := refuse(ess=ess, min_ess=learner.min_ess, loss=loss, gradient_norm=norm):
        raise Refused(why)
    if critic is not None:
        rate = scheduled(learner, step.place, number, learner.critic_lr)
        apply_or_discard(critic, record.critic_grad_norms[-1], rate)
    if own == 0 or step.place < learner.critic_warmup_steps:
        step.backend.discard()
        return
    record.lr_scale = ess_scale(learner, update.minibatch, record.current[update.t])
    record.lr = record.lr_scale * scheduled(learner, step.place, number, learner.lr)
    with record.timed("optimizer"):
        step.backend.apply(record.lr)


def _after_updates(step: Step) -> None:
    """Updates what an applied step changes besides weights and optimizers."""
    learner, batch = step.learner, step.batch
    step.companions.schedule.passed(step.record)
    if learner.kl_coef > 0 and step.record.has_gradient:
        kl = float(masked_mean(step.record.reference_kl, batch.mask))
        step.companions.kl.update(kl, len(torch.unique(batch.episodes)))
    move_followers(step.backend, learner, step.version + 1)
