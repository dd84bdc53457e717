"""What the objective makes of its parts."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.config.learner import LearnerConfig
from asyncrl.config.rules import NEEDS_VALUES, SELF_CORRECTING
from asyncrl.errors import ConfigError
from asyncrl.learner.advantages import ESTIMATORS, estimator, needs_of
from asyncrl.learner.batch import Batch, flatten
from asyncrl.learner.losses import LOSSES, properties_of
from asyncrl.learner.objective.objective import Norm, Objective
from tests.learner.flat_batches import loss_inputs
from tests.learner.tiny import random_trajectory, tiny_config


def a_batch(**how: Any) -> Batch:
    rng = np.random.default_rng(3)
    played = [random_trajectory(g, i, rng, versions=(0, 3)) for g in range(2) for i in range(2)]
    played = [dataclasses.replace(t, reward=float(t.id.index)) for t in played]
    return flatten(played, range(2), **how)


def objective_of(**learner: Any) -> Objective:
    config = tiny_config()
    return Objective(config.learner.model_copy(update=learner))


def test_a_reward_on_a_token_over_age_still_counts() -> None:
    """`over_age: mask` may take the loss from the very token that holds the episode's reward."""
    objective = objective_of(advantage="reinforce_pp", advantage_options={})
    whole, reduced = a_batch(), a_batch(mask_before=2)
    assert not torch.equal(whole.mask, reduced.mask)
    assert torch.equal(objective.advantages(whole).advantages, objective.advantages(reduced).advantages)


@pytest.mark.parametrize(("loss", "correction"), [("reinforce", "tis"), ("reinforce", "icepop"), ("gpg", "tis")])
def test_what_corrects_itself_is_not_corrected_twice(loss: str, correction: str) -> None:
    objective = objective_of(loss=loss, loss_options={}, corrections=({"name": correction},), kl_coef=0.0)
    batch = a_batch()
    current = (batch.behaviour + torch.linspace(-2.0, 2.0, batch.mask.numel())).requires_grad_()
    advantages = torch.ones_like(batch.behaviour)
    proximal = current.detach()
    found = objective.evaluate(batch, advantages, current, proximal, None, Norm(), torch.Generator())
    extra = {"behaviour": batch.behaviour} if loss == "reinforce" else {}
    inputs = loss_inputs(current, proximal, advantages, batch.mask, batch.lengths, **extra)
    plain = LOSSES[loss](inputs).per_token.detach()
    factor = found.keep.float() if loss == "reinforce" else found.weights
    torch.testing.assert_close(found.loss.detach(), (plain * factor).sum() / batch.mask.sum())
    assert (found.weights[batch.mask] != 1).any()


OWN = """
import torch
from asyncrl.learner.advantages import Advantages, EstimatorInputs
from asyncrl.learner.losses import LossInputs, PolicyLoss, loss


def centred(inputs: EstimatorInputs, *, scale: float = 1.0) -> Advantages:
    row = torch.repeat_interleave(torch.arange(len(inputs.lengths)), inputs.lengths)
    total = torch.zeros(len(inputs.lengths)).index_add(0, row, inputs.rewards)
    advantages = torch.where(inputs.mask, scale * (total - total.mean())[row], 0.0)
    return Advantages(advantages, returns=advantages)


@loss(linear_in_advantage=True, row_by_row=True)
def policy_gradient(inputs: LossInputs) -> PolicyLoss:
    per_token = torch.where(inputs.mask, -inputs.advantages * inputs.current, 0.0)
    return PolicyLoss(per_token, metrics={}, clipped=torch.zeros_like(inputs.mask))


def undeclared(inputs):
    return policy_gradient(inputs)


def bare(inputs):
    return inputs.rewards


def bare_loss(inputs):
    return -inputs.advantages * inputs.current


def broken(inputs):
    return inputs.nothing


def silent_need(inputs):
    return inputs.logprobs + 1


def old_estimator(rewards, mask, lengths, groups, scale: float = 1.0):
    return rewards


def old_loss(current, advantages, mask):
    return -advantages * current
"""
"""As in docs/reference/algorithms.md."""


def test_functions_of_the_users_own(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(OWN)
    Objective(
        LearnerConfig(advantage=f"{own}:centred", advantage_options={"scale": 2.0}, loss=f"{own}:policy_gradient")
    )
    text = (Path(__file__).parents[3] / "docs" / "reference" / "algorithms.md").read_text()
    assert OWN.partition("\n\n\ndef undeclared(")[0].strip() in text


def test_a_users_loss_takes_the_cheap_path_if_it_declares_that_it_may(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(OWN)

    def built(**learner: Any) -> Objective:
        return objective_of(**{"loss_options": {}, "kl_coef": 0.0} | learner)

    declared, undeclared = built(loss=f"{own}:policy_gradient"), built(loss=f"{own}:undeclared")
    assert (declared.row_by_row, declared.linear_in_advantage) == (True, True)
    assert (undeclared.row_by_row, undeclared.linear_in_advantage) == (False, False)
    named = built(loss="gpg")
    assert (named.row_by_row, named.linear_in_advantage) == (True, True)
    whole = built(loss=f"{own}:policy_gradient", corrections=({"name": "tis", "normalize": True},))
    assert not whole.row_by_row, "a correction that looks at the whole batch"


def test_what_the_config_lists_without_torch_is_what_the_functions_declare() -> None:
    itself = {name for name, fn in LOSSES.items() if properties_of(fn).correction == "itself"}
    assert itself == SELF_CORRECTING
    assert {name for name, fn in ESTIMATORS.items() if "values" in needs_of(fn)} == NEEDS_VALUES


def test_an_estimator_declares_only_inputs_that_there_are() -> None:
    with pytest.raises(ValueError, match=r"needs \['entropy'\], expected names among values"):
        estimator(needs=("entropy",))


@pytest.mark.parametrize(
    ("field", "name", "says"),
    [
        ("advantage", "bare", "returned a Tensor: expected asyncrl.learner.advantages.estimator.Advantages"),
        ("loss", "bare_loss", "returned a Tensor: expected asyncrl.learner.losses.policy_loss.PolicyLoss"),
        ("advantage", "broken", "has no attribute 'nothing'"),
        ("advantage", "silent_need", "declares with @estimator"),
        (
            "advantage",
            "old_estimator",
            r"signature \(rewards, .*must be `inputs: EstimatorInputs` \(asyncrl.learner.adv",
        ),
        (
            "loss",
            "old_loss",
            r"signature \(current, .*must be `inputs: LossInputs` \(asyncrl.learner.losses.policy_loss\)",
        ),
    ],
)
def test_what_the_users_function_gives_is_checked_before_anything_starts(
    tmp_path: Path, field: str, name: str, says: str
) -> None:
    own = tmp_path / "own.py"
    own.write_text(OWN)
    with pytest.raises(ConfigError, match=f"learner.{field}.*{says}"):
        Objective(LearnerConfig.model_validate({field: f"{own}:{name}"}))
