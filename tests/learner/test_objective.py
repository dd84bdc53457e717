"""What the objective makes of its parts."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.learner.batch import Batch, flatten
from asyncrl.learner.losses import LOSSES
from asyncrl.learner.objective import Norm, Objective
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
