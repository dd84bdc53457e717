"""The contract of an advantage estimator: its inputs, its result, and the declaration of what it needs."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from torch import Tensor

from asyncrl.learner.declared import Function, declare, declared
from asyncrl.learner.ragged import check_flat

OPTIONAL = ("values", "logprobs", "sum_pi_sq", "baseline", "reward_components", "turn_of", "turn_rewards", "states")
"""Inputs that an estimator gets only if it declares them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimatorInputs:
    """A whole batch: `[T]` tokens in `[B]` rows. Nothing carries a gradient."""

    rewards: Tensor
    """[T] float: an episode's reward, on its last policy token"""
    mask: Tensor
    """[T] bool: tokens that the policy sampled, also those that carry no loss. Elsewhere the tensors but `rewards` may
    hold anything, NaN too"""
    lengths: Tensor
    """[B] int64: tokens of each row"""
    groups: Tensor
    """[B] int64: the prompt group of each row"""
    episodes: Tensor
    """[B] int64: the episode of each row"""
    behaviour: Tensor
    """[T] float: logprobs under the weights that sampled the token, as the engine reported them"""
    values: Tensor | None = None
    """[T] float: the critic's (`learner.critic`)"""
    logprobs: Tensor | None = None
    """[T] float: logprobs under the learner's weights at the start of the training step: one more forward pass"""
    sum_pi_sq: Tensor | None = None
    """[T] float: sum of the squared probabilities of the whole vocabulary, from the same pass"""
    baseline: Tensor | None = None
    """[B] float: reward of the greedy episode of the row's group (`learner.greedy_baseline`)"""
    reward_components: Tensor | None = None
    """[K, T] float: as `rewards`, for each named reward of the environment, unweighted"""
    turn_of: Tensor | None = None
    """[T] int: number of the assistant turn that sampled the token, from 0 in each episode, in the order in which they
    were played; below 0 for none"""
    turn_rewards: Tensor | None = None
    """[T] float: each turn's reward, on its last policy token"""
    states: Tensor | None = None
    """[T] int, on the tokens of a turn: number of the state in which it was sampled, to be compared within a group;
    below 0 for a state without a name"""
    reward_names: tuple[str, ...] = ()
    """K names"""

    def __post_init__(self) -> None:
        check_flat(
            "EstimatorInputs",
            self.mask,
            self.lengths,
            rewards=self.rewards,
            behaviour=self.behaviour,
            values=self.values,
            logprobs=self.logprobs,
            sum_pi_sq=self.sum_pi_sq,
            turn_of=self.turn_of,
            turn_rewards=self.turn_rewards,
            states=self.states,
        )

    def only(self, needs: Collection[str]) -> EstimatorInputs:
        """Without the optional inputs that are not among `needs`."""
        return replace(self, **{name: None for name in OPTIONAL if name not in needs})  # type: ignore[arg-type]

    def take(self, row_ids: Tensor, t: Tensor) -> EstimatorInputs:
        """The rows [b], whose tokens are at `t` [t]."""
        per_row = ("lengths", "groups", "episodes", "baseline")
        per_token = ("rewards", "mask", "behaviour", *(name for name in OPTIONAL if name not in per_row))
        taken = {name: (x, row_ids) for name in per_row if (x := getattr(self, name)) is not None}
        taken |= {name: (x, t) for name in per_token if (x := getattr(self, name)) is not None}
        return replace(self, **{name: x[..., index] for name, (x, index) in taken.items()})


@dataclass(frozen=True, slots=True)
class Advantages:
    """The result of an estimator: both tensors are 0 outside the mask and carry no gradient."""

    advantages: Tensor
    """[T], at least float32."""

    returns: Tensor
    """[T]: what a critic is trained towards; equal to the advantages where the estimator has no critic."""


Estimator = Callable[..., Advantages]
"""`(inputs: EstimatorInputs, *, options) -> Advantages`"""


@dataclass(frozen=True, slots=True)
class EstimatorProperties:
    """The properties that `@estimator` declares."""

    needs: frozenset[str] = frozenset()


def estimator(*, needs: Collection[str] = ()) -> Callable[[Function], Function]:
    """Declares which optional inputs an estimator reads; the others are None for it. Raises ValueError for a name that
    is not one."""
    if unknown := set(needs) - set(OPTIONAL):
        raise ValueError(f"estimator: needs {sorted(unknown)}, expected names among {', '.join(OPTIONAL)}.")
    return declare(EstimatorProperties(frozenset(needs)))


def needs_of(function: Estimator) -> frozenset[str]:
    return declared(function, EstimatorProperties()).needs
