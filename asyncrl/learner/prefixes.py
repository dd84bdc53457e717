"""Rows that begin alike are computed once as far as they do: the prompt of a group, and what its episodes said alike.

A hidden state depends on the tokens up to its position and on nothing else, so equal beginnings have equal hidden
states, sampled or not. The first row of a run of like rows leads; those behind it take its states up to where they
part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

WORTH = 8
"""Tokens: a shorter common beginning is computed again, which is cheaper than to fetch it."""


@dataclass(frozen=True, slots=True)
class Segment:
    """The tokens of one row that are computed for it alone, and where it finds those before them."""

    start: int
    """Among the computed tokens."""
    length: int
    """At least 1."""
    prefix_start: int
    """Among the computed tokens: where its leader begins."""
    prefix: int
    """Tokens that the leader computed for it; 0 for a leader."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What one forward pass computes of rows laid end to end."""

    computed: Tensor
    """[U] int64: the flat tokens that are computed, ascending, U <= T."""
    where: Tensor
    """[T] int64: of each flat token, which computed one has its hidden state."""
    segments: tuple[Segment, ...]
    """They tile the U computed tokens."""


def share_prefixes(token_ids: Tensor, lengths: Sequence[int]) -> Plan:
    """`token_ids` [T] on the CPU, `lengths` of the rows, each at least 1.

    >>> plan = share_prefixes(torch.tensor([*range(10), 7, *range(9), 5]), [10, 1, 10])
    >>> [(s.start, s.length, s.prefix) for s in plan.segments]
    [(0, 10, 0), (10, 1, 0), (11, 10, 0)]
    >>> plan = share_prefixes(torch.tensor([*range(10), *range(9), 5]), [10, 10])
    >>> [(s.start, s.length, s.prefix_start, s.prefix) for s in plan.segments], plan.where[-2:].tolist()
    ([(0, 10, 0, 0), (10, 1, 0, 9)], [8, 10])
    """
    rows = torch.split(token_ids, list(lengths))
    computed: list[Tensor] = []
    where: list[Tensor] = []
    segments: list[Segment] = []
    leader, leader_start, total, flat = rows[0][:0], 0, 0, 0
    for row in rows:
        shared = _common(leader, row)
        if shared < WORTH:
            shared, leader, leader_start = 0, row, total
        own = len(row) - shared
        if own:
            segments.append(Segment(total, own, leader_start, shared))
        computed.append(torch.arange(flat + shared, flat + len(row)))
        where += [torch.arange(leader_start, leader_start + shared), torch.arange(total, total + own)]
        total += own
        flat += len(row)
    return Plan(torch.cat(computed), torch.cat(where), tuple(segments))


def _common(a: Tensor, b: Tensor) -> int:
    n = min(len(a), len(b))
    different = (a[:n] != b[:n]).nonzero()
    return int(different[0]) if len(different) else n
