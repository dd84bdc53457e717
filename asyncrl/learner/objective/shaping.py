"""Rewards before they become advantages: penalties, clipping, PF-PPO's choice of what to train on (`learner.shaping`).

Each function takes `(inputs: ShapingInputs, *, options)` and returns the new reward of each episode. Filters of
zero-variance groups judge the raw reward, not the shaped one: a length penalty gives every group some variance.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from asyncrl.learner.advantages.returns import steps_of
from asyncrl.learner.advantages.turns import turns_of
from asyncrl.learner.batch import Batch
from asyncrl.learner.objective.choice import Chosen
from asyncrl.learner.ragged import row_sum, segment_sum, spread, unit_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapingInputs:
    """The E episodes of a batch."""

    rewards: Tensor
    """[E] float: as the functions before this one left them"""
    groups: Tensor
    """[E] int64: the episode's prompt group"""
    output_tokens: Tensor
    """[E] int64: tokens that the policy sampled"""
    input_tokens: Tensor
    """[E] int64: all other tokens"""
    turns: Tensor
    """[E] int64: assistant turns"""
    truncated: Tensor
    """[E] bool: a limit of turns or tokens ended the episode"""


def overlong_penalty(
    inputs: ShapingInputs, *, max_tokens: int, buffer_tokens: int, factor: float = 1.0, floor: bool = False
) -> Tensor:
    """DAPO (2503.14476): R + min(-(tokens - (max_tokens - buffer_tokens)) / buffer_tokens * factor, 0), `[E]`.

    `tokens`: the output tokens. `floor`: never below -factor, however far past max_tokens (the paper; verl and AReaL
    have no floor).
    """
    if not 0 < buffer_tokens <= max_tokens:
        raise ValueError(
            f"overlong_penalty: buffer_tokens is {buffer_tokens}, expected 1 to max_tokens = {max_tokens}."
        )
    penalty = -(inputs.output_tokens - (max_tokens - buffer_tokens)) / buffer_tokens * factor
    return inputs.rewards + penalty.clamp(min=-factor if floor else None, max=0.0).to(inputs.rewards.dtype)


def stop_properly(inputs: ShapingInputs, *, coefficient: float) -> Tensor:
    """R * coefficient for episodes cut at their length limit (`truncated`). NeMo."""
    return torch.where(inputs.truncated, inputs.rewards * coefficient, inputs.rewards)


def clip(inputs: ShapingInputs, *, bias: float = 0.0, scale: float = 1.0, limit: float = 20.0) -> Tensor:
    """(R + bias) * scale, clamped to ±limit. AReaL."""
    return ((inputs.rewards + bias) * scale).clamp(-limit, limit)


def length_penalty(
    inputs: ShapingInputs,
    *,
    output_weight: float = 0.25,
    input_weight: float = 0.1,
    turns_weight: float = 0.1,
) -> Tensor:
    """prime-rl: R - mean(R) * (0.25 output/max output + 0.1 input/max input + 0.1 turns/max turns), all `[E]`.

    Mean and maxima are of the group: a group that always fails is not taught to fail in fewer words.
    """
    rewards = inputs.rewards
    group, count = unit_ids(inputs.groups, inputs.groups)
    size = segment_sum(torch.ones_like(rewards), group, count)
    mean = segment_sum(rewards, group, count) / size

    def relative(x: Tensor) -> Tensor:
        x = x.to(rewards.dtype)
        largest = torch.zeros_like(size).scatter_reduce(0, group, x, "amax")
        return x / torch.where(largest > 0, largest, 1.0)[group]

    cost = output_weight * relative(inputs.output_tokens) + input_weight * relative(inputs.input_tokens)
    return rewards - mean[group] * (cost + turns_weight * relative(inputs.turns))


SHAPING: dict[str, Callable[..., Tensor]] = {
    "overlong_penalty": overlong_penalty,
    "stop_properly": stop_properly,
    "clip": clip,
    "length_penalty": length_penalty,
}


