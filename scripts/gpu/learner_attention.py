"""The learner's attention, as it is called today, beside an eager reference that states what it must compute.

The one place of the acceptance that knows how the learner calls its attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from asyncrl.learner.backends.hf.row_attention import attend, ends_of, layout_of
from asyncrl.learner.backends.shared_prefixes import Plan, share_prefixes


@dataclass(frozen=True, slots=True)
class Case:
    """Queries, keys and values of rows laid end to end."""

    query: Tensor
    """[1, heads, U, d]"""
    key: Tensor
    """[1, kv heads, U, d]"""
    value: Tensor
    plan: Plan


def case(
    lengths: Sequence[int], shared: int, heads: tuple[int, int, int], device: str, dtype: torch.dtype, seed: int = 0
) -> Case:
    """Random rows of `lengths`, of which every two neighbours have their first `shared` tokens in common.

    `heads`: of the queries, of the keys, and their size.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(0, 50_000, (n,), generator=generator) for n in lengths]
    for i in range(1, len(rows), 2):
        n = min(shared, len(rows[i]) - 1, len(rows[i - 1]) - 1)
        rows[i][:n] = rows[i - 1][:n]
    plan = share_prefixes(torch.cat(rows), lengths)
    tokens, (queries, keys, d) = len(plan.computed), heads
    made = [torch.randn(1, h, tokens, d, generator=generator) for h in (queries, keys, keys)]
    query, key, value = (x.to(device, dtype).requires_grad_() for x in made)
    return Case(query, key, value, plan)


def attention(made: Case) -> Tensor:
    """[1, U, heads, d] as the learner computes it."""
    device, plan = made.query.device, made.plan
    seen = None if plan.seen is None else plan.seen.to(device)
    layout = layout_of(plan.segments, seen, ends=ends_of(plan.segments).to(device))
    query, key, value = (x[0].transpose(0, 1) for x in (made.query, made.key, made.value))
    return attend(query, key, value, layout)[None]


def reference(made: Case) -> Tensor:
    """The same, row by row in float32: softmax of all scores under an explicit mask."""
    query, key, value = (x[0].float() for x in (made.query, made.key, made.value))
    groups = query.shape[0] // key.shape[0]
    key, value = key.repeat_interleave(groups, 0), value.repeat_interleave(groups, 0)
    everything = torch.arange(query.shape[1]) if made.plan.seen is None else made.plan.seen
    outputs, at = [], 0
    for s in made.plan.segments:
        whole = s.prefix + s.length
        start = s.start if made.plan.seen is None else at
        seen = everything[start : start + whole]
        at += whole
        seen = seen.to(query.device)
        scores = query[:, s.start : s.start + s.length] @ key[:, seen].transpose(1, 2) / query.shape[-1] ** 0.5
        later = torch.ones(s.length, whole, dtype=torch.bool, device=query.device).triu(s.prefix + 1)
        outputs.append(scores.masked_fill(later, -torch.inf).softmax(-1) @ value[:, seen])
    return torch.cat(outputs, 1).transpose(0, 1)[None]


def errors(made: Case) -> tuple[float, float]:
    """‖difference‖ / ‖reference‖ of the output, and the largest such of the three gradients."""
    inputs = (made.query, made.key, made.value)
    exact = reference(made)
    weights = torch.randn(exact.shape, generator=torch.Generator().manual_seed(1)).to(exact.device)
    wanted = torch.autograd.grad((exact * weights).sum(), inputs)
    out = attention(made)
    got = torch.autograd.grad((out.float() * weights).sum(), inputs)
    return _off(out, exact), max(_off(a, b) for a, b in zip(got, wanted, strict=True))


def _off(got: Tensor, wanted: Tensor) -> float:
    got, wanted = got.detach().float(), wanted.detach().float()
    return float((got - wanted).norm() / wanted.norm())
