"""Computes a common prefix of rows once: the prompt of a group, and the turns that its episodes have in common.

A hidden state depends on the tokens up to its position alone, so equal prefixes have equal hidden states. The rows of a
micro-batch form a tree, of which each branch is computed once.

    row 0   a b c d e      computed   a b c d e
    row 1   a b c x y                       x y
    row 2   a b c x z                         z
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

WORTH = 8
"""Least length of a shared prefix: computing a shorter one again is cheaper than gathering it."""


@dataclass(frozen=True, slots=True)
class Segment:
    """The tokens of one row behind its common prefix with an earlier row; those are computed for it."""

    start: int
    """Among the computed tokens."""
    length: int
    """At least 1."""
    prefix: int
    """Tokens of its row before them, computed for others."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The tokens that one forward pass computes for rows laid end to end."""

    computed: Tensor
    """[U] int64: the flat tokens that are computed, in the order of the segments, U <= T."""
    where: Tensor
    """[T] int64: for each flat token, the computed token that has its hidden state."""
    segments: tuple[Segment, ...]
    """They tile the U computed tokens."""
    seen: Tensor | None
    """[sum of prefix + length] int64: the computed tokens that each segment attends to, its own at the end. None
    when no segment has a prefix."""


def share_prefixes(token_ids: Tensor, lengths: Sequence[int]) -> Plan:
    """`token_ids` [T] on the CPU, `lengths` of the rows, each at least 1.

    >>> plan = share_prefixes(torch.tensor([*range(10), *range(9), 5]), [10, 10])
    >>> [(s.start, s.length, s.prefix) for s in plan.segments], plan.computed.tolist()
    ([(0, 10, 0), (10, 1, 9)], [10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 9])
    >>> plan.where.tolist()
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """
    ids = token_ids.numpy()
    starts = np.cumsum([0, *lengths])
    # Among sorted rows, the longest prefix in common with any earlier row is the one with the previous row.
    sortable = ids.astype(">u8").tobytes()
    order = sorted(range(len(lengths)), key=lambda i: sortable[8 * starts[i] : 8 * starts[i + 1]])
    where = np.empty(len(ids), np.int64)
    computed, seen, segments = [], [], []
    total, before = 0, slice(0, 0)
    for i in order:
        row = slice(int(starts[i]), int(starts[i + 1]))
        prefix = _common(ids[before], ids[row])
        if prefix < WORTH:
            prefix = 0
        own = lengths[i] - prefix
        where[row.start : row.start + prefix] = where[before.start : before.start + prefix]
        where[row.start + prefix : row.stop] = np.arange(total, total + own)
        if own:
            segments.append(Segment(total, own, prefix))
            computed.append(np.arange(row.start + prefix, row.stop))
            seen.append(where[row])
        total, before = total + own, row
    shared = any(s.prefix for s in segments)
    return Plan(
        torch.from_numpy(np.concatenate(computed)),
        torch.from_numpy(where),
        tuple(segments),
        torch.from_numpy(np.concatenate(seen)) if shared else None,
    )


def _common(a: np.ndarray, b: np.ndarray) -> int:
    n = min(len(a), len(b))
    different = a[:n] != b[:n]
    return int(different.argmax()) if different.any() else n
