"""The kept ids of a batch's tokens, as tensors: what truncated sampling left of the vocabulary for each of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from asyncrl.trajectory import Bool, Row


@dataclass(frozen=True, slots=True)
class Kept:
    """Kept ids of T tokens, ragged: a set may hold one id or hundreds."""

    counts: Tensor
    """[T] int64; 0: the whole vocabulary, or unknown because there are too many (such a token carries no loss)"""
    ids: Tensor
    """[sum of counts] int32"""

    def take(self, t: Tensor) -> Kept:
        """The kept ids of the tokens [t], in their order."""
        counts = self.counts[t]
        starts = (self.counts.cumsum(0) - self.counts)[t] - (counts.cumsum(0) - counts)
        total = int(counts.sum())
        at = torch.repeat_interleave(starts, counts, output_size=total) + torch.arange(total)
        return Kept(counts, self.ids[at])

    def padded(self, mask: Tensor) -> Tensor | None:
        """[n, K] int32 of the n tokens of `mask` [T], -1 behind a set's end; None if none of them has one."""
        part = self.take(mask.nonzero()[:, 0])
        widest = int(part.counts.max()) if len(part.counts) else 0
        if not widest:
            return None
        out = torch.full((len(part.counts), widest), -1, dtype=torch.int32)
        out[torch.arange(widest) < part.counts[:, None]] = part.ids
        return out


def of_rows(rows: Sequence[Row]) -> Kept | None:
    """Kept ids of the rows laid end to end; None if no row has kept ids."""
    if all(row.kept is None for row in rows):
        return None
    counts = [np.zeros(len(row), np.int64) for row in rows]
    ids = [np.zeros(0, np.int32)]
    for of_row, row in zip(counts, rows, strict=True):
        if row.kept is not None:
            of_row[row.mask] = row.kept.counts
            ids.append(row.kept.ids)
    return Kept(torch.from_numpy(np.concatenate(counts)), torch.from_numpy(np.concatenate(ids)))


def recorded(row: Row) -> Bool:
    """[T] bool: the sampled tokens of which it is known what they were drawn from."""
    known = row.mask.copy()
    if row.kept is not None:
        known[row.mask] = row.kept.counts > 0
    return known
