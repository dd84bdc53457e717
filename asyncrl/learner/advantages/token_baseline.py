"""A baseline for each token: the one estimator that needs the policy's whole distribution."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from asyncrl.learner.advantages.episodes import gather, promoted
from asyncrl.learner.advantages.estimator import Advantages, EstimatorInputs, estimator
from asyncrl.learner.advantages.returns import discounted, steps_of
from asyncrl.learner.ragged import check_flat, masked, required, segment_sum, unit_ids


@estimator(needs=("logprobs", "sum_pi_sq"))
def optimal_token_baseline(
    inputs: EstimatorInputs,
    *,
    weights: Tensor | None = None,
    variant: Literal["column", "token"] = "column",
    zero_tail: bool = True,
    singleton: Literal["zero", "reward"] = "zero",
) -> Advantages:
    """Optimal token baseline (verl): A = G - b[t], b[t] = sum(G W) / (sum(W) + 1e-8) over the group at place t.

    G: rewards from here on. W: running sum of 1 - 2 pi + sum(pi²), the squared norm of the score in logit space, from
    `logprobs[T]` of the sampled tokens and `sum_pi_sq[T]` over the vocabulary, times `weights[T]`² where given.
    `variant`: the place is the distance from the row's first policy token, holes included (`optimal_token_baseline`),
    or the number of policy tokens before (`tir_optimal_token_baseline`; the only one for episodes of several rows).
    `zero_tail`: in the one longest episode, b = 0 from the length of the second longest on.
    """
    logprobs, sum_pi_sq = required("logprobs", inputs.logprobs), required("sum_pi_sq", inputs.sum_pi_sq)
    rewards, mask, lengths, episodes = inputs.rewards, inputs.mask, inputs.lengths, inputs.episodes
    check_flat("optimal_token_baseline", mask, lengths, weights=weights)
    if variant == "column" and unit_ids(lengths, episodes)[1] != lengths.numel():
        raise ValueError(
            "optimal_token_baseline: an episode has several rows, and 'column' counts places in one. "
            "Set variant: token."
        )
    e = gather(inputs)
    steps = steps_of(mask, lengths, episodes)
    if not steps.token.numel():
        nothing = masked(promoted(rewards), mask)
        return Advantages(nothing, nothing)

    r = steps.take(rewards)
    returns = discounted(r, steps.goes_on(r.dtype))
    norm = 1 - 2 * steps.take(logprobs).exp() + steps.take(sum_pi_sq)
    if weights is not None:
        norm = norm * steps.take(weights).square()
    from_start = discounted(norm.flip(0), (~steps.first).to(norm.dtype).flip(0)).flip(0)

    index = torch.arange(steps.token.numel(), device=mask.device)
    begin = torch.where(steps.first, index, 0).cummax(0).values
    place = index - begin if variant == "token" else steps.token - steps.token[begin]
    group = e.group[steps.episode]
    stride = int(place.max()) + 1
    at = group * stride + place
    cells = e.size.numel() * stride
    above, below = segment_sum(returns * from_start, at, cells), segment_sum(from_start, at, cells)
    baseline = (above / (below + 1e-8))[at]
    if zero_tail:
        longest = e.group_max(e.tokens)[e.group]
        is_longest = e.tokens == longest
        second = e.group_max(torch.where(is_longest, -torch.inf, e.tokens))[e.group]
        alone_at_top = is_longest & (e.group_sum(is_longest.to(e.tokens.dtype)) == 1)[e.group]
        baseline = torch.where(alone_at_top[steps.episode] & (place >= second[steps.episode]), 0.0, baseline)
    a = returns - baseline
    a = torch.where(e.alone[steps.episode], returns if singleton == "reward" else 0.0, a)
    flat = e.constant(e.reward) & ~e.alone
    return Advantages(steps.put(torch.where(flat[steps.episode], 0.0, a)), steps.put(returns))
