"""How a training step is cut: groups into mini-batches, an update each; their rows into micro-batches, a pass each."""

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
    """How one mini-batch is computed."""

    parts: list[Tensor]
    """Rows [b] of each micro-batch"""
    silent: list[Tensor]
    """The same, of those rows that have no gradient"""


def minibatches(batch: Batch, count: int) -> list[Tensor]:
    """Rows of each mini-batch: an equal share of the groups, in the batch's order."""
    groups = torch.unique(batch.groups)
    return [torch.isin(batch.groups, share).nonzero()[:, 0] for share in groups.tensor_split(count) if len(share)]


def plan(batch: Batch, rows: Tensor, limit: int, ranks: int, advantages: Tensor | None) -> Plan:
    """`advantages[T]`: given when a row without any has no gradient."""
    if advantages is None:
        return Plan(_cut(batch, rows, limit, ranks), [])
    live = row_sum((advantages != 0).long(), batch.lengths)[rows] > 0
    # One row at least, so that the optimizer sees a gradient of zero rather than none.
    live[0] |= not live.any()
    return Plan(_cut(batch, rows[live], limit, ranks), _cut(batch, rows[~live], limit, ranks))


def score(
    backend: Backend,
    batch: Batch,
    plans: Sequence[Plan],
    *,
    reference: bool = False,
    wants: frozenset[Want] = frozenset(("logprobs",)),
) -> Scores:
    """Of the whole batch, without gradient, made in the very micro-batches of the passes: equal to theirs bit for bit.

    On the CPU; no hidden states.
    """
    parts = parts_of(plans)
    found = backend.logprobs([batch.take(rows).packed(wants) for rows in parts], reference=reference)

    def together(pieces: list[Tensor]) -> Tensor:
        return on_tokens(batch, parts, pieces)

    squares = [s.sum_pi_sq for s in found if s.sum_pi_sq is not None]
    return Scores(
        together([s.logprobs for s in found]),
        together([s.entropy for s in found]),
        sum_pi_sq=together(squares) if squares else None,
    )


def parts_of(plans: Sequence[Plan]) -> list[Tensor]:
    """Rows [b] of every micro-batch of a step."""
    return [rows for one in plans for rows in one.parts + one.silent]


def on_tokens(batch: Batch, parts: Sequence[Tensor], pieces: Sequence[Tensor]) -> Tensor:
    """[T] float32 of the batch from what was found for each part's tokens [t]."""
    whole = torch.zeros(len(batch.token_ids))
    for rows, piece in zip(parts, pieces, strict=True):
        whole[batch.tokens_of(rows)] = piece.to("cpu", torch.float32)
    return whole


def _cut(batch: Batch, rows: Tensor, limit: int, ranks: int) -> list[Tensor]:
    packed = pack(batch.lengths[rows].tolist(), limit, ranks, batch.groups[rows].tolist())
    return [rows[torch.tensor(part)] for part in packed if part]
