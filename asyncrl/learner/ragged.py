"""The flat layout: `[T]` tokens cut into `[B]` rows by `lengths[B]`, and sums over parts of it.

    tokens   a a a a b b c c c        T = 9
    lengths  4       2   3            B = 3
    mask     . 1 1 1 . 1 1 . 1        true where the policy sampled the token; rows may have holes

No padding exists, so none can leak into a mean. Everything here is a scatter by ids: no loop over rows or tokens.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to this before exp, as in verl and SkyRL: e^20 is finite, and outside every trust region."""


def check_flat(where: str, mask: Tensor, lengths: Tensor, **per_token: Tensor | None) -> None:
    """Raise ValueError unless every given tensor is `[T]` as `mask` is and, where reading is free, lengths sum to T."""
    if mask.dim() != 1 or mask.dtype != torch.bool:
        raise ValueError(f"{where}: mask is {tuple(mask.shape)} {mask.dtype}, expected [T] bool. Flatten the batch.")
    if lengths.dim() != 1:
        raise ValueError(f"{where}: lengths is {tuple(lengths.shape)}, expected [B]: the tokens of each row.")
    for name, tensor in per_token.items():
        if tensor is not None and tensor.shape != mask.shape:
            raise ValueError(
                f"{where}: {name} is {tuple(tensor.shape)}, expected [{mask.numel()}] as mask is. "
                f"Pass one value per token of the flat batch."
            )
    if not lengths.is_cuda and int(lengths.sum()) != mask.numel():
        raise ValueError(
            f"{where}: lengths sum to {int(lengths.sum())} and mask has {mask.numel()} tokens. They must be equal."
        )


def required(name: str, value: T | None) -> T:
    """The value. Raises TypeError naming the input when it is None, as Python does for an argument not passed."""
    if value is None:
        raise TypeError(f"missing the required input {name!r}: the caller has not given it.")
    return value


def row_of_token(lengths: Tensor, total: int) -> Tensor:
    """The row of each token, `[T]` int64."""
    rows = torch.arange(lengths.numel(), device=lengths.device)
    return torch.repeat_interleave(rows, lengths, output_size=total)


def spread(per_row: Tensor, lengths: Tensor, total: int) -> Tensor:
    """A value of each row `[B]` on every token of it `[T]`. Its gradient, a sum over the row, is summed in float64."""
    wide = per_row.double() if per_row.requires_grad else per_row
    return torch.repeat_interleave(wide, lengths, output_size=total).to(per_row.dtype)


def segment_sum(x: Tensor, ids: Tensor, count: int) -> Tensor:
    """Sum of `x[N]` over equal `ids[N]`, `[count]`. Floats are summed in float64: 64k in float32 lose 3 digits."""
    wide = x.double() if x.is_floating_point() else x
    return torch.zeros(count, dtype=wide.dtype, device=x.device).index_add(0, ids, wide).to(x.dtype)


def row_sum(x: Tensor, lengths: Tensor) -> Tensor:
    """Sum of `x[T]` over each row, `[B]`."""
    return segment_sum(x, row_of_token(lengths, x.numel()), lengths.numel())


def row_tokens(mask: Tensor, lengths: Tensor) -> Tensor:
    """Policy tokens of each row, `[B]` int64."""
    return row_sum(mask.long(), lengths)


def row_mean(x: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
    """Mean of `x[T]` over the policy tokens of each row, `[B]`; 0 for a row without any."""
    return row_sum(masked(x, mask), lengths) / row_tokens(mask, lengths).clamp(min=1).to(x.dtype)


def masked(x: Tensor, mask: Tensor) -> Tensor:
    """`x[T]` with exact zeros outside the mask, where it may hold anything, NaN too."""
    return torch.where(mask, x, torch.zeros((), dtype=x.dtype, device=x.device))


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean over the policy tokens, a scalar; 0 when there are none."""
    return masked(x, mask).sum() / mask.sum().clamp(min=1).to(x.dtype)


def share(condition: Tensor, mask: Tensor) -> Tensor:
    """Fraction of the policy tokens for which `condition[T]` holds, float32 scalar; 0 when there are none."""
    return masked_mean(condition.float(), mask)


def log_ratio(above: Tensor, below: Tensor, mask: Tensor) -> Tensor:
    """`above - below` of two logprobs `[T]`, 0 outside the mask. Unclamped: a sum over a row must see all of it."""
    return masked(above - below, mask)


def clamped_exp(log: Tensor) -> Tensor:
    """exp of a log-ratio clamped to ±20; no gradient where the clamp acts."""
    return log.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def unit_ids(lengths: Tensor, units: Tensor | None) -> tuple[Tensor, int]:
    """The unit (episode, group: any integer labels `[B]`) of each row as 0..n-1, and n. None: every row is its own."""
    if units is None:
        return torch.arange(lengths.numel(), device=lengths.device), lengths.numel()
    names, index = torch.unique(units, return_inverse=True)
    return index, names.numel()
