"""The policy compared with what a teacher on a server said of each token: its k most likely words, and the sampled one.

The k words are told apart and all others taken for one, as under `over: top_k` with a teacher in this process
(comparison.py, whose formulas these are): a lower bound of the divergence. What the server did not say of the rest of
the vocabulary is 0 in the rows. Logits exist for a chunk of tokens at a time, in the backward pass for a slice of a
large vocabulary too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from asyncrl.learner.backends.comparison import ROWS
from asyncrl.learner.backends.logprobs import RunningSum, chunk_of, cut, logits_of, slices
from asyncrl.learner.backends.protocol import TeacherWords
from asyncrl.learner.backends.vocabulary import Whole, Words, held, marked
from asyncrl.learner.distillation.divergence import Divergence

LEAST = 1e-6
"""Probability of the rest that the rounding of k float32 logprobs may hide; taken for less, a rest that the teacher
finds unlikely would outweigh all that it said."""


def compared_with_recorded(
    hidden: Tensor,
    weight: Tensor,
    said: TeacherWords,
    divergence: Divergence,
    *,
    temperature: float = 1.0,
    words: Words | None = None,
    chunk: int | None = None,
) -> Tensor:
    """`ROWS` of n tokens, [6, n], at least float32, in nats; only the first has a gradient.

    hidden [n, H], weight [V, H]: the policy's states before the tokens, and its head. The divergences, the entropy and
    the agreement are over the k words and the rest; without any word (k = 0) they are 0. Words that the policy's head
    does not have belong to the rest. `words`: the policy's, where ranks share them, as in comparison.py.
    """
    exact = torch.promote_types(hidden.dtype, torch.float32)
    rows = hidden.new_zeros(len(ROWS), len(hidden), dtype=exact)
    rows[ROWS.index("logprobs")] = said.sampled.to(hidden.device, exact)
    if not said.ids.shape[1]:
        return rows
    ids = said.ids.to(hidden.device, torch.long)
    log_q = said.logprobs.to(hidden.device, exact)
    words = words or Whole(len(weight))
    found, seen = _Recorded.apply(
        hidden, weight, ids, log_q, divergence, temperature, words, chunk or chunk_of(words.count)
    )  # type: ignore[no-untyped-call]
    return torch.cat([found[None], rows[1:2], seen])


class _Recorded(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0913 - torch passes what `apply` gets, one by one
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        ids: Tensor,
        log_q: Tensor,
        divergence: Divergence,
        temperature: float,
        words: Words,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        n, exact = len(hidden), log_q.dtype
        known = ids < words.count
        ids = ids.clamp(max=words.count - 1)
        found, seen = hidden.new_empty(n, dtype=exact), hidden.new_empty(len(ROWS) - 2, n, dtype=exact)
        # Per token: the log normaliser, the sum of the slopes, the slope of the rest over its p.
        norms = hidden.new_empty(3, n, dtype=exact)
        slopes = torch.empty_like(log_q)
        head = weight[: words.here].to(hidden.dtype)
        for part in slices(n, chunk):
            logits = logits_of(hidden[part], head, temperature, exact)
            (norms[0, part],) = words.log_sums([logits])
            log_p = logits.sub_(norms[0, part, None])
            kept_p, kept_q, there = words.at(log_p, ids[part]), log_q[part], known[part]
            rest_p, rest_q = (
                _rest_of_policy(log_p, ids[part], there, words),
                _rest(kept_q.exp().where(there, 0.0).sum(1)),
            )
            of_kept = divergence.slopes(kept_p, kept_q).where(there, 0.0)
            of_rest = divergence.slopes(rest_p, rest_q)
            found[part] = divergence.terms(kept_p, kept_q).where(there, 0.0).sum(1) + divergence.terms(rest_p, rest_q)
            norms[1, part], norms[2, part] = of_kept.sum(1) + of_rest, of_rest / rest_p.exp()
            slopes[part] = of_kept
            apart = (kept_p - kept_q).where(there, 0.0)
            seen[0, part] = -(kept_q.exp() * kept_q).where(there, 0.0).sum(1) - rest_q.exp() * rest_q
            seen[1, part] = (words.greatest(log_p) == ids[part, 0]).to(exact)
            seen[2, part] = (kept_p.exp() * apart).sum(1) + rest_p.exp() * (rest_p - rest_q)
            seen[3, part] = -(kept_q.exp() * apart).sum(1) - rest_q.exp() * (rest_p - rest_q)
        ctx.save_for_backward(hidden, weight, ids, known, norms, slopes)
        ctx.temperature, ctx.words, ctx.chunk, ctx.exact = temperature, words, chunk, exact
        ctx.mark_non_differentiable(seen)
        ctx.set_materialize_grads(False)
        return found, seen

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _seen: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 8
        hidden, weight, *_ = ctx.saved_tensors
        columns, chunk = cut(max(ctx.words.here, 1), ctx.chunk)
        grad_hidden = torch.zeros_like(hidden, dtype=ctx.exact)
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        for rows in slices(ctx.words.here, columns):
            head = weight[rows].to(hidden.dtype)
            found = None if grad_weight is None else RunningSum(ctx.exact)
            for part in slices(len(hidden), chunk):
                grad_logits = _grad_logits(ctx, head, part, rows.start, grad)
                grad_hidden[part] += grad_logits @ head
                if found is not None:
                    found.add(grad_logits.t() @ hidden[part])
            if grad_weight is not None and found is not None:
                grad_weight[rows] = found.total
        grad_hidden = ctx.words.add_up(grad_hidden)
        return grad_hidden.to(hidden.dtype), grad_weight, None, None, None, None, None, None


def _rest_of_policy(log_p: Tensor, ids: Tensor, there: Tensor, words: Words) -> Tensor:
    """[c] log of the policy's probability of all words but the known ones of `ids` [c, k]."""
    kept = marked(log_p, *held(ids, words.first, words.here, there))
    p = words.add_up(log_p.exp().masked_fill_(kept, 0.0).sum(1))
    return p.clamp(min=torch.finfo(p.dtype).tiny).log()


def _rest(kept: Tensor) -> Tensor:
    """[c] log of the probability that is left beside `kept` [c], at least `LEAST`."""
    return (1.0 - kept).clamp(min=LEAST).log()


def _grad_logits(ctx: Any, head: Tensor, part: slice, first: int, grad: Tensor) -> Tensor:
    """The gradient of the policy's logits of `part` for the columns from `first` on, in the dtype of its states."""
    hidden, _, ids, known, norms, of_kept = ctx.saved_tensors
    log_p = logits_of(hidden[part], head, ctx.temperature, ctx.exact).sub_(norms[0, part, None])
    p = log_p.exp_()
    here, at = held(ids[part], ctx.words.first + first, p.shape[1], known[part])
    kept = marked(p, here, at)
    of_words = torch.zeros_like(p).scatter_add_(1, at, of_kept[part].where(here, 0.0))
    slopes = torch.where(kept, of_words, p * norms[2, part, None])
    slopes.sub_(p.mul_(norms[1, part, None])).mul_(grad[part, None])
    if ctx.temperature != 1.0:
        slopes.div_(ctx.temperature)
    rounded: Tensor = slopes.to(hidden.dtype)
    return rounded
