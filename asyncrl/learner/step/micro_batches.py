"""Cuts a training step: groups into mini-batches, an update each; their rows into micro-batches, a pass each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from asyncrl.learner.backends.protocol import Backend, Scores, Want
from asyncrl.learner.batch import Batch
from asyncrl.learner.packing import pack
from asyncrl.learner.ragged import row_sum


@dataclass(frozen=True, slots=True)
class Plan:
    """One mini-batch, and the micro-batches that compute it."""

    row_ids: Tensor
    """[b] rows of the mini-batch"""
    parts: list[Tensor]
    """[b] rows of each micro-batch"""
    without_gradient: list[Tensor]
    """The same, for rows that have no gradient and are only scored"""


def minibatches(batch: Batch, count: int) -> list[Tensor]:
    """Rows of each mini-batch: an equal share of the new groups and of the replayed ones, each in the batch's order."""
    new, used = (torch.unique(batch.groups[rows]).tensor_split(count) for rows in (~batch.replayed, batch.replayed))
    shares = [torch.cat(pair) for pair in zip(new, used, strict=True)]
    return [torch.isin(batch.groups, share).nonzero()[:, 0] for share in shares if len(share)]


def plan(batch: Batch, row_ids: Tensor, limit: int, ranks: int, advantages: Tensor | None) -> Plan:
    """`advantages[T]`: given when a row without any advantage has no gradient."""
    if advantages is None:
        return Plan(row_ids, _cut(batch, row_ids, limit, ranks), [])
    live = row_sum((advantages != 0).long(), batch.lengths)[row_ids] > 0
    # One row at least, so that the optimizer sees a gradient of zero rather than none.
    live[0] |= not live.any()
    return Plan(row_ids, _cut(batch, row_ids[live], limit, ranks), _cut(batch, row_ids[~live], limit, ranks))


def score(
    backend: Backend,
    batch: Batch,
    plans: Sequence[Plan],
    *,
    reference: bool = False,
    wants: frozenset[Want] = frozenset(("logprobs",)),
) -> Scores:
    """Scores of the whole batch on the CPU, without gradient, hidden states and entropy.

    They are computed in the same micro-batches as the passes with gradient, so that both agree bit for bit.
    """
    parts = parts_of(plans)
    scores = backend.logprobs([batch.take(row_ids).packed(wants) for row_ids in parts], reference=reference)
    squares = [s.sum_pi_sq for s in scores if s.sum_pi_sq is not None]
    seen = [s.teacher for s in scores if s.teacher is not None]
    return Scores(
        on_tokens(batch, parts, [s.logprobs for s in scores]),
        torch.zeros(len(batch.token_ids)),
        sum_pi_sq=on_tokens(batch, parts, squares) if squares else None,
        teacher=torch.stack([on_tokens(batch, parts, row) for row in zip(*seen, strict=True)]) if seen else None,
    )


def parts_of(plans: Sequence[Plan]) -> list[Tensor]:
    """[b] rows of every micro-batch of a step."""
    return [row_ids for one in plans for row_ids in one.parts + one.without_gradient]


def on_tokens(batch: Batch, parts: Sequence[Tensor], pieces: Sequence[Tensor]) -> Tensor:
    """[T] float32 for the batch, from a piece [t] for the tokens of each part."""
    joined = torch.zeros(len(batch.token_ids))
    for row_ids, piece in zip(parts, pieces, strict=True):
        joined[batch.tokens_of(row_ids)] = piece.to("cpu", torch.float32)
    return joined


def _cut(batch: Batch, row_ids: Tensor, limit: int, ranks: int) -> list[Tensor]:
    packed = pack(batch.lengths[row_ids].tolist(), limit, ranks, batch.groups[row_ids].tolist())
    return [row_ids[torch.tensor(part)] for part in packed if part]
