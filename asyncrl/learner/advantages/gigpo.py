"""GiGPO (2505.10978): episodes compared with their siblings, and turns with siblings' turns in the same state.

    A = A_episode + omega * A_step
    A_episode = (R - mean) / F over the group
    A_step    = (G - mean) / F over all turns of the group that began in the turn's state (its anchor state)

with G the turn's discounted return and F the standard deviation plus eps, or 1 (`scale_by_std: false`).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from asyncrl.learner.advantages.episodes import Episodes, Singleton, gather, normalised_in_group
from asyncrl.learner.advantages.estimator import Advantages, EstimatorInputs, estimator
from asyncrl.learner.advantages.turns import Turns, cells, earned, turns_in
from asyncrl.learner.ragged import required


@estimator(needs=("turn_of", "turn_rewards", "states"))
def gigpo(
    inputs: EstimatorInputs,
    *,
    omega: float = 1.0,
    gamma: float = 0.95,
    eps: float = 1e-6,
    scale_by_std: bool = True,
    statistics: Literal["episodes", "turns"] = "episodes",
    singleton: Singleton = "zero",
) -> Advantages:
    """GiGPO; a state that one turn alone began in adds nothing.

    `gamma`: of G; R is the undiscounted sum. `scale_by_std`: verl-agent's `mean_std_norm`, false its `mean_norm`.
    `statistics`: mean and std of R over the group's `episodes` (the paper, DrMAS), or over its `turns`, each with the R
    of its episode, so that long episodes weigh more (verl-agent's default, ROLL). Raises ValueError where turns after
    the first have no state at all: the environment gives no `Turn(state=...)`.
    """
    turns, e = turns_in(inputs), gather(inputs)
    state = _states(inputs, turns)
    options = (eps, scale_by_std, "group")
    if statistics == "turns":
        compared = cells(e.reward[turns.episode], e.group[turns.episode])
        of_episode = _or_alone(compared, normalised_in_group(compared, compared.reward, *options), singleton)
    else:
        of_episode = _or_alone(e, normalised_in_group(e, e.reward, *options), singleton)[turns.episode]
    g = turns.returns(earned(inputs, turns), gamma)
    anchored = cells(g, _anchors(state, e.group[turns.episode]))
    of_step = _or_alone(anchored, normalised_in_group(anchored, g, *options), "zero")
    advantages = turns.put(of_episode + omega * of_step)
    return Advantages(advantages, advantages)


def _states(inputs: EstimatorInputs, turns: Turns) -> Tensor:
    """[K] the number of the state in which each turn began, below 0 where it has no name."""
    state = turns.first(required("states", inputs.states)).long()
    later = turns.number > 0
    if bool(later.any()) and not bool((state[later] >= 0).any()):
        raise ValueError(
            "no turn after the first has a state. The environment names the state that each answer leaves: "
            "Turn(state=asyncrl.state_key(observation)) (docs/how-to/environments.md)."
        )
    return state


def _anchors(state: Tensor, group: Tensor) -> Tensor:
    """[K] a label for each pair of group and state; one of its own for each turn whose state has no name."""
    unnamed = state < 0
    states = int(state.max()) + 1 if state.numel() else 0
    alone = states + torch.arange(state.numel(), device=state.device)
    return group * (states + state.numel()) + torch.where(unnamed, alone, state)


def _or_alone(compared: Episodes, value: Tensor, singleton: Singleton) -> Tensor:
    """The value, and `singleton`'s where nothing else is compared with it."""
    return torch.where(compared.alone, compared.reward if singleton == "reward" else 0.0, value)
