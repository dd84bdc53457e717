"""Decides and computes what precedes the first update of a training step."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from asyncrl.config.learner import LearnerConfig
from asyncrl.learner.advantages.estimator import Advantages
from asyncrl.learner.backends.protocol import Backend
from asyncrl.learner.batch import Batch
from asyncrl.learner.objective.objective import Objective, Reference
from asyncrl.learner.ragged import spread
from asyncrl.learner.step.companions import Companions
from asyncrl.learner.step.critic import Critic
from asyncrl.learner.step.micro_batches import Plan, minibatches, on_tokens, parts_of, plan
from asyncrl.learner.step.proximal import Proximal, score_proximal, score_reference
from asyncrl.learner.step.record import Phase, Record, blank, no_words


@dataclass(frozen=True, slots=True)
class Step:
    """A training step, ready for its updates."""

    backend: Backend
    objective: Objective
    learner: LearnerConfig
    companions: Companions
    version: int
    """The policy's before the step"""
    batch: Batch
    """With shaped rewards, and the weights of resampled episodes"""
    plans: list[Plan]
    """One for each update"""
    proximal: Proximal
    reference: Reference | None
    record: Record

    @property
    def place(self) -> int:
        """In the learning rate's schedule."""
        return self.companions.schedule.place(self.version)

    @property
    def critic(self) -> Critic | None:
        return self.companions.critic

    @property
    def trained(self) -> list[Backend | Critic]:
        return [self.backend] if self.critic is None else [self.backend, self.critic]


def prepare(
    backend: Backend, objective: Objective, batch: Batch, learner: LearnerConfig, version: int, companions: Companions
) -> Step:
    """Shapes rewards, cuts the batch into mini-batches, scores them under the proximal policy, the reference and the
    critic where those are needed, and estimates advantages."""
    begin = time.perf_counter()
    batch, critic = objective.prepared(batch, version), companions.critic
    # Advantages that need nothing but rewards are estimated first: they tell which rows have no gradient.
    needs_scores = critic is not None or objective.advantage_needs_logprobs
    estimated = None if needs_scores else objective.advantages(batch)
    plans = _plans(backend, objective, batch, learner, estimated)
    started = time.perf_counter()
    scored = score_proximal(backend, objective, batch, learner, plans)
    proximal_s = 0.0 if scored is None else time.perf_counter() - started
    logprobs, sum_pi_sq = (None, None) if scored is None else (scored.logprobs, scored.sum_pi_sq)
    reference = score_reference(backend, batch, learner, plans, companions.kl.value)
    values = None if critic is None else _values(critic, batch, plans)
    if estimated is None:
        estimated = objective.advantages(
            batch, proximal=logprobs, sum_pi_sq=sum_pi_sq, values=values, reference=reference
        )
    seen = None if scored is None else scored.teacher
    estimated = objective.teacher.taught(estimated, batch, logprobs, seen)
    if objective.teacher.in_updates:
        seen = no_words(len(batch.token_ids))
    record = blank(batch, estimated, values, logprobs, seen)
    record.proximal_s, record.kl_coef = proximal_s, companions.kl.value
    if learner.shaping:
        record.shaped_reward = float(batch.rewards.sum()) / len(torch.unique(batch.episodes))
    proximal = Proximal(logprobs, learner.proximal == "behaviour", len(plans) > 1, version)
    record.phases.append(Phase("prepare", begin, time.perf_counter()))
    return Step(backend, objective, learner, companions, version, batch, plans, proximal, reference, record)


def _plans(
    backend: Backend, objective: Objective, batch: Batch, learner: LearnerConfig, estimated: Advantages | None
) -> list[Plan]:
    advantages = None
    if estimated is not None and objective.linear_in_advantage:
        advantages = estimated.advantages * spread(batch.loss_weights, batch.lengths, len(batch.token_ids))
    limit, ranks = learner.tokens_per_micro_batch, backend.dp_size
    return [plan(batch, row_ids, limit, ranks, advantages) for row_ids in minibatches(batch, learner.minibatches)]


def _values(critic: Critic, batch: Batch, plans: list[Plan]) -> Tensor:
    parts = parts_of(plans)
    return on_tokens(batch, parts, critic.values([batch.take(row_ids).packed() for row_ids in parts]))