def pf_ppo_weights(
    rewards: Tensor, *, method: Literal["pow", "max_min", "max_random"] = "pow", power: float = 2.0
) -> Tensor:
    """PF-PPO (2409.06957; verl): weight with which each of `rewards[E]` is drawn, never 0.

    `pow`: |R|^power; `max_min`: 1 for the best and the worst, else 0; `max_random`: 0.4 for the best, else 0.1.
    """
    if method == "pow":
        weights = rewards.abs().pow(power)
    elif method == "max_min":
        weights = ((rewards == rewards.max()) | (rewards == rewards.min())).to(rewards.dtype)
    else:
        weights = torch.full_like(rewards, 0.1).masked_fill(rewards == rewards.max(), 0.4)
    return weights + 1e-8


def pf_ppo_resample(
    rewards: Tensor,
    *,
    generator: torch.Generator,
    method: Literal["pow", "max_min", "max_random"] = "pow",
    power: float = 2.0,
) -> Tensor:
    """Indices of E episodes drawn with replacement by `pf_ppo_weights`, `[E]` int64."""
    weights = pf_ppo_weights(rewards, method=method, power=power)
    return torch.multinomial(weights, rewards.numel(), replacement=True, generator=generator)


def pf_ppo_draws(
    rewards: Tensor,
    *,
    generator: torch.Generator,
    method: Literal["pow", "max_min", "max_random"] = "pow",
    power: float = 2.0,
) -> Tensor:
    """Number of times that `pf_ppo_resample` draws each of E episodes, `[E]` of the rewards' dtype; they sum to E."""
    chosen = pf_ppo_resample(rewards, generator=generator, method=method, power=power)
    return torch.bincount(chosen, minlength=rewards.numel()).to(rewards.dtype)


def shaped(batch: Batch, shaping: Sequence[Chosen]) -> Batch:
    """The batch with each episode's reward shaped by one function after another, on the episode's last policy token;
    by turn, what they change is added to the last turn's reward."""
    if not shaping:
        return batch
    index, count = unit_ids(batch.lengths, batch.episodes)
    inputs = _by_episode(batch, index, count)
    for function in shaping:
        inputs = replace(inputs, rewards=function(inputs))
    steps = steps_of(batch.sampled, batch.lengths, batch.episodes)
    last = steps.token[steps.last]
    episode_of_token = spread(index, batch.lengths, len(batch.token_ids))
    rewards = torch.zeros_like(batch.rewards)
    rewards[last] = inputs.rewards[episode_of_token[last]].to(rewards.dtype)
    turns = turns_of(batch.turn_of, batch.lengths, batch.episodes)
    ends = turns.token[turns.end][turns.last]
    change = inputs.rewards - _by_episode(batch, index, count).rewards
    turn_rewards = batch.turn_rewards.clone()
    turn_rewards[ends] += change[episode_of_token[ends]].to(turn_rewards.dtype)
    return replace(batch, rewards=rewards, turn_rewards=turn_rewards)


def resampled(batch: Batch, *, method: Any, power: float, generator: torch.Generator) -> Batch:
    """The batch with each episode weighing in the loss as often as PF-PPO drew it."""
    index, count = unit_ids(batch.lengths, batch.episodes)
    rewards = _by_episode(batch, index, count).rewards
    draws = pf_ppo_draws(rewards, method=method, power=power, generator=generator)
    return replace(batch, loss_weights=batch.loss_weights * draws[index])


def _by_episode(batch: Batch, index: Tensor, count: int) -> ShapingInputs:
    """`index[B]`: the episode of each row, below `count`."""

    def total(per_token: Tensor) -> Tensor:
        return segment_sum(row_sum(per_token, batch.lengths), index, count)

    def of_rows(per_row: Tensor) -> Tensor:
        return torch.zeros(count, dtype=per_row.dtype).scatter(0, index, per_row)

    return ShapingInputs(
        rewards=total(batch.rewards),
        groups=of_rows(batch.groups),
        output_tokens=total(batch.sampled.long()),
        input_tokens=total((~batch.sampled).long()),
        turns=of_rows(batch.turns),
        truncated=of_rows(batch.truncated),
    )
