"""More estimators that compare an episode's reward with its group's. The table and the rules are in `__init__.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from asyncrl.learner.advantages.episodes import (
    Advantages,
    Episodes,
    Singleton,
    gather,
    on_tokens,
    promoted,
    shared_by_rows,
    whiten,
)
from asyncrl.learner.ragged import require, row_sum, segment_sum


def opo(
    rewards: Tensor,
    mask: Tensor,
    lengths: Tensor,
    groups: Tensor,
    values: Tensor | None = None,
    episodes: Tensor | None = None,
    *,
    singleton: Singleton = "zero",
) -> Advantages:
    """OPO (2505.23585): A = R - sum(|y| R) / sum(|y|), |y| the policy tokens of an episode. verl.

    The baseline of least variance if the gradients of tokens are orthogonal and of one norm.
    """
    e = gather("opo", rewards, mask, lengths, groups, episodes)
    tokens = e.group_sum(e.tokens)
    baseline = e.group_sum(e.tokens * e.reward) / torch.where(tokens > 0, tokens, 1.0)
    value = torch.where(e.constant(e.reward), 0.0, e.reward - baseline[e.group])
    return shared_by_rows(value, e, mask, lengths, singleton)


def gpg(
    rewards: Tensor,
    mask: Tensor,
    lengths: Tensor,
    groups: Tensor,
    values: Tensor | None = None,
    episodes: Tensor | None = None,
    *,
    f_norm: float = 1.0,
    singleton: Singleton = "zero",
) -> Advantages:
    """GPG (2504.02546): A = alpha (R - mean) / f_norm, alpha = episodes / episodes whose reward is not 0. verl.

    alpha makes up for the groups whose gradient is 0; it is of the whole batch.
    """
    e = gather("gpg", rewards, mask, lengths, groups, episodes)
    alpha = e.reward.numel() / (e.reward != 0).sum().clamp(min=1).to(e.reward.dtype)
    value = torch.where(e.alone, e.reward, e.centred(e.reward)) * alpha / f_norm
    return shared_by_rows(value, e, mask, lengths, singleton, of_one=value)


def grpo_passk(
    rewards: Tensor,
    mask: Tensor,
    lengths: Tensor,
    groups: Tensor,
    values: Tensor | None = None,
    episodes: Tensor | None = None,
    *,
    eps: float = 1e-6,
    scale_by_std: bool = True,
    singleton: Singleton = "zero",
) -> Advantages:
    """Pass@k (2503.19595): the group's best episode gets (its R - the second best) / (std + eps), the others 0. verl.

    Equal bests have advantage 0, all of them.
    """
    e = gather("grpo_passk", rewards, mask, lengths, groups, episodes)
    best = e.reward == e.group_max(e.reward)[e.group]
    second = e.group_max(torch.where(best, -torch.inf, e.reward))[e.group]
    unique = (e.group_sum(best.to(e.reward.dtype)) == 1)[e.group] & ~e.alone
    value = torch.where(best & unique, e.reward - second, 0.0)
    if scale_by_std:
        value = value / (e.group_std(e.reward)[e.group] + eps)
    return shared_by_rows(value, e, mask, lengths, singleton)


def max_rl(
    rewards: Tensor,
    mask: Tensor,
    lengths: Tensor,
    groups: Tensor,
    values: Tensor | None = None,
    episodes: Tensor | None = None,
    *,
    eps: float = 1e-6,
    variant: Literal["guarded", "eps"] = "guarded",
    singleton: Singleton = "zero",
) -> Advantages:
    """MaxRL (2602.02710): A = (R - mean) / mean: maximum likelihood of success, to first order.

    `variant`: `guarded`, 0 where the mean is not above 0 (prime-rl); `eps`, / (mean + eps) unguarded: a negative mean
    turns the sign around (SkyRL).
    """
    e = gather("max_rl", rewards, mask, lengths, groups, episodes)
    mean = e.group_mean(e.reward)[e.group]
    centred = e.centred(e.reward)
    if variant == "guarded":
        value = torch.where(mean > 0, centred / torch.where(mean > 0, mean, 1.0), 0.0)
    else:
        value = centred / (mean + eps)
    return shared_by_rows(value, e, mask, lengths, singleton)


def reinforce_pp_baseline(
    rewards: Tensor,
    mask: Tensor,
    lengths: Tensor,
    groups: Tensor,
    values: Tensor | None = None,
    episodes: Tensor | None = None,
    *,
    singleton: Singleton = "zero",
    keep_zero: bool = False,
) -> Advantages:
    """REINFORCE++-baseline (2501.03262): A = R - mean of the group, then whitened over the batch's policy tokens.

    verl, slime, NeMo. Whitening shifts by the mean over tokens, so a group of equal rewards has its 0 before it, not
    after; `keep_zero` puts the exact 0 back.
    """
    e = gather("reinforce_pp_baseline", rewards, mask, lengths, groups, episodes)
    plain = shared_by_rows(e.centred(e.reward), e, mask, lengths, singleton).advantages
    advantages = whiten(plain, mask)
    if keep_zero:
        advantages = torch.where(plain == 0, 0.0, advantages)
    return Advantages(advantages, advantages)


def gdpo(
    rewards: Tensor,
    mask: Tensor,
    lengths: Tensor,
    groups: Tensor,
    values: Tensor | None = None,
    episodes: Tensor | None = None,
    *,
    reward_components: Tensor,
    reward_names: Sequence[str] | None = None,
    weights: Tensor | Sequence[float] | Mapping[str, float] | None = None,
    eps: float = 1e-6,
    variant: Literal["token", "episode"] = "token",
    singleton: Singleton = "zero",
) -> Advantages:
    """GDPO (2601.05242): GRPO's advantage of each of K rewards, their weighted sum, whitened over the batch.

    `reward_components[K, T]` as `rewards[T]`, which is not read; `weights[K]`, default 1 each, or by name, of
    `reward_names[K]`: one without a weight counts 0. Normalising each reward first keeps apart what a sum of rewards
    would make equal. `variant`: whitened over policy tokens (verl), or over
    episodes, (x - mean) / std (NeMo; TRL `normalize_then_sum`).
    """
    require("gdpo", reward_components=reward_components)
    if reward_components.dim() != 2 or reward_components.shape[1] != mask.numel():
        raise ValueError(f"gdpo: reward_components is {tuple(reward_components.shape)}, expected [K, {mask.numel()}].")
    e = gather("gdpo", rewards, mask, lengths, groups, episodes)
    parts = [
        segment_sum(row_sum(promoted(component), lengths), e.of_row, e.reward.numel())
        for component in reward_components
    ]
    of_each = torch.stack([normalised_in_group(e, part, eps, True, "group") for part in parts])
    if singleton == "reward":
        of_each = torch.where(e.alone, torch.stack(parts), of_each)
    if isinstance(weights, Mapping):
        weights = _by_name(weights, reward_names)
    scale = torch.as_tensor([1.0] * len(parts) if weights is None else weights, dtype=of_each.dtype)
    if scale.shape != (len(parts),):
        raise ValueError(f"gdpo: weights is {tuple(scale.shape)}, expected [{len(parts)}], one for each reward.")
    total = (scale.to(of_each.device)[:, None] * of_each).sum(0)
    if variant == "token":
        advantages = whiten(on_tokens(total, e, mask, lengths), mask)
    else:
        deviation = total - total.mean() if total.numel() else total
        std = total.std() if total.numel() > 1 else total.new_zeros(())
        advantages = on_tokens(torch.where(std > 0, deviation / std, 0.0), e, mask, lengths)
    return Advantages(advantages, advantages)


def _by_name(weights: Mapping[str, float], names: Sequence[str] | None) -> list[float]:
    require("gdpo", reward_names=names)
    assert names is not None
    if unknown := sorted(weights.keys() - set(names)):
        raise ValueError(
            f"gdpo: weights name {unknown[0]!r}, and the rewards of these episodes are {', '.join(names)}. An "
            "environment that gives a reward by name must give it in every episode, 0 where nothing was earned."
        )
    return [float(weights.get(name, 0.0)) for name in names]


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
