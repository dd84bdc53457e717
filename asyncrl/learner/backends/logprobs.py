"""The logprob of each sampled token, and the entropy, without holding all logits in memory.

    forward    a chunk of tokens at a time, over the whole vocabulary: log softmax, of which a few numbers a token stay
    backward   the logits again, of a slice of a large vocabulary at a time: the slice's rows of the head's gradient
               are then complete, and no float32 copy of the whole head is added up for each chunk

Peak memory is a chunk or a slice of logits plus the gradient of the output weights, whatever the number of tokens. With
float32 weights under bfloat16 states the head's gradient is never rounded to bfloat16.

Under truncated sampling a token was drawn from its kept ids alone: the logits of all others are taken for minus
infinity, here and in the vocabulary-parallel form (megatron/logprobs.py). So every score is of the distribution that
the token was drawn from.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

CHUNK_LOGITS = 1 << 20
"""Approximate number of logits in memory at once where the vocabulary is small: they fit a core's cache."""
CHUNK_TOKENS = 512
"""Least number of tokens in a chunk: fewer would waste the matrix product."""
SLICED = 1 << 14
"""Of a larger vocabulary chunks are as large as a GPU's memory allows, and the backward pass takes slices."""
LARGE_CHUNK_LOGITS = 1 << 27
"""512 MiB in float32."""
SLICE = 1 << 12
SLICE_LOGITS = 1 << 26
OUTSIDE = -1e30
"""Stands for minus infinity, which a probability of 0 would make NaN of: 0 * OUTSIDE is 0."""


