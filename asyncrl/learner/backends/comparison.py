"""The policy compared with a teacher over the whole vocabulary, without holding all logits of either in memory.

    forward    a chunk of tokens at a time: both log softmaxes, of which a few numbers a token stay
    backward   the logits of both again, of a slice of a large vocabulary at a time, as in logprobs.py

The two may have heads of different sizes, padded beyond the tokenizer: both are normalised over the words that both
have. Where ranks share the vocabulary (`Words`), each has the same rows of both heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from asyncrl.learner.backends.logprobs import RunningSum, chunk_of, cut, logits_of, slices
from asyncrl.learner.backends.vocabulary import Whole, Words, held, marked
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
    """[V', H'], or those of its rows that this rank compares"""


def compared(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    teacher: TeacherStates,
    how: Comparison,
    *,
    temperature: float = 1.0,
    words: Words | None = None,
    chunk: int | None = None,
) -> Tensor:
    """`ROWS` of n tokens, [6, n], at least float32, in nats.

    hidden [n, H], weight [V, H], targets [n] int64: the sampled tokens. Both policies are at `temperature`. `words`:
    that both have, where ranks share them; then `weight` holds this rank's rows, the gradient of `hidden` is the same
    on every rank, and `chunk` must be. `chunk`: tokens per chunk. A token that the teacher has no word for has logprob
    -inf.
    """
    if temperature <= 0:
        raise ValueError(f"temperature is {temperature}, expected above 0")
    words = words or Whole(min(len(weight), len(teacher.weight)))
    divergence, seen = _Compared.apply(
        hidden, weight, targets, teacher, how, temperature, words, chunk or chunk_of(words.count)
    )  # type: ignore[no-untyped-call]
    return torch.cat([divergence[None], seen])


class _Compared(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0913 - torch passes what `apply` gets, one by one
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        teacher: TeacherStates,
        how: Comparison,
        temperature: float,
        words: Words,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        n = len(hidden)
        exact = torch.promote_types(hidden.dtype, torch.float32)
        heads = weight[: words.here].to(hidden.dtype), teacher.weight[: words.here].to(teacher.hidden.dtype)
        divergence, seen = hidden.new_empty(n, dtype=exact), hidden.new_empty(len(ROWS) - 1, n, dtype=exact)
        # Per token: both log normalisers, the sum of the slopes, and the slope of the words beyond the k over their p.
        norms = hidden.new_zeros(4, n, dtype=exact)
        ids = targets.new_empty(n, how.k if 0 < how.k < words.count else 0)
        for part in slices(n, chunk):
            logits = [
                logits_of(h[part], w, temperature, exact) for h, w in zip((hidden, teacher.hidden), heads, strict=True)
            ]
            for i, norm in enumerate(words.log_sums(logits)):
                norms[i, part] = norm
            log_p, log_q = (x.sub_(norms[i, part, None]) for i, x in enumerate(logits))
            divergence[part], norms[2:, part], ids[part] = _summed(log_p, log_q, how, ids.shape[1], words)
            q = log_q.exp()
            at = targets[part].clamp(max=words.count - 1)[:, None]
            seen[0, part] = torch.where(targets[part] < words.count, words.at(log_q, at)[:, 0], -torch.inf)
            seen[2, part] = (words.greatest(log_p) == words.greatest(log_q)).to(exact)
            entropy, apart = -(q * log_q).sum(1), log_p.sub(log_q)
            sums = torch.stack([entropy, log_p.exp().mul_(apart).sum(1), -q.mul_(apart).sum(1)])
            seen[1, part], seen[3, part], seen[4, part] = words.add_up(sums)
        ctx.save_for_backward(hidden, weight, teacher.hidden, teacher.weight, norms, ids)
        ctx.how, ctx.temperature, ctx.chunk, ctx.exact, ctx.words = how, temperature, chunk, exact, words
        ctx.mark_non_differentiable(seen)
        ctx.set_materialize_grads(False)
        return divergence, seen

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _seen: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 8
        hidden, weight, teacher_hidden, teacher_weight, *_ = ctx.saved_tensors
        columns, chunk = cut(max(ctx.words.here, 1), ctx.chunk)
        grad_hidden = torch.zeros_like(hidden, dtype=ctx.exact)
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        for rows in slices(ctx.words.here, columns):
            heads = weight[rows].to(hidden.dtype), teacher_weight[rows].to(teacher_hidden.dtype)
            found = None if grad_weight is None else RunningSum(ctx.exact)
            for part in slices(len(hidden), chunk):
                grad_logits = _grad_logits(ctx, heads, part, rows.start, grad)
                grad_hidden[part] += grad_logits @ heads[0]
                if found is not None:
                    found.add(grad_logits.t() @ hidden[part])
            if grad_weight is not None and found is not None:
                grad_weight[rows] = found.total
        grad_hidden = ctx.words.add_up(grad_hidden)
        return grad_hidden.to(hidden.dtype), grad_weight, None, None, None, None, None, None


def _summed(log_p: Tensor, log_q: Tensor, how: Comparison, k: int, words: Words) -> tuple[Tensor, Tensor, Tensor]:
    """D [c], the sum of the slopes and the slope of the rest over its p [2, c], and the k words told apart [c, k]."""
    divergence = how.divergence
    if k == 0:
        total = divergence.terms(log_p, log_q).sum(1)
        slopes = total if divergence.kind == "reverse_kl" else divergence.slopes(log_p, log_q).sum(1)
        total, slopes = words.add_up(torch.stack([total, slopes]))
        return total, torch.stack([slopes, torch.zeros_like(slopes)]), log_p.new_empty(len(log_p), 0, dtype=torch.long)
    ids = words.top(log_q if how.words_of == "teacher" else log_p, k)
    kept = words.at(log_p, ids), words.at(log_q, ids)
    rest_p, rest_q = _rests(log_p, log_q, ids, words)
    rest_slope = divergence.slopes(rest_p, rest_q)
    total = divergence.terms(*kept).sum(1) + divergence.terms(rest_p, rest_q)
    return total, torch.stack([divergence.slopes(*kept).sum(1) + rest_slope, rest_slope / rest_p.exp()]), ids


def _rests(log_p: Tensor, log_q: Tensor, ids: Tensor, words: Words) -> Tensor:
    """[2, c] log of both probabilities of all words but `ids` [c, k]."""
    kept = marked(log_p, *held(ids, words.first, words.here))
    p = words.add_up(torch.stack([x.exp().masked_fill_(kept, 0.0).sum(1) for x in (log_p, log_q)]))
    return p.clamp(min=torch.finfo(p.dtype).tiny).log()


def _grad_logits(ctx: Any, heads: tuple[Tensor, Tensor], part: slice, first: int, grad: Tensor) -> Tensor:
    """The gradient of the policy's logits of `part` for the columns from `first` on, in the dtype of its states."""
    hidden, _, teacher_hidden, _, norms, ids = ctx.saved_tensors
    log_p = logits_of(hidden[part], heads[0], ctx.temperature, ctx.exact).sub_(norms[0, part, None])
    log_q = logits_of(teacher_hidden[part], heads[1], ctx.temperature, ctx.exact).sub_(norms[1, part, None])
    slopes = ctx.how.divergence.slopes(log_p, log_q)
    p = log_p.exp()
    if ids.shape[1]:
        kept = marked(p, *held(ids[part], ctx.words.first + first, p.shape[1]))
        slopes = torch.where(kept, slopes, p * norms[3, part, None])
    slopes.sub_(p.mul_(norms[2, part, None])).mul_(grad[part, None])
    if ctx.temperature != 1.0:
        slopes.div_(ctx.temperature)
    rounded: Tensor = slopes.to(hidden.dtype)
    return rounded
