"""From a loss per token to one number, independent of how the training step was cut.

Every aggregation is `sum_t c_t * per_token_t / denominator`, where c_t depends on masks only. Two quantities reach
beyond a micro-batch, and both are inputs: `denominator`, which is `denominator(name, ...)` of the whole training step
(additive over parts and ranks that do not cut a unit, so ranks sum theirs), and `unit_tokens[B]`, the policy tokens of
the unit (episode, prompt) that a row belongs to, needed only when a unit's rows lie in different micro-batches.

    whole step:   n = denominator(name, mask, lengths, episodes=e);  u = unit_tokens(name, mask, lengths, episodes=e)
    each part:    AGGREGATIONS[name](per_token, mask, lengths, denominator=n, unit_tokens=u[rows], ...).backward()

`seq` is an episode: rows of one episode share one token count and weigh 1 together (`episodes=None`: one row each).
A batch without policy tokens gives exactly 0, with a graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from asyncrl.learner.ragged import check_flat, masked, row_tokens, segment_sum, spread, unit_ids

Rows = Literal["nonempty", "all"]


def token_mean(
    per_token: Tensor,
    mask: Tensor,
    lengths: Tensor,
    denominator: Tensor | float | None = None,
    episodes: Tensor | None = None,
    *,
    unit_tokens: Tensor | None = None,
) -> Tensor:
    """Sum of L over policy tokens / their number. verl, AReaL, TRL (dapo, bnpo), prime-rl; DAPO, 2503.14476."""
    return _finish("token_mean", per_token, mask, lengths, denominator, episodes)


def seq_mean_token_sum(
    per_token: Tensor,
    mask: Tensor,
    lengths: Tensor,
    denominator: Tensor | float | None = None,
    episodes: Tensor | None = None,
    *,
    unit_tokens: Tensor | None = None,
    rows: Rows = "nonempty",
) -> Tensor:
    """Sum of L / number of episodes. `rows`: those with a policy token (verl), or all of them."""
    return _finish("seq_mean_token_sum", per_token, mask, lengths, denominator, episodes, rows=rows)


def seq_mean_token_mean(
    per_token: Tensor,
    mask: Tensor,
    lengths: Tensor,
    denominator: Tensor | float | None = None,
    episodes: Tensor | None = None,
    *,
    unit_tokens: Tensor | None = None,
    rows: Rows = "nonempty",
) -> Tensor:
    """Mean over episodes of the mean over the episode's tokens: GRPO, 2402.03300; GSPO, 2507.18071.

    `rows`: divide by the episodes with a policy token (verl), or by all (SkyRL, TRL, slime, NeMo).
    """
    tokens = unit_tokens if unit_tokens is not None else _unit_tokens(mask, lengths, episodes)
    scaled = per_token / spread(tokens.clamp(min=1).to(per_token.dtype), lengths, mask.numel())
    return _finish("seq_mean_token_mean", scaled, mask, lengths, denominator, episodes, rows=rows)


def seq_mean_token_sum_norm(
    per_token: Tensor,
    mask: Tensor,
    lengths: Tensor,
    denominator: Tensor | float | None = None,
    episodes: Tensor | None = None,
    *,
    norm: float | None = None,
    unit_tokens: Tensor | None = None,
    rows: Literal["nonempty", "all", "none"] = "nonempty",
) -> Tensor:
    """Sum of L / number of episodes / `norm`: Dr.GRPO (2503.20783) has a constant in place of each row's length.

    `norm`: the longest response, say. None: the most policy tokens in a row of this call, which then must hold the
    whole step (verl's default is the padded width). `rows`: `nonempty` (verl), `all` (TRL dr_grpo, SkyRL), `none`
    divides by `norm` alone (older verl).
    """
    if norm is None:
        if denominator is not None:
            raise TypeError(
                "seq_mean_token_sum_norm() missing the required input 'norm': a part of a step cannot know the longest "
                "row. Set learner.aggregation_options.norm."
            )
        norm = float(row_tokens(mask, lengths).max().clamp(min=1)) if lengths.numel() else 1.0
    if norm <= 0:
        raise ValueError(f"seq_mean_token_sum_norm: norm is {norm}, expected above 0: the longest response in tokens.")
    return _finish("seq_mean_token_sum_norm", per_token / norm, mask, lengths, denominator, episodes, rows=rows)


def prompt_mean(
    per_token: Tensor,
    mask: Tensor,
    lengths: Tensor,
    denominator: Tensor | float | None = None,
    episodes: Tensor | None = None,
    *,
    groups: Tensor,
    unit_tokens: Tensor | None = None,
) -> Tensor:
    """Mean over prompts (`groups[B]`) of the mean over the prompt's tokens; prompts without any do not count. SkyRL."""
    tokens = unit_tokens if unit_tokens is not None else _unit_tokens(mask, lengths, groups)
    scaled = per_token / spread(tokens.clamp(min=1).to(per_token.dtype), lengths, mask.numel())
    return _finish("prompt_mean", scaled, mask, lengths, denominator, groups)


AGGREGATIONS: dict[str, Callable[..., Tensor]] = {
    "token_mean": token_mean,
    "seq_mean_token_mean": seq_mean_token_mean,
    "seq_mean_token_sum": seq_mean_token_sum,
    "seq_mean_token_sum_norm": seq_mean_token_sum_norm,
    "prompt_mean": prompt_mean,
}


def denominator(
    name: str,
    mask: Tensor,
    lengths: Tensor,
    *,
    episodes: Tensor | None = None,
    groups: Tensor | None = None,
    rows: Literal["nonempty", "all", "none"] = "nonempty",
) -> Tensor:
    """What AGGREGATIONS[name] divides by: tokens, episodes or prompts, a scalar (float64 on CPU, float32 elsewhere).

    Give the mask before any correction, unless the loss shall be divided by what was kept (`denominator: kept`).
    """
    if name not in AGGREGATIONS:
        raise ValueError(f"aggregation: {name!r} has no denominator. Expected one of {', '.join(AGGREGATIONS)}.")
    dtype = torch.float64 if mask.device.type == "cpu" else torch.float32
    if name == "token_mean":
        return mask.sum().to(dtype)
    if rows == "none":
        return torch.ones((), dtype=dtype, device=mask.device)
    if name == "prompt_mean" and groups is None:
        raise TypeError("denominator('prompt_mean') missing the required input 'groups': pass it as a keyword.")
    index, count = unit_ids(lengths, groups if name == "prompt_mean" else episodes)
    if rows == "all":
        return torch.full((), count, dtype=dtype, device=mask.device)
    return (segment_sum(row_tokens(mask, lengths), index, count) > 0).sum().to(dtype)


def unit_tokens(
    name: str, mask: Tensor, lengths: Tensor, *, episodes: Tensor | None = None, groups: Tensor | None = None
) -> Tensor:
    """Policy tokens of the unit of each row, `[B]` int64: of its prompt for `prompt_mean`, else of its episode."""
    return _unit_tokens(mask, lengths, groups if name == "prompt_mean" else episodes)


def _unit_tokens(mask: Tensor, lengths: Tensor, units: Tensor | None) -> Tensor:
    index, count = unit_ids(lengths, units)
    return segment_sum(row_tokens(mask, lengths), index, count)[index]


def _finish(
    name: str,
    scaled: Tensor,
    mask: Tensor,
    lengths: Tensor,
    given: Tensor | float | None,
    units: Tensor | None,
    rows: Literal["nonempty", "all", "none"] = "nonempty",
) -> Tensor:
    check_flat(name, mask, lengths, per_token=scaled)
    if given is None:
        given = denominator(name, mask, lengths, episodes=units, groups=units, rows=rows)
    # No policy token in the whole step: the sum is an exact 0 with a graph, and 0 / 1 keeps it.
    divisor = torch.as_tensor(given, device=scaled.device).to(scaled.dtype)
    return masked(scaled, mask).sum() / torch.where(divisor > 0, divisor, torch.ones_like(divisor))