def chunk_of(vocabulary: int) -> int:
    """Tokens of a chunk.

    >>> chunk_of(1 << 13), chunk_of(151936)
    (512, 768)
    """
    if vocabulary <= SLICED:
        return max(CHUNK_TOKENS, CHUNK_LOGITS // vocabulary)
    return max(CHUNK_TOKENS, LARGE_CHUNK_LOGITS // vocabulary // 128 * 128)


def selected_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    chunk: int | None = None,
    *,
    entropy: bool = True,
    kept: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """log softmax(hidden @ weight.T / temperature) at `targets`, and that distribution's entropy if asked.

    hidden [N, H], weight [V, H], targets [N] int64 -> logprobs [N], entropy [N], both at least float32, in nats. The
    product is of the dtype of `hidden`. Exact (1e-6 in float32) in values and gradients; no second derivative.
    `chunk`: tokens per chunk. `kept` [N, K] int32 (Packed.kept): over these ids only, each target among its own.
    """
    if temperature <= 0:
        raise ValueError(f"temperature is {temperature}, expected above 0: greedy samples have no logprob to train on")
    found: tuple[Tensor, Tensor | None] = _Selected.apply(
        hidden, weight, targets, temperature, chunk or chunk_of(weight.shape[0]), entropy, kept
    )  # type: ignore[no-untyped-call]
    return found


def outside(kept: Tensor, first: int, count: int) -> Tensor:
    """[n, count] bool: the words from `first` on that are not among `kept` [n, K]; none where a token has no set."""
    # What is not of these words goes to a column that is cut off: no size depends on a value, so nothing waits.
    column = torch.where((kept >= first) & (kept < first + count), kept - first, count).long()
    out = torch.ones(len(kept), count + 1, dtype=torch.bool, device=kept.device).scatter_(1, column, False)
    return out[:, :count].logical_and_((kept >= 0).any(1, keepdim=True))


def sum_of_squared_probabilities(
    hidden: Tensor,
    weight: Tensor,
    temperature: float = 1.0,
    chunk: int | None = None,
    *,
    kept: Tensor | None = None,
) -> Tensor:
    """Sum over the vocabulary of p², p = softmax(hidden @ weight.T / temperature): [N, H] -> [N], at least float32.

    The probability that two draws agree; without gradient.
    """
    chunk = chunk or chunk_of(weight.shape[0])
    exact = torch.promote_types(hidden.dtype, torch.float32)
    with torch.no_grad():
        cast = weight.to(hidden.dtype)
        sums = []
        for part in slices(len(hidden), chunk):
            log_p = _log_softmax(hidden[part], cast, temperature, exact, None if kept is None else kept[part])
            sums.append((2 * log_p).exp_().sum(1))
        return torch.cat(sums)


class _Selected(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        chunk: int,
        wanted: bool,
        kept: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        exact = torch.promote_types(hidden.dtype, torch.float32)
        logprobs = hidden.new_empty(len(hidden), dtype=exact)
        norms = torch.empty_like(logprobs)
        entropy = torch.empty_like(logprobs) if wanted else None
        cast = weight.to(hidden.dtype)
        for part in slices(len(hidden), chunk):
            logits = logits_of(hidden[part], cast, temperature, exact)
            if kept is not None:
                logits.masked_fill_(outside(kept[part], 0, logits.shape[1]), OUTSIDE)
            at_target = logits.gather(1, targets[part, None])
            log_p = torch.log_softmax(logits, dim=-1)
            del logits
            torch.gather(log_p, 1, targets[part, None], out=logprobs[part, None])
            norms[part] = (at_target - logprobs[part, None])[:, 0]
            if entropy is not None:
                entropy[part] = -log_p.exp().mul_(log_p).sum(1)
            del log_p
        ctx.save_for_backward(hidden, weight, targets, norms, *([] if entropy is None else [entropy]))
        ctx.temperature, ctx.chunk, ctx.exact, ctx.kept = temperature, chunk, exact, kept
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, *_ = ctx.saved_tensors
        if grad_logprobs is None and grad_entropy is None:
            return (None,) * 7
        columns, chunk = cut(weight.shape[0], ctx.chunk)
        # The products of several slices add up in float32.
        grad_hidden = torch.zeros_like(hidden, dtype=ctx.exact)
        # Under adapters the head is frozen, and its gradient, as large as the head, is not computed.
        grad_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        for rows in slices(weight.shape[0], columns):
            of_head = weight[rows].to(hidden.dtype)
            found = None if grad_weight is None else RunningSum(ctx.exact)
            for part in slices(len(hidden), chunk):
                grad_logits = _grad_logits(ctx, of_head, part, rows.start, grad_logprobs, grad_entropy)
                grad_hidden[part] += grad_logits @ of_head
                if found is not None:
                    found.add(grad_logits.t() @ hidden[part])
            if grad_weight is not None and found is not None:
                grad_weight[rows] = found.total
        return grad_hidden.to(hidden.dtype), grad_weight, None, None, None, None, None


class RunningSum:
    """A sum of tensors in `dtype`, which begins with the first; 0 without any."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self.total: Tensor | float = 0.0

    def add(self, term: Tensor) -> None:
        self.total = self.total.add_(term) if isinstance(self.total, Tensor) else term.to(self._dtype)


def _grad_logits(
    ctx: Any, weight: Tensor, part: slice, first: int, grad_logprobs: Tensor | None, grad_entropy: Tensor | None
) -> Tensor:
    """The gradient of the logits of `part` for the rows of the head from `first` on, in the dtype of the states."""
    hidden, _, targets, norms, *entropy = ctx.saved_tensors
    logits = hidden[part] @ weight.t()
    if ctx.temperature != 1.0:
        logits = logits.to(ctx.exact).div_(ctx.temperature)
    log_p = logits - norms[part, None]  # of the dtype of the norms
    del logits
    if ctx.kept is not None:
        log_p.masked_fill_(outside(ctx.kept[part], first, len(weight)), OUTSIDE)
    if grad_entropy is None:
        assert grad_logprobs is not None
        grad = log_p.exp_().mul_(-grad_logprobs[part, None])
    else:
        p = log_p.exp()
        grad = log_p.add_(entropy[0][part, None]).mul_(-grad_entropy[part, None])
        if grad_logprobs is not None:
            grad.sub_(grad_logprobs[part, None])
        grad.mul_(p)
    if grad_logprobs is not None:
        column = targets[part] - first
        here = (column >= 0) & (column < len(weight))
        grad.scatter_add_(
            1, torch.where(here, column, 0)[:, None], torch.where(here, grad_logprobs[part], 0.0)[:, None]
        )
    if ctx.temperature != 1.0:
        grad.div_(ctx.temperature)
    rounded: Tensor = grad.to(hidden.dtype)
    return rounded


def _log_softmax(hidden: Tensor, weight: Tensor, temperature: float, exact: torch.dtype, kept: Tensor | None) -> Tensor:
    logits = logits_of(hidden, weight, temperature, exact)
    if kept is not None:
        logits.masked_fill_(outside(kept, 0, logits.shape[1]), OUTSIDE)
    return torch.log_softmax(logits, dim=-1)


def logits_of(hidden: Tensor, weight: Tensor, temperature: float, exact: torch.dtype) -> Tensor:
    """A new tensor, which the caller may change."""
    logits = (hidden @ weight.t()).to(exact)
    return logits if temperature == 1.0 else logits.div_(temperature)


def cut(vocabulary: int, chunk: int) -> tuple[int, int]:
    """Rows of the head, and tokens, that a backward pass takes at once; `chunk`: tokens of the forward pass."""
    if vocabulary <= SLICED:
        return vocabulary, chunk
    return SLICE, max(chunk, SLICE_LOGITS // SLICE)


def slices(count: int, size: int) -> Iterator[slice]:
    return (slice(at, min(at + size, count)) for at in range(0, count, size))
