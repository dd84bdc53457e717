"""More estimators that compare an episode's reward with its group's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from asyncrl.learner.advantages.episodes import (
    Singleton,
    gather,
    normalised_in_group,
    on_tokens,
    promoted,
    shared_by_rows,
    whiten,
)
from asyncrl.learner.advantages.estimator import Advantages, EstimatorInputs, estimator
from asyncrl.learner.ragged import required, row_sum, segment_sum


def opo(inputs: EstimatorInputs, *, singleton: Singleton = "zero") -> Advantages:
    """OPO (2505.23585): A = R - sum(|y| R) / sum(|y|), |y| the policy tokens of an episode. verl.

    The baseline of least variance if the gradients of tokens are orthogonal and of one norm.
    """
    e = gather(inputs)
    tokens = e.group_sum(e.tokens)
    baseline = e.group_sum(e.tokens * e.reward) / torch.where(tokens > 0, tokens, 1.0)
    value = torch.where(e.constant(e.reward), 0.0, e.reward - baseline[e.group])
    return shared_by_rows(value, e, inputs, singleton)


def gpg(
    inputs: EstimatorInputs,
    *,
    f_norm: float = 1.0,
    singleton: Singleton = "zero",
) -> Advantages:
    """GPG (2504.02546): A = alpha (R - mean) / f_norm, alpha = episodes / episodes whose reward is not 0. verl.

    alpha makes up for the groups whose gradient is 0; it is of the whole batch.
    """
    e = gather(inputs)
    alpha = e.reward.numel() / (e.reward != 0).sum().clamp(min=1).to(e.reward.dtype)
    value = torch.where(e.alone, e.reward, e.centred(e.reward)) * alpha / f_norm
    return shared_by_rows(value, e, inputs, singleton, of_one=value)


def grpo_passk(
    inputs: EstimatorInputs,
    *,
    eps: float = 1e-6,
    scale_by_std: bool = True,
    singleton: Singleton = "zero",
) -> Advantages:
    """Pass@k (2503.19595): the group's best episode gets (its R - the second best) / (std + eps), the others 0. verl.

    Equal bests have advantage 0, all of them.
    """
    e = gather(inputs)
    best = e.reward == e.group_max(e.reward)[e.group]
    second = e.group_max(torch.where(best, -torch.inf, e.reward))[e.group]
    unique = (e.group_sum(best.to(e.reward.dtype)) == 1)[e.group] & ~e.alone
    value = torch.where(best & unique, e.reward - second, 0.0)
    if scale_by_std:
        value = value / (e.group_std(e.reward)[e.group] + eps)
    return shared_by_rows(value, e, inputs, singleton)


def max_rl(
    inputs: EstimatorInputs,
    *,
    eps: float = 1e-6,
    variant: Literal["guarded", "eps"] = "guarded",
    singleton: Singleton = "zero",
) -> Advantages:
    """MaxRL (2602.02710): A = (R - mean) / mean: maximum likelihood of success, to first order.

    `variant`: `guarded`, 0 where the mean is not above 0 (prime-rl); `eps`, / (mean + eps) unguarded: a negative mean
    turns the sign around (SkyRL).
    """
    e = gather(inputs)
    mean = e.group_mean(e.reward)[e.group]
    centred = e.centred(e.reward)
    if variant == "guarded":
        value = torch.where(mean > 0, centred / torch.where(mean > 0, mean, 1.0), 0.0)
    else:
        value = centred / (mean + eps)
    return shared_by_rows(value, e, inputs, singleton)


def reinforce_pp_baseline(
    inputs: EstimatorInputs,
    *,
    singleton: Singleton = "zero",
    keep_zero: bool = False,
) -> Advantages:
    """REINFORCE++-baseline (2501.03262): A = R - mean of the group, then whitened over the batch's policy tokens.

    verl, slime, NeMo. Whitening shifts by the mean over tokens, so a group of equal rewards has its 0 before it, not
    after; `keep_zero` puts the exact 0 back.
    """
    e = gather(inputs)
    plain = shared_by_rows(e.centred(e.reward), e, inputs, singleton).advantages
    advantages = whiten(plain, inputs.mask)
    if keep_zero:
        advantages = torch.where(plain == 0, 0.0, advantages)
    return Advantages(advantages, advantages)


@estimator(needs=("reward_components",))
def gdpo(
    inputs: EstimatorInputs,
    *,
    weights: Tensor | Sequence[float] | Mapping[str, float] | None = None,
    eps: float = 1e-6,
    variant: Literal["token", "episode"] = "token",
    singleton: Singleton = "zero",
) -> Advantages:
    """GDPO (2601.05242): GRPO's advantage of each of K rewards, their weighted sum, whitened over the batch.

    It reads `reward_components[K, T]` and not `rewards[T]`. `weights[K]`: default 1 each, or by name, of
    `reward_names[K]`: one without a weight counts 0. Normalising each reward first keeps apart what a sum of rewards
    would make equal. `variant`: whitened over policy tokens (verl), or over episodes, (x - mean) / std (NeMo; TRL
    `normalize_then_sum`).
    """
    components, tokens = required("reward_components", inputs.reward_components), inputs.mask.numel()
    if components.dim() != 2 or components.shape[1] != tokens:
        raise ValueError(f"gdpo: reward_components is {tuple(components.shape)}, expected [K, {tokens}].")
    e = gather(inputs)
    parts = [
        segment_sum(row_sum(promoted(component), inputs.lengths), e.of_row, e.reward.numel())
        for component in components
    ]
    of_each = torch.stack([normalised_in_group(e, part, eps, True, "group") for part in parts])
    if singleton == "reward":
        of_each = torch.where(e.alone, torch.stack(parts), of_each)
    if isinstance(weights, Mapping):
        weights = _by_name(weights, inputs.reward_names)
    scale = torch.as_tensor([1.0] * len(parts) if weights is None else weights, dtype=of_each.dtype)
    if scale.shape != (len(parts),):
        raise ValueError(f"gdpo: weights is {tuple(scale.shape)}, expected [{len(parts)}], one for each reward.")
    total = (scale.to(of_each.device)[:, None] * of_each).sum(0)
    if variant == "token":
        advantages = whiten(on_tokens(total, e, inputs), inputs.mask)
    else:
        deviation = total - total.mean() if total.numel() else total
        std = total.std() if total.numel() > 1 else total.new_zeros(())
        advantages = on_tokens(torch.where(std > 0, deviation / std, 0.0), e, inputs)
    return Advantages(advantages, advantages)


def _by_name(weights: Mapping[str, float], names: Sequence[str]) -> list[float]:
    if unknown := sorted(weights.keys() - set(names)):
        raise ValueError(
            f"gdpo: weights name {unknown[0]!r}, and the rewards of these episodes are {', '.join(names)}. An "
            "environment that gives a reward by name must give it in every episode, 0 where nothing was earned."
        )
    return [float(weights.get(name, 0.0)) for name in names]
