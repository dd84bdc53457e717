"""Each environment's episodes by an estimator of their own: as if the others were not in the batch."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.config import Config
from asyncrl.errors import ConfigError
from asyncrl.learner.batch import Batch, flatten
from asyncrl.learner.objective.objective import Objective
from tests.learner.tiny import random_trajectory


def objective(**learner: Any) -> Objective:
    config = Config.model_validate({
        "learner": learner,
        "env": {"name": "mix", "options": {"envs": {"a": {"name": "lookup"}, "b": {"name": "lookup"}}}},
    })  # fmt: skip
    return Objective(config.learner)


def batch(envs: str = "abab", sizes: tuple[int, ...] = (4, 2, 3, 2)) -> Batch:
    """A group of each environment named, of groups of several sizes."""
    rng = np.random.default_rng(0)
    episodes = [
        dataclasses.replace(random_trajectory(group, index, rng), env=env, reward=float(rng.random()))
        for group, (env, size) in enumerate(zip(envs, sizes, strict=True))
        for index in range(size)
    ]
    return flatten(episodes, range(len(envs)))


@pytest.mark.parametrize("whitening", ["dr_grpo", "reinforce_pp_baseline", "optimal_token_baseline"])
def test_an_environment_has_its_own_estimator_and_sees_its_part_only(whitening: str) -> None:
    mixed = batch()
    proximal = mixed.behaviour * 1.1
    found = objective(advantage="grpo", advantage_by_env={"b": {"name": whitening}}).advantages(
        mixed, proximal=proximal, sum_pi_sq=proximal.exp()
    )
    for place, (env, name) in enumerate((("a", "grpo"), ("b", whitening))):
        assert mixed.env_names[place] == env
        rows = (mixed.envs == place).nonzero()[:, 0]
        t = mixed.tokens_of(rows)
        alone = objective(advantage=name).advantages(
            mixed.take(rows), proximal=proximal[t], sum_pi_sq=proximal[t].exp()
        )
        assert alone.advantages.abs().sum() > 0
        assert torch.equal(found.advantages[t], alone.advantages), env
        assert torch.equal(found.returns[t], alone.returns), env


def test_a_batch_without_the_environment_is_as_ever() -> None:
    mixed = batch("aa", (4, 2))
    one, by_env = objective(advantage="rloo"), objective(advantage="rloo", advantage_by_env={"b": {"name": "opo"}})
    assert torch.equal(one.advantages(mixed).advantages, by_env.advantages(mixed).advantages)


@pytest.mark.parametrize(
    ("learner", "said"),
    [
        ({"advantage_by_env": {"c": {"name": "grpo"}}}, r"advantage_by_env\.c: 'c' is not an environment .* a, b"),
        ({"advantage_by_env": {"a": {"name": "gae"}}}, r"advantage_by_env\.a is gae, which needs values"),
        ({"advantage_by_env": {"a": {"name": "remax"}}}, r"advantage_by_env\.a is remax"),
        ({"advantage_by_env": {"a": {"name": "grp"}}}, r"advantage_by_env\.a: 'grp' is not a known name"),
        ({"advantage_by_env": {"a": {"name": "grpo", "epsilon": 1.0}}}, r"advantage_by_env\.a\.epsilon"),
        ({"advantage_by_env": {"a": {"eps": 1.0}}}, r"advantage_by_env\.a .* needs a name"),
    ],
)
def test_what_cannot_work_is_named(learner: dict[str, Any], said: str) -> None:
    with pytest.raises((ConfigError, ValueError), match=said):
        objective(**learner)
