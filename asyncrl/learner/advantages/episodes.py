"""From rows to episodes to groups: the statistics that baselines are made of, and whitening."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from asyncrl.learner.advantages.estimator import Advantages, EstimatorInputs
from asyncrl.learner.batch import Batch
from asyncrl.learner.ragged import masked, row_sum, row_tokens, segment_sum, spread, unit_ids

Singleton = Literal["zero", "reward"]
"""The advantage of a group of one: 0, or its reward."""


@dataclass(frozen=True, slots=True)
class Episodes:
    """The E episodes of a batch and the statistics of their G groups, an episode counting once however many its rows.

    A row without policy tokens counts with its reward: it may be masked by age and still inform the baseline.
    """

    of_row: Tensor
    """[B] the episode of each row."""
    group: Tensor
    """[E] the group of each episode, 0..G-1."""
    reward: Tensor
    """[E] sum of all rewards of the episode's rows, at least float32."""
    tokens: Tensor
    """[E] policy tokens, same dtype as reward."""
    size: Tensor
    """[G] episodes in each group, same dtype as reward."""

    def group_sum(self, x: Tensor) -> Tensor:
        """Sum of `x[E]` over each group, `[G]`."""
        return segment_sum(x, self.group, self.size.numel())

    def group_mean(self, x: Tensor) -> Tensor:
        """Mean of `x[E]` over each group, `[G]`."""
        return self.group_sum(x) / self.size

    def group_std(self, x: Tensor) -> Tensor:
        """Standard deviation of `x[E]` over each group with Bessel's correction, `[G]`; 0 in a group of one."""
        deviation = x - self.group_mean(x)[self.group]
        return (self.group_sum(deviation.square()) / (self.size - 1).clamp(min=1)).sqrt()

    def group_max(self, x: Tensor) -> Tensor:
        """Largest `x[E]` of each group, `[G]`."""
        return torch.full_like(self.size, -torch.inf).scatter_reduce(0, self.group, x, "amax")

    def constant(self, x: Tensor) -> Tensor:
        """[E] bool: all of the episode's group have the same x. Exact, where a std of rounded numbers is not 0."""
        return (self.group_max(x) == -self.group_max(-x))[self.group]

    def centred(self, x: Tensor) -> Tensor:
        """x - mean of its group, `[E]`, exactly 0 where the group's x are all equal."""
        return torch.where(self.constant(x), 0.0, x - self.group_mean(x)[self.group])

    @property
    def over_others(self) -> Tensor:
        """G / (G - 1), `[E]`, 1 in a group of one: turns x - mean of all into x - mean of the others."""
        size = self.size[self.group]
        return size / (size - 1).clamp(min=1)

    @property
    def alone(self) -> Tensor:
        """[E] bool: the episode is a group of one."""
        return (self.size == 1)[self.group]


def gather(inputs: EstimatorInputs) -> Episodes:
    """The episodes of a batch. Raises ValueError when an episode's rows name different groups."""
    rewards, lengths = promoted(inputs.rewards), inputs.lengths
    of_row, count = unit_ids(lengths, inputs.episodes)
    group_of_row, num_groups = unit_ids(lengths, inputs.groups)
    group = torch.zeros(count, dtype=torch.long, device=lengths.device).scatter(0, of_row, group_of_row)
    if not torch.equal(group[of_row], group_of_row):
        raise ValueError("rows of one episode carry different groups. An episode belongs to one group.")
    return Episodes(
        of_row=of_row,
        group=group,
        reward=segment_sum(row_sum(rewards, lengths), of_row, count),
        tokens=segment_sum(row_tokens(inputs.mask, lengths), of_row, count).to(rewards.dtype),
        size=segment_sum(torch.ones_like(group), group, num_groups).to(rewards.dtype),
    )


def on_tokens(value: Tensor, episodes: Episodes, inputs: EstimatorInputs) -> Tensor:
    """A value of each episode `[E]` on the policy tokens of all its rows, `[T]`."""
    return masked(spread(value[episodes.of_row], inputs.lengths, inputs.mask.numel()), inputs.mask)


