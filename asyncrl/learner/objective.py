"""What is minimised, put together from the names in the config: advantage, corrections, loss, aggregation, KL.

Each is a pure function from a table (or the user's own, by import path); its options are checked before anything runs,
and it is called with those inputs that it has parameters for.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from asyncrl.config import LearnerConfig
from asyncrl.errors import ConfigError
from asyncrl.learner.advantages import ESTIMATORS
from asyncrl.learner.aggregation import AGGREGATIONS, denominator, unit_tokens
from asyncrl.learner.batch import Batch
from asyncrl.learner.corrections import CORRECTIONS, compose
from asyncrl.learner.kl import KL
from asyncrl.learner.losses import LOSSES, corrected_where
from asyncrl.learner.policy_loss import PolicyLoss
from asyncrl.learner.ragged import masked, spread
from asyncrl.plugins import check_options, resolve
from asyncrl.trajectory import CONTEXT

ROW_BY_ROW_LOSSES = frozenset(
    {
        "ppo",
        "decoupled_ppo",
        "gspo",
        "luspo",
        "gmpo",
        "sapo",
        "cispo",
        "gpg",
        "reinforce",
        "topr",
        "rollout_is",
        "vespo",
        "dro",
        "dppo_tv",
        "dppo_kl",
    }
)
LINEAR_IN_ADVANTAGE = frozenset(("ppo", "decoupled_ppo", "gspo", "gmpo", "cispo", "sapo", "gpg", "reinforce", "topr"))
"""Losses of which a row with no advantage has neither value nor gradient."""
ROW_BY_ROW_CORRECTIONS = frozenset(("none", "tis", "mis", "icepop", "clamp", "kl_reject", "veto", "opsm"))
"""What looks at one row at a time may be computed micro-batch by micro-batch. Everything else, the user's own too, is
computed over a whole mini-batch at once, so that how it is cut never changes the result; that costs a forward pass."""

_BATCH = ("mask", "lengths", "groups", "episodes", "behaviour", "rewards", "reward_components")
_ABSENT = ("values", "baseline", "sum_pi_sq")
_STEP = ("current", "proximal", "logprobs", "advantages", "weights", "generator", "reference")


@dataclass(frozen=True, slots=True)
class Norm:
    """What a mini-batch's loss is divided by, of which a micro-batch sees only a part."""

    denominator: Tensor | None
    unit_tokens: Tensor | None
    """[B] of the mini-batch, or of the rows taken from it"""

    def take(self, rows: Tensor) -> Norm:
        return Norm(self.denominator, None if self.unit_tokens is None else self.unit_tokens[rows])


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
        self._estimator = _chosen(learner.advantage, ESTIMATORS, learner.advantage_options, "learner.advantage")
        self._loss = _chosen(learner.loss, LOSSES, learner.loss_options, "learner.loss")
        self._aggregate = _chosen(learner.aggregation, AGGREGATIONS, options, "learner.aggregation")
        self._kl = _chosen(learner.kl, KL, {}, "learner.kl")
        self._corrections = []
        for i, entry in enumerate(learner.corrections or ({"name": "none"},)):
            field = f"learner.corrections[{i}]"
            if "name" not in entry:
                raise ConfigError(f"{field} is {dict(entry)!r}: it needs a name, one of {', '.join(CORRECTIONS)}.")
            rest = {k: v for k, v in entry.items() if k != "name"}
            self._corrections.append(_chosen(str(entry["name"]), CORRECTIONS, rest, field))
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
            and learner.kl_coef == 0
            and learner.entropy_coef == 0
        )
        """Whether a row without any advantage adds nothing to the gradient."""
        self.advantage_needs_logprobs = bool(self._estimator.parameters & {"current", "proximal", "logprobs"})
        self._rehearse()

    def advantages(self, batch: Batch, proximal: Tensor | None) -> Tensor:
        """[T], of the whole batch."""
        known = _of_batch(batch) | {"current": proximal, "proximal": proximal, "logprobs": proximal}
        # What the policy sampled, tokens over age too: an episode's reward may sit on one that carries no loss.
        known["mask"] = batch.mask | (batch.versions != CONTEXT)
        estimated: Tensor = self._estimator(known).advantages
        return estimated * spread(batch.row_weights, batch.lengths, len(batch.token_ids))

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
        reference: Tensor | None,
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
        loss: PolicyLoss = self._loss(known | {"current": current, "weights": correction.weights})
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
            kl = masked(self._kl({"logprobs": current, "reference": reference}), rows.mask)
            total = total + self._learner.kl_coef * self.aggregate(kl, rows, norm, mask)
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
        known = _of_batch(rows) | {"per_token": per_token, "mask": mask, "unit_tokens": norm.unit_tokens}
        value: Tensor = self._aggregate(known | {"denominator": norm.denominator})
        return value

    def _rehearse(self) -> None:
        """Two made-up groups of two: an input that is missing at training time is found before anything starts."""
        lengths = torch.tensor([3, 3, 3, 3])
        mask = torch.tensor([False, True, True] * 4)
        values = masked(torch.linspace(-1.0, -0.5, 12), mask)
        rewards = torch.zeros(12)
        rewards[[2, 8]] = 1.0
        ids = torch.zeros(12, dtype=torch.long)
        groups, episodes = torch.tensor([0, 0, 1, 1]), torch.arange(4)
        batch = Batch(ids, mask, values, ids, rewards, rewards[None], lengths, groups, episodes, torch.ones(4))
        try:
            advantages = self.advantages(batch, values)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"learner.advantage is {self._learner.advantage!r}: {error} The learner has rewards, groups and "
                "logprobs; it has no critic (values), no greedy episodes (baseline), no sum_pi_sq. Choose another."
            ) from error
        try:
            norm, current = self.norm(batch), values.clone().requires_grad_()
            self.evaluate(batch, advantages, current, values, values, norm, torch.Generator()).loss.backward()  # type: ignore[no-untyped-call]
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"learner.loss {self._learner.loss!r} with learner.corrections and learner.aggregation "
                f"{self._learner.aggregation!r} cannot be computed: {error}"
            ) from error


@dataclass(frozen=True, slots=True)
class _Chosen:
    """A function with its options, called with what it has parameters for."""

    name: str
    function: Callable[..., Any]
    options: Mapping[str, Any]
    parameters: frozenset[str]

    def __call__(self, known: Mapping[str, Any]) -> Any:
        inputs = {k: v for k, v in known.items() if k in self.parameters and k not in self.options}
        return self.function(**inputs, **self.options)


def _chosen(name: str, table: Mapping[str, Callable[..., Any]], options: Mapping[str, Any], field: str) -> _Chosen:
    try:
        function = resolve(name, table, field)
        given = ("per_token", "denominator", "unit_tokens", *_BATCH, *_STEP, *_ABSENT)
        parameters = frozenset(inspect.signature(function).parameters)
        # `weights` is the correction's for a loss, an option (of the rewards) for an estimator.
        provided = [p for p in given if not (p == "weights" and field == "learner.advantage")]
        check_options(function, options, f"{field}_options" if "[" not in field else field, provided)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return _Chosen(name, function, dict(options), parameters)


def _of_batch(batch: Batch) -> dict[str, Any]:
    return {
        "mask": batch.mask,
        "lengths": batch.lengths,
        "groups": batch.groups,
        "episodes": batch.episodes,
        "behaviour": batch.behaviour,
        "rewards": batch.rewards,
        "reward_components": batch.reward_components,
    }
