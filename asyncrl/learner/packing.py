"""Rows into micro-batches: which rows one forward pass computes together.

Rows are laid end to end, so a micro-batch holds real tokens only. What is balanced is cost: a term linear in a row's
length (the matrix products) and a quadratic one (attention).

>>> pack([60, 50, 40, 10], limit=100)
[[0, 3], [1, 2]]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ATTENTION_COST = 1 / 8192
"""Cost of attention per pair of tokens, where the rest costs 1 per token: equal in a row of 8,192 tokens."""

BLOCKS = 4
"""Least number of blocks in a rank's share of the tokens; a block is rows that stay together."""


def row_cost(length: int) -> float:
    """Cost of one row, in tokens of a short row."""
    return length + ATTENTION_COST * length * length


def pack(lengths: Sequence[int], limit: int, ranks: int = 1, groups: Sequence[int] | None = None) -> list[list[int]]:
    """Row indices of each micro-batch: every row once, at most `limit` tokens together, costs balanced.

    `groups`: the group of each row. Rows of one group stay together as far as they fit, because a common prefix is
    computed once for the rows of a micro-batch (backends/shared_prefixes.py). A row longer than `limit` stands alone.
    `ranks`: the number of micro-batches is a multiple of it, so that ranks that compute one each at the same time are
    all busy; without rows for that, some are empty. The result depends on the arguments alone; indices ascend within a
    micro-batch.

    >>> pack([30, 30, 20, 20], limit=60, groups=[0, 1, 0, 1])
    [[0, 2], [1, 3]]
    """
    if limit < 1 or ranks < 1:
        raise ValueError(f"limit is {limit} and ranks {ranks}, expected at least 1")
    if any(length < 1 for length in lengths):
        raise ValueError("a row is empty: every row has at least one token")
    # Micro-batches that several ranks compute at the same time should cost the same, which takes small blocks.
    largest = limit if ranks == 1 else min(limit, sum(lengths) // (BLOCKS * ranks))
    blocks = _blocks(lengths, largest, groups or range(len(lengths)))
    parts = _balanced_parts(blocks, limit, ranks)
    return [sorted(row for block in part for row in block.rows) for part in parts]


def _balanced_parts(blocks: Sequence[_Block], limit: int, ranks: int) -> list[list[_Block]]:
    """Blocks of each micro-batch: as many as first fit needs, rounded up to a multiple of `ranks`."""
    largest_first = sorted(blocks, key=lambda block: -block.tokens)
    fitted = _first_fit(largest_first, limit)
    count = -(-max(len(fitted), 1) // ranks) * ranks
    # Balancing may not find the room that first fit found: then first fit stands.
    return _balance(largest_first, limit, count) or fitted + [[] for _ in range(count - len(fitted))]


def rounds(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Micro-batches that `ranks` ranks compute at the same time: of similar cost, since all wait for the largest.

    A round holds at most `ranks` indices, of which rank r computes the r-th; a rank beyond them has nothing to do. The
    order alternates from round to round, so that no rank always gets the most expensive one.

    >>> rounds([5.0, 1.0, 4.0, 2.0, 3.0], 2)
    [[0, 2], [3, 4], [1]]
    """
    expensive_first = sorted(range(len(costs)), key=lambda i: (-costs[i], i))
    parts = [expensive_first[at : at + ranks] for at in range(0, len(costs), ranks)]
    return [part[::-1] if n % 2 and len(part) == ranks else part for n, part in enumerate(parts)]


@dataclass(frozen=True, slots=True)
class _Block:
    """Rows that stay together."""

    rows: list[int]
    tokens: int
    cost: float


def _blocks(lengths: Sequence[int], limit: int, groups: Sequence[int]) -> list[_Block]:
    """Rows of one group, at most `limit` tokens together or a single row."""
    blocks: list[list[int]] = []
    tokens = 0
    for row in sorted(range(len(lengths)), key=lambda i: (groups[i], i)):
        if blocks and groups[blocks[-1][0]] == groups[row] and tokens + lengths[row] <= limit:
            blocks[-1].append(row)
            tokens += lengths[row]
        else:
            blocks.append([row])
            tokens = lengths[row]
    return [_Block(b, sum(lengths[i] for i in b), sum(row_cost(lengths[i]) for i in b)) for b in blocks]


def _first_fit(blocks: Sequence[_Block], limit: int) -> list[list[_Block]]:
    """Each block, largest first, to the first part with room: at most 11/9 of the fewest possible parts."""
    parts: list[list[_Block]] = []
    tokens: list[int] = []
    for block in blocks:
        fits = next((p for p, n in enumerate(tokens) if n + block.tokens <= limit), None)
        if fits is None:
            parts.append([block])
            tokens.append(block.tokens)
        else:
            parts[fits].append(block)
            tokens[fits] += block.tokens
    return parts


def _balance(blocks: Sequence[_Block], limit: int, count: int) -> list[list[_Block]] | None:
    """Each block, largest first, to the cheapest part with room; None when a block finds none."""
    parts: list[list[_Block]] = [[] for _ in range(count)]
    tokens, costs = [0] * count, [0.0] * count
    for block in blocks:
        room = [p for p in range(count) if tokens[p] + block.tokens <= limit or not parts[p]]
        if not room:
            return None
        p = min(room, key=lambda p: (costs[p], p))
        parts[p].append(block)
        tokens[p] += block.tokens
        costs[p] += block.cost
    return parts
