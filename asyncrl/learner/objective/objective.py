"""The objective, composed from the names in the config: advantage, corrections, loss, aggregation, KL.

Each is a pure function from a table (or the user's own, by import path) that takes one typed structure and options; its
options are checked, and it is tried on made-up data, before anything runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from asyncrl.config.demonstrations import SFT
from asyncrl.config.learner import LearnerConfig
from asyncrl.errors import ConfigError
from asyncrl.learner.advantages.estimator import Advantages, EstimatorInputs
from asyncrl.learner.batch import Batch
from asyncrl.learner.corrections import Correction, CorrectionInputs, compose
from asyncrl.learner.losses import LossInputs, PolicyLoss
from asyncrl.learner.losses.aggregation import AggregationInputs, denominator, unit_tokens
from asyncrl.learner.losses.value import ValueInputs
from asyncrl.learner.objective.choice import Chosen, checked
from asyncrl.learner.objective.functions import Functions
from asyncrl.learner.objective.kl import limited, penalise_rewards, unbiased
from asyncrl.learner.objective.rehearsal import made_up
from asyncrl.learner.objective.shaping import resampled, shaped
from asyncrl.learner.objective.teacher import TeacherTerm
from asyncrl.learner.ragged import masked, spread

_USER_ERRORS = (TypeError, ValueError, AttributeError, LookupError, RuntimeError)
"""Errors that a function raises in the rehearsal when it receives or returns the wrong things."""


@dataclass(frozen=True, slots=True)
class Norm:
    """The divisors of a mini-batch's loss; None: computed from the rows, which are the whole mini-batch."""

    denominator: Tensor | None = None
    unit_tokens: Tensor | None = None
    """[B] policy tokens of each row's unit (losses/aggregation.py)"""

    def take(self, row_ids: Tensor) -> Norm:
        return Norm(self.denominator, None if self.unit_tokens is None else self.unit_tokens[row_ids])


