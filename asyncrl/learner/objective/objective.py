"""What is minimised, put together from the names in the config: advantage, corrections, loss, aggregation, KL.

Each is a pure function from a table (or the user's own, by import path); its options are checked before anything runs,
and it is called with those inputs that it has parameters for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from asyncrl.config.learner import LearnerConfig
from asyncrl.errors import ConfigError
from asyncrl.learner.advantages.episodes import Advantages
from asyncrl.learner.batch import Batch
from asyncrl.learner.corrections.weights import CORRECTIONS, compose
from asyncrl.learner.losses.aggregation import AGGREGATIONS, denominator, unit_tokens
from asyncrl.learner.losses.clipped import LOSSES, corrected_where, value_loss
from asyncrl.learner.losses.policy_loss import PolicyLoss
from asyncrl.learner.objective.choice import Chosen, checked, chosen, chosen_list
from asyncrl.learner.objective.estimators import Estimators
from asyncrl.learner.objective.kl import KL, penalise_rewards, unbiased
from asyncrl.learner.objective.rehearsal import made_up
from asyncrl.learner.objective.shaping import OF_EPISODES, SHAPING, drawn, shaped
from asyncrl.learner.ragged import masked, spread

LINEAR_IN_ADVANTAGE = frozenset(("ppo", "decoupled_ppo", "gspo", "gmpo", "cispo", "sapo", "gpg", "reinforce", "topr"))
"""Losses of which a row with no advantage has neither value nor gradient."""
ROW_BY_ROW_LOSSES = LINEAR_IN_ADVANTAGE | {"luspo", "rollout_is", "vespo", "dro", "dppo_tv", "dppo_kl"}
ROW_BY_ROW_CORRECTIONS = frozenset(("none", "tis", "mis", "icepop", "clamp", "kl_reject", "veto", "opsm"))
"""What looks at one row at a time may be computed micro-batch by micro-batch. Everything else, the user's own too, is
computed over a whole mini-batch at once, so that how it is cut never changes the result; that costs a forward pass."""

OF_USERS = (TypeError, ValueError, AttributeError, LookupError, RuntimeError)
"""What a function that gets or gives the wrong things raises while it is rehearsed."""

_BATCH = ("mask", "lengths", "groups", "episodes", "behaviour", "rewards", "reward_components", "reward_names")
_STEP = ("current", "proximal", "logprobs", "advantages", "weights", "generator", "reference", "values", "sum_pi_sq")
_GIVEN = ("per_token", "denominator", "unit_tokens", "baseline", *_BATCH, *_STEP)
"""What a function may read: no options, then."""
_OF_VALUES = ("values", "old_values", "returns", "mask", "lengths", "aggregation", "denominator", "episodes", "weights")


@dataclass(frozen=True, slots=True)
class Norm:
    """What a mini-batch's loss is divided by, of which a micro-batch sees only a part."""

    denominator: Tensor | None
    unit_tokens: Tensor | None
    """[B] of the mini-batch, or of the rows taken from it"""

    def take(self, rows: Tensor) -> Norm:
        return Norm(self.denominator, None if self.unit_tokens is None else self.unit_tokens[rows])


@dataclass(frozen=True, slots=True)
class Reference:
    """What the KL term is against, and its weight now."""

    logprobs: Tensor
    """[T]"""
    coefficient: float

    def take(self, tokens: Tensor) -> Reference:
        return Reference(self.logprobs[tokens], self.coefficient)


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
    """[T] bool"""
    clipped: Tensor
    """[T] bool"""
    reference_kl: Tensor | None
    """[T]"""


