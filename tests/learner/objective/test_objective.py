"""What the objective makes of its parts."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.config.learner import LearnerConfig
from asyncrl.errors import ConfigError
from asyncrl.learner.batch import Batch, flatten
from asyncrl.learner.losses.clipped import LOSSES
from asyncrl.learner.objective.objective import Norm, Objective
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
    found = objective.evaluate(batch, advantages, current, proximal, None, Norm(None, None), torch.Generator())
    extra = {"behaviour": batch.behaviour} if loss == "reinforce" else {}
    plain = LOSSES[loss](current, proximal, advantages, batch.mask, batch.lengths, **extra).per_token.detach()
    factor = found.keep.float() if loss == "reinforce" else found.weights
    torch.testing.assert_close(found.loss.detach(), (plain * factor).sum() / batch.mask.sum())
    assert (found.weights[batch.mask] != 1).any()


OWN = """
import torch
from asyncrl.learner.advantages import Advantages
from asyncrl.learner.losses.policy_loss import PolicyLoss


def centred(rewards, mask, lengths, groups, scale: float = 1.0):
    row = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    total = torch.zeros(len(lengths)).index_add(0, row, rewards)
    advantages = torch.where(mask, scale * (total - total.mean())[row], 0.0)
    return Advantages(advantages, returns=advantages)


def policy_gradient(current, advantages, mask):
    per_token = torch.where(mask, -advantages * current, 0.0)
    return PolicyLoss(per_token, metrics={}, clipped=torch.zeros_like(mask))


def bare(rewards, mask):
    return rewards


def bare_loss(current, advantages):
    return -advantages * current


def broken(rewards):
    return rewards.nothing
"""
"""As in docs/algorithms.md."""


def test_functions_of_the_users_own(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(OWN)
    Objective(
        LearnerConfig(advantage=f"{own}:centred", advantage_options={"scale": 2.0}, loss=f"{own}:policy_gradient")
    )
    text = (Path(__file__).parents[3] / "docs" / "algorithms.md").read_text()
    assert OWN.partition("\n\n\ndef bare(")[0].strip() in text


@pytest.mark.parametrize(
    ("field", "name", "says"),
    [
        ("advantage", "bare", "returned a Tensor: expected asyncrl.learner.advantages.episodes.Advantages"),
        ("loss", "bare_loss", "returned a Tensor: expected asyncrl.learner.losses.policy_loss.PolicyLoss"),
        ("advantage", "broken", "has no attribute 'nothing'"),
    ],
)
def test_what_the_users_function_gives_is_checked_before_anything_starts(
    tmp_path: Path, field: str, name: str, says: str
) -> None:
    own = tmp_path / "own.py"
    own.write_text(OWN)
    with pytest.raises(ConfigError, match=f"learner.{field}.*{says}"):
        Objective(LearnerConfig.model_validate({field: f"{own}:{name}"}))
