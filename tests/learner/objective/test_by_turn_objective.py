"""Estimators by turn as the objective calls them: on batches made of trajectories, with all that changes rewards."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.errors import ConfigError
from asyncrl.learner.batch import Batch, flatten
from asyncrl.learner.objective.objective import Objective, Reference
from asyncrl.trajectory import Trajectory
from tests.learner import reference, reference_turns
from tests.learner.tiny import random_trajectory, tiny_config, with_turns


def played(env: str = "fake") -> list[Trajectory]:
    """Two groups of three siblings; two or three turns, whose states some share."""
    rng = np.random.default_rng(3)
    made = []
    for group in range(2):
        for i in range(3):
            rewards = [0.5 * i, 1.0 - i, 0.25][: 2 + i % 2]
            states = [b"start", b"door", b"key"][: len(rewards)]
            t = random_trajectory(group, i, rng, rows=1 + i % 2)
            made.append(with_turns(dataclasses.replace(t, env=env), *rewards, states=states))
    return made


def by_turn(batch: Batch, rewards: torch.Tensor) -> tuple[reference.Batch, dict[int, list[reference_turns.Turn]]]:
    slow = reference.Batch(
        batch.lengths.tolist(), batch.groups.tolist(), batch.episodes.tolist(), batch.sampled.tolist()
    )
    return slow, reference_turns.turns(slow, batch.turn_of.tolist(), rewards.tolist(), batch.states.tolist())


def objective(**learner: Any) -> Objective:
    return Objective(tiny_config(**{"groups_per_step": 2, "group_size": 3} | learner).learner)


def near(got: torch.Tensor, expected: list[float]) -> None:
    torch.testing.assert_close(got, torch.tensor(expected), rtol=1e-5, atol=1e-5)


def test_gigpo_of_a_batch() -> None:
    batch = flatten(played(), (0, 1))
    slow, turns = by_turn(batch, batch.turn_rewards)
    reward = slow.episode_reward(batch.rewards.tolist())
    made = objective(advantage="gigpo", advantage_options={"omega": 0.5, "gamma": 0.9})
    near(made.advantages(batch).advantages, reference_turns.gigpo(slow, turns, reward, 0.5, 0.9, True, False))


def test_what_shaping_changes_is_earned_by_the_last_turn() -> None:
    batch = flatten(played(), (0, 1))
    made = objective(
        advantage="turn_returns", advantage_options={"whiten": False}, shaping=({"name": "clip", "scale": 2.0},)
    )
    shaped = made.prepared(batch, 0)
    slow, turns = by_turn(shaped, shaped.turn_rewards)
    for episode, t in enumerate(played()):
        earned = [turn.reward for turn in t.turn_rewards]
        assert [turn.reward for turn in turns[episode]] == pytest.approx([*earned[:-1], earned[-1] + t.reward])
    near(made.advantages(shaped).returns, reference_turns.turn_returns(slow, turns, 1.0))
    assert torch.equal(objective(advantage="turn_returns").prepared(batch, 0).turn_rewards, batch.turn_rewards)


def test_a_kl_in_the_reward_is_paid_by_the_turn_that_sampled_the_token() -> None:
    batch = flatten(played(), (0, 1))
    made = objective(
        advantage="turn_returns",
        advantage_options={"whiten": False, "gamma": 0.5},
        kl="k2",
        kl_coef=0.1,
        kl_in="reward",
    )
    proximal = batch.behaviour
    towards = torch.where(batch.sampled, proximal - 1.0, torch.nan)
    got = made.advantages(batch, proximal=proximal, reference=Reference(towards, 0.1))
    paid = torch.where(batch.sampled, batch.turn_rewards - 0.1 * 0.5, 0.0)
    near(got.returns, reference_turns.turn_returns(*by_turn(batch, paid), 0.5))


def test_another_estimator_for_the_environment_with_turns() -> None:
    """The mix's other environment needs no turns."""
    plain = [dataclasses.replace(t, env="sums", turn_rewards=(), turns=2) for t in played()[:3]]
    batch = flatten([*plain, *played("lookup")[3:]], (0, 1))
    made = objective(advantage_by_env={"lookup": {"name": "gigpo", "gamma": 0.9}})
    alone = flatten(played("lookup")[3:], (1,))
    expected = objective(advantage="gigpo", advantage_options={"gamma": 0.9}).advantages(alone).advantages
    torch.testing.assert_close(made.advantages(batch).advantages[-len(expected) :], expected)


def test_episodes_of_an_asyncrl_that_kept_no_turns_are_refused_by_name() -> None:
    batch = flatten([dataclasses.replace(played()[0], turn_rewards=()), *played()[1:]], (0, 1))
    with pytest.raises(ConfigError, match=r"learner.advantage is 'turn_grpo': .* no record of what each turn earned"):
        objective(advantage="turn_grpo").advantages(batch)
    objective(advantage="grpo").advantages(batch)


def test_an_environment_without_states_is_refused_by_name() -> None:
    nameless = [with_turns(t, *(turn.reward for turn in t.turn_rewards)) for t in played()]
    with pytest.raises(
        ConfigError, match=r"learner.advantage is 'gigpo': no turn after the first has a state.*Turn\(state="
    ):
        objective(advantage="gigpo").advantages(flatten(nameless, (0, 1)))


@pytest.mark.parametrize(
    ("learner", "said"),
    [
        ({"advantage": "turn_gae"}, r"turn_gae, which needs values: set learner.critic"),
        ({"advantage": "gigpo", "group_size": 1}, r"learner.group_size is 1 and learner.advantage gigpo compares"),
        ({"advantage": "turn_grpo", "group_size": 1}, r"learner.group_size is 1 and learner.advantage turn_grpo"),
    ],
)
def test_what_no_estimator_by_turn_can_do_is_refused_before_the_start(learner: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        tiny_config(**learner)


def test_process_rewards_compare_the_turns_of_one_episode() -> None:
    tiny_config(advantage="turn_grpo", advantage_options={"variant": "process"}, group_size=1)