def shared_by_rows(
    value: Tensor,
    episodes: Episodes,
    inputs: EstimatorInputs,
    singleton: Singleton,
    of_one: Tensor | None = None,
) -> Advantages:
    """Advantages of a value of each episode `[E]`, with `singleton` applied to groups of one.

    `of_one[E]` is the value of a group of one under `reward`, if not the plain reward.
    """
    reward = episodes.reward if of_one is None else of_one
    value = torch.where(episodes.alone, reward if singleton == "reward" else 0.0, value)
    advantages = on_tokens(value, episodes, inputs)
    return Advantages(advantages, advantages)


def promoted(x: Tensor) -> Tensor:
    """Detached and in at least float32: sums over a group in half precision would lose the differences they are for."""
    return x.detach().to(torch.promote_types(x.dtype, torch.float32))


def whiten(x: Tensor, mask: Tensor) -> Tensor:
    """(x - mean) / sqrt(var + 1e-8) over the policy tokens, var with Bessel's correction, 0 elsewhere. verl.

    One policy token alone, or none, gives 0.
    """
    count = mask.sum().to(x.dtype)
    deviation = masked(x - masked(x, mask).sum() / count.clamp(min=1), mask)
    variance = deviation.square().sum() / (count - 1).clamp(min=1)
    return deviation * torch.rsqrt(variance + 1e-8)


def normalised_in_group(e: Episodes, reward: Tensor, eps: float, scale_by_std: bool, variant: str) -> Tensor:
    """GRPO's advantage of each episode, `[E]`, for one reward `[E]`."""
    centred = e.centred(reward)
    if variant in ("leave_one_out_mean", "leave_one_out"):
        centred = centred * e.over_others
    if not scale_by_std:
        return centred
    if variant == "leave_one_out":
        std = _std_of_others(e, reward)
        return torch.where(std > 0, centred / (std + eps), centred)
    if variant == "batch_std":
        return centred / (reward.std() + eps) if reward.numel() > 1 else centred
    return centred / (e.group_std(reward)[e.group] + eps)


def _std_of_others(e: Episodes, x: Tensor) -> Tensor:
    """Standard deviation (Bessel) of the group's other episodes, `[E]`; exactly 0 where those are equal."""
    deviation = x - e.group_mean(x)[e.group]
    size = e.size[e.group]
    # Taking one of G away: sum of squares - G/(G-1) * its own; this leaves G-1 values, G-2 degrees of freedom.
    squares = e.group_sum(deviation.square())[e.group] - deviation.square() * size / (size - 1).clamp(min=1)
    std = (squares / (size - 2).clamp(min=1)).clamp(min=0).sqrt()
    highest, lowest = e.group_max(x)[e.group], -e.group_max(-x)[e.group]
    at_highest, at_lowest = e.group_sum((x == highest).to(x.dtype)), e.group_sum((x == lowest).to(x.dtype))
    others_equal = (
        (highest == lowest)
        | ((at_highest[e.group] == size - 1) & (x != highest))
        | ((at_lowest[e.group] == size - 1) & (x != lowest))
        | (size <= 2)
    )
    return torch.where(others_equal, 0.0, std)


def trajectory_weights(weights: Tensor, batch: Batch, groups: Sequence[int]) -> dict[int, list[float]]:
    """Mean importance weight, of `weights[T]`, over each trajectory's tokens that carry loss: by group (`groups`: the
    batch's, in its order), then by index in the group. 0 where no token does."""
    episode = spread(batch.episodes, batch.lengths, len(batch.mask))
    count = int(batch.episodes.max()) + 1
    total = segment_sum(masked(weights, batch.mask), episode, count)
    tokens = segment_sum(batch.mask.to(total.dtype), episode, count)
    place_of = dict(zip(batch.episodes.tolist(), batch.groups.tolist(), strict=True))
    found: dict[int, list[float]] = {}
    for episode_number, mean in enumerate((total / tokens.clamp(min=1)).tolist()):
        found.setdefault(groups[place_of[episode_number]], []).append(round(mean, 6))
    return found