@dataclass(frozen=True, slots=True)
class Reference:
    """The reference model's logprobs, and the current weight of the KL term."""

    logprobs: Tensor
    """[T]"""
    coefficient: float

    def take(self, t: Tensor) -> Reference:
        return Reference(self.logprobs[t], self.coefficient)


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The objective on some rows. The tensors but `loss` carry no gradient."""

    loss: Tensor
    """scalar, with gradient"""
    policy_loss: Tensor
    """scalar: its policy part"""
    weights: Tensor
    """[T] importance weight after the corrections"""
    keep: Tensor
    """[T] bool: the token stays in the loss"""
    clipped: Tensor
    """[T] bool: its ratio was clipped"""
    reference_kl: Tensor | None
    """[T] KL to the reference; None without one"""


class Objective:
    """Built once per run. Raises ConfigError, naming the field, for a name or option that cannot work."""

    def __init__(self, learner: LearnerConfig) -> None:
        self._learner = learner
        self._functions = Functions(learner)
        self.row_by_row = self._functions.row_by_row()
        """Whether micro-batches may be evaluated one by one; otherwise a whole mini-batch must be, in one call."""
        self.supervised = learner.loss == SFT
        """Whether its tokens were shown, not sampled: there is no policy to compare with."""
        self.linear_in_advantage = self.row_by_row and self._functions.linear_in_advantage()
        """Whether a row without any advantage adds nothing to the gradient."""
        self.teacher = TeacherTerm(learner.teacher)
        needs = self._functions.estimators.needs
        self.advantage_needs_sum_pi_sq = "sum_pi_sq" in needs
        in_reward = learner.kl_coef > 0 and learner.kl_in == "reward"
        self.advantage_needs_logprobs = (
            not needs.isdisjoint(("logprobs", "sum_pi_sq")) or in_reward or self.teacher.in_advantage
        )
        self._rehearse()

    def prepared(self, batch: Batch, version: int) -> Batch:
        """The batch of the step from `version` on, with the rewards and the episodes that it trains on."""
        batch, learner = shaped(batch, self._functions.shaping), self._learner
        if learner.pf_ppo == "off":
            return batch
        generator = torch.Generator().manual_seed(learner.seed * 1_000_003 + version)
        return resampled(batch, method=learner.pf_ppo, power=learner.pf_ppo_power, generator=generator)

    def advantages(
        self,
        batch: Batch,
        *,
        proximal: Tensor | None = None,
        sum_pi_sq: Tensor | None = None,
        values: Tensor | None = None,
        reference: Reference | None = None,
    ) -> Advantages:
        """Advantages of the whole batch; each input is [T]. Raises ConfigError where the data lack what an option
        names."""
        rewards, turn_rewards = batch.rewards, batch.turn_rewards
        if reference is not None and self._learner.kl_in == "reward":
            assert proximal is not None
            kl = self._functions.kl(proximal, reference.logprobs)
            rewards = penalise_rewards(rewards, kl, batch.sampled, reference.coefficient)
            turn_rewards = penalise_rewards(turn_rewards, kl, batch.sampled, reference.coefficient)
        inputs = EstimatorInputs(
            rewards=rewards,
            # Tokens over age too: an episode's reward may be on one that carries no loss.
            mask=batch.sampled,
            lengths=batch.lengths,
            groups=batch.groups,
            episodes=batch.episodes,
            behaviour=batch.behaviour,
            values=values,
            logprobs=proximal,
            sum_pi_sq=sum_pi_sq,
            baseline=batch.baseline if self._learner.greedy_baseline else None,
            reward_components=batch.reward_components,
            reward_names=batch.reward_names,
            turn_of=batch.turn_of,
            turn_rewards=turn_rewards,
            states=batch.states,
        )
        estimated = self._functions.estimators(batch, inputs)
        weights = spread(batch.row_weights, batch.lengths, len(batch.token_ids))
        return Advantages(estimated.advantages * weights, estimated.returns)

    def norm(self, batch: Batch) -> Norm:
        """The norm of a mini-batch that is evaluated in parts. The user's own aggregation always gets the whole."""
        if not self.row_by_row:
            return Norm()
        units: dict[str, Any] = {"episodes": batch.episodes, "groups": batch.groups}
        rows = self._functions.aggregation.options.get("rows")
        total = denominator(
            self._learner.aggregation, batch.mask, batch.lengths, **units, **({"rows": rows} if rows else {})
        )
        return Norm(total, unit_tokens(self._learner.aggregation, batch.mask, batch.lengths, **units))

    def evaluate(
        self,
        rows: Batch,
        advantages: Tensor,
        current: Tensor,
        proximal: Tensor,
        reference: Reference | None,
        norm: Norm,
        generator: torch.Generator,
    ) -> Evaluated:
        """`current[T]` carries the gradient. `norm` is that of the mini-batch that holds the rows."""
        correction = self._correct(rows, advantages, current.detach(), proximal)
        loss = self._policy_loss(rows, advantages, current, proximal, correction.weights, generator)
        per_token = loss.per_token
        if self._functions.properties.correction == "outside":
            per_token = per_token * correction.weights
        elif self._functions.properties.correction == "itself":
            per_token = per_token * correction.keep
        mask = correction.keep if self._functions.divide_by == "kept" else rows.mask
        policy_loss = self.aggregate(per_token, rows, norm, mask)
        total, kl = policy_loss, None
        if reference is not None:
            kl = masked(self._reference_kl(rows, current, proximal, reference), rows.mask)
            if self._learner.kl_in == "loss":
                total = total + reference.coefficient * self.aggregate(kl, rows, norm, mask)
        return Evaluated(
            loss=total,
            policy_loss=policy_loss.detach(),
            weights=correction.weights,
            keep=correction.keep,
            clipped=loss.clipped,
            reference_kl=None if kl is None else kl.detach(),
        )

    def metrics(
        self, batch: Batch, advantages: Tensor, current: Tensor, proximal: Tensor, generator: torch.Generator
    ) -> dict[str, float]:
        """Metrics of the corrections and of the loss, over the whole batch."""
        correction = self._correct(batch, advantages, current, proximal)
        loss = self._policy_loss(batch, advantages, current, proximal, correction.weights, generator)
        values = {f"correction/applied/{name}": float(value) for name, value in correction.metrics.items()}
        return values | {f"weights/loss/{name}": float(value) for name, value in loss.metrics.items()}

    def _correct(self, rows: Batch, advantages: Tensor, current: Tensor, proximal: Tensor) -> Correction:
        inputs = CorrectionInputs(
            proximal=proximal,
            behaviour=rows.behaviour,
            current=current,
            advantages=advantages,
            mask=rows.mask,
            lengths=rows.lengths,
        )
        return compose([checked(c(inputs), Correction, c) for c in self._functions.corrections])

    def _policy_loss(
        self,
        rows: Batch,
        advantages: Tensor,
        current: Tensor,
        proximal: Tensor,
        weights: Tensor,
        generator: torch.Generator,
    ) -> PolicyLoss:
        inputs = LossInputs(
            current=current,
            proximal=proximal,
            behaviour=rows.behaviour,
            advantages=advantages,
            weights=weights,
            mask=rows.mask,
            lengths=rows.lengths,
            groups=rows.groups,
            episodes=rows.episodes,
            rewards=rows.rewards,
            generator=generator,
        )
        loss = self._functions.loss
        return checked(loss(inputs), PolicyLoss, loss)

    def _reference_kl(self, rows: Batch, current: Tensor, proximal: Tensor, reference: Reference) -> Tensor:
        """[T], with gradient"""
        kl: Tensor = self._functions.kl(current, reference.logprobs)
        if self._learner.kl_unbiased == "off":
            return kl
        sampled_under = proximal if self._learner.kl_unbiased == "proximal" else rows.behaviour
        return limited(unbiased(kl, current, sampled_under), self._functions.kl_limit)

    def entropy_bonus(self, entropy: Tensor, rows: Batch, norm: Norm) -> Tensor:
        """The entropy's term of the loss, a scalar with gradient."""
        return -self._learner.entropy_coef * self.aggregate(entropy, rows, norm, rows.mask)

    def aggregate(self, per_token: Tensor, rows: Batch, norm: Norm, mask: Tensor) -> Tensor:
        """A scalar. An episode that was drawn n times counts n times in the sum and once in the divisor; likewise the
        factor of a replayed group."""
        if (weights := self.token_weights(rows)) is not None:
            per_token = per_token * weights
        inputs = AggregationInputs(
            per_token, mask, rows.lengths, rows.episodes, rows.groups, norm.denominator, norm.unit_tokens
        )
        value: Tensor = self._functions.aggregation(inputs)
        return value

    def token_weights(self, rows: Batch) -> Tensor | None:
        """[T]: how often each token counts, or None: once."""
        if bool((rows.loss_weights == 1).all()):
            return None
        return spread(rows.loss_weights, rows.lengths, len(rows.token_ids))

    def value_loss(self, inputs: ValueInputs) -> Tensor:
        loss: Tensor = self._functions.value_loss(inputs)
        return loss

    def _rehearse(self) -> None:
        """Finds an input that would be missing at training time before anything starts. Raises ConfigError."""
        learner = self._learner
        for field, estimator, env in self._functions.estimators:  # the default comes last
            batch, estimated = self._rehearse_estimator(field, estimator, env)
        logprobs, mask = batch.behaviour, batch.mask
        reference = Reference(logprobs, 1.0)
        try:
            norm, current = self.norm(batch), logprobs.clone().requires_grad_()
            a = estimated.advantages
            self.evaluate(batch, a, current, logprobs, reference, norm, torch.Generator()).loss.backward()  # type: ignore[no-untyped-call]
        except _USER_ERRORS as error:
            raise ConfigError(
                f"learner.loss {learner.loss!r} with learner.corrections, learner.kl and learner.aggregation "
                f"{learner.aggregation!r} cannot be computed: {error}"
            ) from error
        try:
            self.value_loss(ValueInputs(torch.zeros(len(mask)), torch.zeros(len(mask)), estimated.returns, mask, 8.0))
        except ValueError as error:
            raise ConfigError(f"learner.value_options: {error}") from error

    def _rehearse_estimator(self, field: str, estimator: Chosen, env: str) -> tuple[Batch, Advantages]:
        """The made-up batch, and its advantages."""
        batch = made_up(estimator.options, self._learner.greedy_baseline, env)
        logprobs = batch.behaviour
        try:
            batch = self.prepared(batch, 0)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"learner.shaping cannot be computed: {error}") from error
        values = None if self._learner.critic == "none" else torch.zeros(len(logprobs))
        known: dict[str, Any] = {"proximal": logprobs, "sum_pi_sq": logprobs.exp().square(), "values": values}
        try:
            return batch, self.advantages(batch, reference=Reference(logprobs, 1.0), **known)
        except _USER_ERRORS as error:
            raise ConfigError(
                f"{field} is {estimator.name!r}: {error}. Available: rewards, groups, logprobs and sum_pi_sq; "
                "turn_of, turn_rewards and states by turn; values under learner.critic shared or separate; the greedy "
                "episode's reward (baseline) under learner.greedy_baseline. An estimator gets what it declares "
                "with @estimator(needs=...)."
            ) from error
