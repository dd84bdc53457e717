"""selected_logprobs over a vocabulary that is split over the tensor-parallel ranks.

For a chunk of tokens at a time, each rank computes the logits of its part of the vocabulary, and the ranks exchange
three numbers a token. Values and the gradient of `hidden` are equal on every rank; the gradient of `weight` is of its
part.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from asyncrl.learner.backends.logprobs import OUTSIDE, chunk_of, outside


def parallel_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    *,
    first: int,
    vocabulary: int,
    group: dist.ProcessGroup,
    kept: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Logprobs, entropy and, without gradient, the sum of squared probabilities: each [N], at least float32.

    hidden [N, H], the same on all ranks of `group`; weight [V', H], this rank's rows, from `first`; targets [N] int64
    and `kept` [N, K] int32 (Packed.kept) index all of `vocabulary`; with `kept`, logprobs are over these ids only.
    Every rank calls it, and its backward.
    """
    if temperature <= 0:
        raise ValueError(f"temperature is {temperature}, expected above 0: greedy samples have no logprob to train on")
    scores: tuple[Tensor, Tensor, Tensor] = _Parallel.apply(
        hidden, weight, targets, temperature, first, vocabulary, group, kept
    )  # type: ignore[no-untyped-call]
    return scores


class _Parallel(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0913 - torch passes what `apply` gets, one by one
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        first: int,
        vocabulary: int,
        group: Any,
        kept: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        exact = torch.promote_types(hidden.dtype, torch.float32)
        # The same on all ranks, whatever part of the vocabulary each has.
        chunk = chunk_of(vocabulary)
        logprobs = hidden.new_empty(len(hidden), dtype=exact)
        entropy, squares, log_z = (torch.empty_like(logprobs) for _ in range(3))
        for at in range(0, len(hidden), chunk):
            part = slice(at, at + chunk)
            logits = _logits(hidden[part], weight, temperature, exact)
            if kept is not None:
                logits = logits.masked_fill(outside(kept[part], first, weight.shape[0]), OUTSIDE)
            top = logits.max(1).values
            dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
            below = logits - top[:, None]
            exp_below = below.exp()
            here, column = _here(targets[part], first, weight.shape[0])
            target = torch.where(here, below.gather(1, column[:, None])[:, 0], 0.0)
            sums = torch.stack([exp_below.sum(1), (exp_below * below).sum(1), target, (exp_below**2).sum(1)])
            dist.all_reduce(sums, group=group)
            log_sum = sums[0].log()
            logprobs[part] = sums[2] - log_sum
            entropy[part] = log_sum - sums[1] / sums[0]
            squares[part] = sums[3] / sums[0] ** 2
            log_z[part] = top + log_sum
        ctx.save_for_backward(hidden, weight, targets, entropy, log_z)
        ctx.temperature, ctx.first, ctx.group, ctx.chunk, ctx.exact = temperature, first, group, chunk, exact
        ctx.kept = kept
        ctx.mark_non_differentiable(squares)
        return logprobs, entropy, squares

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, entropy, log_z = ctx.saved_tensors
        grad_hidden = torch.zeros_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=ctx.exact)
        for at in range(0, len(hidden), ctx.chunk):
            part = slice(at, at + ctx.chunk)
            log_p = _logits(hidden[part], weight, ctx.temperature, ctx.exact) - log_z[part, None]
            if ctx.kept is not None:
                log_p = log_p.masked_fill(outside(ctx.kept[part], ctx.first, weight.shape[0]), OUTSIDE)
            p = log_p.exp()
            g = grad_logprobs[part, None]
            grad_logits = -p * (log_p + entropy[part, None]) * grad_entropy[part, None] - p * g
            here, column = _here(targets[part], ctx.first, weight.shape[0])
            grad_logits.scatter_add_(1, column[:, None], torch.where(here[:, None], g, 0.0))
            if ctx.temperature != 1.0:
                grad_logits.div_(ctx.temperature)
            grad_logits = grad_logits.to(hidden.dtype)
            grad_hidden[part] = grad_logits @ weight
            grad_weight += grad_logits.t() @ hidden[part]
        dist.all_reduce(grad_hidden, group=ctx.group)
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None, None, None


def _logits(hidden: Tensor, weight: Tensor, temperature: float, exact: torch.dtype) -> Tensor:
    logits = (hidden @ weight.t()).to(exact)
    return logits if temperature == 1.0 else logits / temperature


def _here(targets: Tensor, first: int, count: int) -> tuple[Tensor, Tensor]:
    """Which targets are of this rank's part, and their column in it; 0 where they are not."""
    here = (targets >= first) & (targets < first + count)
    return here, torch.where(here, targets - first, 0)
