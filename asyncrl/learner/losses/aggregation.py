"""From a loss per token to one number, independent of how the training step was cut.

Every aggregation is `sum_t c_t * per_token_t / denominator`, where c_t depends on masks only. Two quantities reach
beyond a micro-batch, and both are inputs: `denominator`, which is `denominator(name, ...)` of the whole training step
(additive over parts and ranks that do not cut a unit, so ranks sum theirs), and `unit_tokens[B]`, the policy tokens of
the unit (episode, prompt) that a row belongs to, needed only when a unit's rows lie in different micro-batches.

    whole step:   n = denominator(name, mask, lengths, episodes=e);  u = unit_tokens(name, mask, lengths, episodes=e)
    each part:    AGGREGATIONS[name](AggregationInputs(per_token, ..., denominator=n, unit_tokens=u[b])).backward()

`seq` is an episode: rows of one episode share one token count and weigh 1 together (`episodes=None`: one row each).
A batch without policy tokens gives exactly 0, with a graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from asyncrl.learner.ragged import check_flat, masked, required, row_tokens, segment_sum, spread, unit_ids

Rows = Literal["nonempty", "all"]


@dataclass(frozen=True, slots=True)
class AggregationInputs:
    """A loss per token, and the units that it is averaged over."""

    per_token: Tensor
    """[T] float, with gradient"""
    mask: Tensor
    """[T] bool: tokens that carry loss"""
    lengths: Tensor
    """[B] int64: tokens of each row"""
    episodes: Tensor | None = None
    """[B] int64: the episode of each row; None: each row is one"""
    groups: Tensor | None = None
    """[B] int64: the prompt group of each row"""
    denominator: Tensor | float | None = None
    """Of the whole training step; None: this call holds the whole step"""
    unit_tokens: Tensor | None = None
    """[B] int64: policy tokens of each row's unit; None: this call holds all of the unit's rows"""

    def __post_init__(self) -> None:
        check_flat("AggregationInputs", self.mask, self.lengths, per_token=self.per_token)


def token_mean(inputs: AggregationInputs) -> Tensor:
    """Sum of L over policy tokens / their number. verl, AReaL, TRL (dapo, bnpo), prime-rl; DAPO, 2503.14476."""
    return _divided("token_mean", inputs, inputs.per_token)


def seq_mean_token_sum(inputs: AggregationInputs, *, rows: Rows = "nonempty") -> Tensor:
    """Sum of L / number of episodes. `rows`: those with a policy token (verl), or all of them."""
    return _divided("seq_mean_token_sum", inputs, inputs.per_token, rows)


def seq_mean_token_mean(inputs: AggregationInputs, *, rows: Rows = "nonempty") -> Tensor:
    """Mean over episodes of the mean over the episode's tokens: GRPO, 2402.03300; GSPO, 2507.18071.

    `rows`: divide by the episodes with a policy token (verl), or by all (SkyRL, TRL, slime, NeMo).
    """
    return _divided("seq_mean_token_mean", inputs, _over_unit(inputs, inputs.episodes), rows)


def seq_mean_token_sum_norm(
    inputs: AggregationInputs, *, norm: float | None = None, rows: Literal["nonempty", "all", "none"] = "nonempty"
) -> Tensor:
    """Sum of L / number of episodes / `norm`: Dr.GRPO (2503.20783) has a constant in place of each row's length.

    `norm`: for instance the longest response. None: the most policy tokens in a row of this call, which then must hold
    the whole step (verl's default is the padded width). `rows`: `nonempty` (verl), `all` (TRL dr_grpo, SkyRL), `none`
    divides by `norm` alone (older verl).
    """
    if norm is None:
        if inputs.denominator is not None:
            raise TypeError(
                "seq_mean_token_sum_norm() missing the required input 'norm': a part of a step cannot know the longest "
                "row. Set learner.aggregation_options.norm."
            )
        longest = row_tokens(inputs.mask, inputs.lengths)
        norm = float(longest.max().clamp(min=1)) if longest.numel() else 1.0
    if norm <= 0:
        raise ValueError(f"seq_mean_token_sum_norm: norm is {norm}, expected above 0: the longest response in tokens.")
    return _divided("seq_mean_token_sum_norm", inputs, inputs.per_token / norm, rows)


def prompt_mean(inputs: AggregationInputs) -> Tensor:
    """Mean over prompts (`groups[B]`) of the mean over the prompt's tokens; prompts without any do not count. SkyRL."""
    return _divided("prompt_mean", inputs, _over_unit(inputs, required("groups", inputs.groups)))


Aggregation = Callable[..., Tensor]
"""`(inputs: AggregationInputs, *, options) -> scalar`"""

AGGREGATIONS: dict[str, Aggregation] = {
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

    Give the mask before any correction, unless the loss is to be divided by what was kept (`denominator: kept`).
    """
    if name not in AGGREGATIONS:
        raise ValueError(f"aggregation: {name!r} has no denominator. Expected one of {', '.join(AGGREGATIONS)}.")
    dtype = torch.float64 if mask.device.type == "cpu" else torch.float32
    if name == "token_mean":
        return mask.sum().to(dtype)
    if rows == "none":
        return torch.ones((), dtype=dtype, device=mask.device)
    units = required("groups", groups) if name == "prompt_mean" else episodes
    index, count = unit_ids(lengths, units)
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


def _over_unit(inputs: AggregationInputs, units: Tensor | None) -> Tensor:
    """`per_token[T]` over the policy tokens of its unit."""
    tokens = inputs.unit_tokens
    if tokens is None:
        tokens = _unit_tokens(inputs.mask, inputs.lengths, units)
    counts = tokens.clamp(min=1).to(inputs.per_token.dtype)
    return inputs.per_token / spread(counts, inputs.lengths, inputs.mask.numel())


def _divided(
    name: str, inputs: AggregationInputs, scaled: Tensor, rows: Literal["nonempty", "all", "none"] = "nonempty"
) -> Tensor:
    total = inputs.denominator
    if total is None:
        total = denominator(
            name, inputs.mask, inputs.lengths, episodes=inputs.episodes, groups=inputs.groups, rows=rows
        )
    # No policy token in the whole step: the sum is an exact 0 with a graph, and 0 / 1 keeps it.
    divisor = torch.as_tensor(total, device=scaled.device).to(scaled.dtype)
    return masked(scaled, inputs.mask).sum() / torch.where(divisor > 0, divisor, torch.ones_like(divisor))
