"""The policy compared with a teacher over the whole vocabulary, without holding all logits of either in memory.

    forward    a chunk of tokens at a time: both log softmaxes, of which a few numbers a token stay
    backward   the logits of both again, of a slice of a large vocabulary at a time, as in logprobs.py

The two may have heads of different sizes, padded beyond the tokenizer: both are normalised over the words that both
have.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from asyncrl.learner.backends.logprobs import RunningSum, chunk_of, cut, logits_of, slices
from asyncrl.learner.distillation.divergence import Comparison

ROWS = ("divergence", "logprobs", "entropy", "agrees", "reverse_kl", "forward_kl")
"""What is known of each token; only the first has a gradient. logprobs, entropy: the teacher's. agrees: 1 where both
find the same word most likely. The KLs are over the whole vocabulary."""


@dataclass(frozen=True, slots=True)
class TeacherStates:
    """A teacher's last hidden states before n tokens, and its head. No gradient."""

    hidden: Tensor
    """[n, H']"""
    weight: Tensor
    """[V', H']"""


def compared(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    teacher: TeacherStates,
    how: Comparison,
    *,
    temperature: float = 1.0,
    chunk: int | None = None,
) -> Tensor:
    """`ROWS` of n tokens, [6, n], at least float32, in nats.

    hidden [n, H], weight [V, H], targets [n] int64: the sampled tokens. Both policies are at `temperature`. `chunk`:
    tokens per chunk. A token that the teacher has no word for has logprob -inf.
    """
    if temperature <= 0:
        raise ValueError(f"temperature is {temperature}, expected above 0")
    divergence, seen = _Compared.apply(
        hidden, weight, targets, teacher, how, temperature, chunk or chunk_of(weight.shape[0])
    )  # type: ignore[no-untyped-call]
    return torch.cat([divergence[None], seen])


class _Compared(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        teacher: TeacherStates,
        how: Comparison,
        temperature: float,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        n, words = len(hidden), min(len(weight), len(teacher.weight))
        exact = torch.promote_types(hidden.dtype, torch.float32)
        heads = weight[:words].to(hidden.dtype), teacher.weight[:words].to(teacher.hidden.dtype)
        divergence, seen = hidden.new_empty(n, dtype=exact), hidden.new_empty(len(ROWS) - 1, n, dtype=exact)
        # Per token: both log normalisers, the sum of the slopes, and the slope of the words beyond the k over their p.
        norms = hidden.new_zeros(4, n, dtype=exact)
        ids = targets.new_empty(n, how.k if 0 < how.k < words else 0)
        for part in slices(n, chunk):
            logits = [
                logits_of(h[part], w, temperature, exact) for h, w in zip((hidden, teacher.hidden), heads, strict=True)
            ]
            for i, x in enumerate(logits):
                norms[i, part] = torch.logsumexp(x, 1)
            log_p, log_q = (x.sub_(norms[i, part, None]) for i, x in enumerate(logits))
            divergence[part], norms[2:, part], ids[part] = _summed(log_p, log_q, how, ids.shape[1])
            q = log_q.exp()
            at = targets[part].clamp(max=words - 1)[:, None]
            seen[0, part] = torch.where(targets[part] < words, log_q.gather(1, at)[:, 0], -torch.inf)
            seen[1, part] = -(q * log_q).sum(1)
            seen[2, part] = (log_p.argmax(1) == log_q.argmax(1)).to(exact)
            apart = log_p.sub(log_q)
            seen[3, part] = log_p.exp().mul_(apart).sum(1)
            seen[4, part] = -q.mul_(apart).sum(1)
        ctx.save_for_backward(hidden, weight, teacher.hidden, teacher.weight, norms, ids)
        ctx.how, ctx.temperature, ctx.chunk, ctx.exact, ctx.words = how, temperature, chunk, exact, words
        ctx.mark_non_differentiable(seen)
        ctx.set_materialize_grads(False)
        return divergence, seen

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _seen: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 7
        hidden, weight, teacher_hidden, teacher_weight, *_ = ctx.saved_tensors
        columns, chunk = cut(ctx.words, ctx.chunk)
        grad_hidden = torch.zeros_like(hidden, dtype=ctx.exact)
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        for rows in slices(ctx.words, columns):
            heads = weight[rows].to(hidden.dtype), teacher_weight[rows].to(teacher_hidden.dtype)
            found = None if grad_weight is None else RunningSum(ctx.exact)
            for part in slices(len(hidden), chunk):
                grad_logits = _grad_logits(ctx, heads, part, rows.start, grad)
                grad_hidden[part] += grad_logits @ heads[0]
                if found is not None:
                    found.add(grad_logits.t() @ hidden[part])
            if grad_weight is not None and found is not None:
                grad_weight[rows] = found.total
        return grad_hidden.to(hidden.dtype), grad_weight, None, None, None, None, None


def _summed(log_p: Tensor, log_q: Tensor, how: Comparison, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """D [c], the sum of the slopes and the slope of the rest over its p [2, c], and the k words told apart [c, k]."""
    divergence = how.divergence
    if k == 0:
        total = divergence.terms(log_p, log_q).sum(1)
        slopes = total if divergence.kind == "reverse_kl" else divergence.slopes(log_p, log_q).sum(1)
        return total, torch.stack([slopes, torch.zeros_like(slopes)]), log_p.new_empty(len(log_p), 0, dtype=torch.long)
    ids = (log_q if how.words_of == "teacher" else log_p).topk(k, 1).indices
    kept = log_p.gather(1, ids), log_q.gather(1, ids)
    rest_p, rest_q = (_rest(x, ids) for x in (log_p, log_q))
    rest_slope = divergence.slopes(rest_p, rest_q)
    total = divergence.terms(*kept).sum(1) + divergence.terms(rest_p, rest_q)
    return total, torch.stack([divergence.slopes(*kept).sum(1) + rest_slope, rest_slope / rest_p.exp()]), ids


def _rest(log_p: Tensor, ids: Tensor) -> Tensor:
    """[c] log of the probability of all words but `ids` [c, k]."""
    p = log_p.exp().scatter_(1, ids, 0.0).sum(1)
    return p.clamp(min=torch.finfo(p.dtype).tiny).log()


def _grad_logits(ctx: Any, heads: tuple[Tensor, Tensor], part: slice, first: int, grad: Tensor) -> Tensor:
    """The gradient of the policy's logits of `part` for the words from `first` on, in the dtype of its states."""
    hidden, _, teacher_hidden, _, norms, ids = ctx.saved_tensors
    log_p = logits_of(hidden[part], heads[0], ctx.temperature, ctx.exact).sub_(norms[0, part, None])
    log_q = logits_of(teacher_hidden[part], heads[1], ctx.temperature, ctx.exact).sub_(norms[1, part, None])
    slopes = ctx.how.divergence.slopes(log_p, log_q)
    p = log_p.exp()
    if ids.shape[1]:
        column = ids[part] - first
        here = (column >= 0) & (column < p.shape[1])
        kept = torch.zeros_like(p).scatter_add_(1, torch.where(here, column, 0), here.to(p.dtype)) > 0
        slopes = torch.where(kept, slopes, p * norms[3, part, None])
    slopes.sub_(p.mul_(norms[2, part, None])).mul_(grad[part, None])
    if ctx.temperature != 1.0:
        slopes.div_(ctx.temperature)
    rounded: Tensor = slopes.to(hidden.dtype)
    return rounded