class Objective:
    """Built once per run. Raises ConfigError, naming the field, for a name or option that cannot work."""

    def __init__(self, learner: LearnerConfig) -> None:
        self._learner = learner
        options = dict(learner.aggregation_options)
        self._divide_by = options.pop("denominator", "all")
        if self._divide_by not in ("all", "kept"):
            raise ConfigError(f"learner.aggregation_options.denominator is {self._divide_by!r}: expected all or kept.")
        # `weights` is the correction's for a loss, an option (of the rewards) for an estimator.
        inputs = [name for name in _GIVEN if name != "weights"]
        self._estimators = Estimators(learner, inputs)
        self._loss = chosen(learner.loss, LOSSES, learner.loss_options, "learner.loss", _GIVEN)
        self._aggregate = chosen(learner.aggregation, AGGREGATIONS, options, "learner.aggregation", _GIVEN)
        self._kl = chosen(learner.kl, KL, learner.kl_options, "learner.kl", _GIVEN)
        self._corrections = chosen_list(
            learner.corrections or ({"name": "none"},), CORRECTIONS, "learner.corrections", _GIVEN
        )
        self._shaping = chosen_list(learner.shaping, SHAPING, "learner.shaping", OF_EPISODES)
        self._value_loss = chosen(
            "value_loss", {"value_loss": value_loss}, learner.value_options, "learner.value", _OF_VALUES
        )
        self.row_by_row = (
            learner.loss in ROW_BY_ROW_LOSSES
            and learner.aggregation in AGGREGATIONS
            and self._divide_by == "all"
            and all(c.name in ROW_BY_ROW_CORRECTIONS and not c.options.get("normalize") for c in self._corrections)
        )
        """Whether micro-batches may be evaluated one by one; otherwise a whole mini-batch must be, in one call."""
        self.linear_in_advantage = (
            self.row_by_row
            and learner.loss in LINEAR_IN_ADVANTAGE
            and (learner.kl_coef == 0 or learner.kl_in == "reward")
            and learner.entropy_coef == 0
            and learner.critic == "none"
        )
        """Whether a row without any advantage adds nothing to the gradient."""
        penalised = learner.kl_coef > 0 and learner.kl_in == "reward"
        read = self._estimators.read
        self.advantage_needs_sum_pi_sq = "sum_pi_sq" in read
        self.advantage_needs_logprobs = penalised or bool(read & {"current", "proximal", "logprobs", "sum_pi_sq"})
        self._rehearse()

    def prepared(self, batch: Batch, version: int) -> Batch:
        """The batch of the step from `version` on, with the rewards, and the episodes, that it trains on."""
        batch, learner = shaped(batch, self._shaping), self._learner
        if learner.pf_ppo == "off":
            return batch
        generator = torch.Generator().manual_seed(learner.seed * 1_000_003 + version)
        return drawn(batch, method=learner.pf_ppo, power=learner.pf_ppo_power, generator=generator)

    def advantages(
        self,
        batch: Batch,
        *,
        proximal: Tensor | None = None,
        sum_pi_sq: Tensor | None = None,
        values: Tensor | None = None,
        reference: Reference | None = None,
    ) -> Advantages:
        """Of the whole batch, each input [T]. Raises ConfigError where the data lack what an option names."""
        known = _of_batch(batch) | {"current": proximal, "proximal": proximal, "logprobs": proximal}
        # What the policy sampled, tokens over age too: an episode's reward may sit on one that carries no loss.
        known |= {"mask": batch.sampled, "values": values, "sum_pi_sq": sum_pi_sq}
        if self._learner.greedy_baseline:
            known["baseline"] = batch.baseline
        if reference is not None and self._learner.kl_in == "reward":
            assert proximal is not None
            kl = self._kl({"logprobs": proximal, "reference": reference.logprobs})
            known["rewards"] = penalise_rewards(batch.rewards, kl, batch.sampled, reference.coefficient)
        estimated = self._estimators(batch, known)
        weights = spread(batch.row_weights, batch.lengths, len(batch.token_ids))
        return Advantages(estimated.advantages * weights, estimated.returns)

    def norm(self, batch: Batch) -> Norm:
        """For a mini-batch that is evaluated in parts. The user's own aggregation is always given the whole."""
        if not self.row_by_row:
            return Norm(None, None)
        units: dict[str, Any] = {"episodes": batch.episodes, "groups": batch.groups}
        rows = self._aggregate.options.get("rows")
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
        """`current[T]` carries the gradient. `norm` is that of the mini-batch that the rows are of."""
        known = _of_batch(rows) | {
            "advantages": advantages,
            "current": current.detach(),
            "proximal": proximal,
            "generator": generator,
        }
        correction = compose([c(known) for c in self._corrections])
        loss = checked(self._loss(known | {"current": current, "weights": correction.weights}), PolicyLoss, self._loss)
        per_token = loss.per_token
        where = corrected_where(self._loss.function)
        if where == "outside":
            per_token = per_token * correction.weights
        elif where == "itself":  # its ratio is against the behaviour policy already: only what is rejected leaves
            per_token = per_token * correction.keep
        mask = correction.keep if self._divide_by == "kept" else rows.mask
        policy_loss = self.aggregate(per_token, rows, norm, mask)
        total, kl = policy_loss, None
        if reference is not None:
            kl = self._kl({"logprobs": current, "reference": reference.logprobs})
            if self._learner.kl_unbiased != "off":
                kl = unbiased(kl, current, proximal if self._learner.kl_unbiased == "proximal" else rows.behaviour)
            kl = masked(kl, rows.mask)
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
        """What the corrections and the loss say of themselves, over the whole batch."""
        known = _of_batch(batch) | {
            "advantages": advantages,
            "current": current,
            "proximal": proximal,
            "generator": generator,
        }
        correction = compose([c(known) for c in self._corrections])
        loss: PolicyLoss = self._loss(known | {"weights": correction.weights})
        said = {f"correction/applied/{name}": float(value) for name, value in correction.metrics.items()}
        return said | {f"weights/loss/{name}": float(value) for name, value in loss.metrics.items()}

    def entropy_bonus(self, entropy: Tensor, rows: Batch, norm: Norm) -> Tensor:
        """What the entropy adds to the loss, a scalar with gradient."""
        return -self._learner.entropy_coef * self.aggregate(entropy, rows, norm, rows.mask)

    def aggregate(self, per_token: Tensor, rows: Batch, norm: Norm, mask: Tensor) -> Tensor:
        """A scalar. An episode that is drawn n times counts n times; what is divided by is the batch as it came."""
        if (weights := self.token_weights(rows)) is not None:
            per_token = per_token * weights
        known = _of_batch(rows) | {"per_token": per_token, "mask": mask, "unit_tokens": norm.unit_tokens}
        value: Tensor = self._aggregate(known | {"denominator": norm.denominator})
        return value

    def token_weights(self, rows: Batch) -> Tensor | None:
        """[T]: how often each token counts, or None: once."""
        if self._learner.pf_ppo == "off":
            return None
        return spread(rows.loss_weights, rows.lengths, len(rows.token_ids))

    def value_loss(
        self,
        values: Tensor,
        old_values: Tensor,
        returns: Tensor,
        mask: Tensor,
        tokens: float,
        weights: Tensor | None = None,
    ) -> Tensor:
        """Of some tokens of a mini-batch that has so many `tokens` with loss: a scalar. `weights` as `token_weights`
        gives them."""
        known = {"values": values, "old_values": old_values, "returns": returns, "mask": mask, "denominator": tokens}
        loss: Tensor = self._value_loss(known | {"weights": weights})
        return loss

    def _rehearse(self) -> None:
        """An input that is missing at training time is found before anything starts. Raises ConfigError."""
        learner = self._learner
        for chosen_one in self._estimators:  # the last one is for all
            batch, estimated = self._rehearse_estimator(*chosen_one)
        logprobs, mask = batch.behaviour, batch.mask
        reference = Reference(logprobs, 1.0)
        try:
            norm, current = self.norm(batch), logprobs.clone().requires_grad_()
            a = estimated.advantages
            self.evaluate(batch, a, current, logprobs, reference, norm, torch.Generator()).loss.backward()  # type: ignore[no-untyped-call]
        except OF_USERS as error:
            raise ConfigError(
                f"learner.loss {learner.loss!r} with learner.corrections, learner.kl and learner.aggregation "
                f"{learner.aggregation!r} cannot be computed: {error}"
            ) from error
        try:
            self.value_loss(torch.zeros(len(mask)), torch.zeros(len(mask)), estimated.returns, mask, 8.0)
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
        except OF_USERS as error:
            raise ConfigError(
                f"{field} is {estimator.name!r}: {error} The learner has rewards, groups, logprobs and sum_pi_sq; "
                "values under learner.critic shared or separate; the greedy episode's reward (baseline) under "
                "learner.greedy_baseline."
            ) from error


def _of_batch(batch: Batch) -> dict[str, Any]:
    return {
        "mask": batch.mask,
        "lengths": batch.lengths,
        "groups": batch.groups,
        "episodes": batch.episodes,
        "behaviour": batch.behaviour,
        "rewards": batch.rewards,
        "reward_components": batch.reward_components,
        "reward_names": batch.reward_names,
    }
