"""Rows into micro-batches: which rows one forward pass computes together.

Rows are laid end to end, so a micro-batch holds real tokens only. What is balanced is cost: a term linear in a row's
length (the matrix products) and a quadratic one (attention).

>>> pack([60, 50, 40, 10], limit=100)
[[0, 3], [1, 2]]
"""

from __future__ import annotations

from collections.abc import Sequence

ATTENTION_COST = 1 / 8192
"""Quadratic over linear cost of a token pair: attention costs as much as the rest at about this many tokens a row."""

BLOCKS = 4
"""Blocks of a rank's share of the tokens, at least: rows that stay together are no larger."""


def row_cost(length: int) -> float:
    """Of one row, in tokens of a short row."""
    return length + ATTENTION_COST * length * length


def pack(lengths: Sequence[int], limit: int, ranks: int = 1, groups: Sequence[int] | None = None) -> list[list[int]]:
    """Row indices of each micro-batch: every row once, at most `limit` tokens together, costs balanced.

    `groups`: of each row. Those of one stay together as far as they fit, because what rows begin alike is computed once
    for those that are in one micro-batch (backends/shared_prefixes.py). A row longer than `limit` stands alone.
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
    # What several ranks compute at the same time should cost the same: of a few large blocks one cannot make that.
    block = limit if ranks == 1 else min(limit, sum(lengths) // (BLOCKS * ranks))
    blocks = _blocks(lengths, block, range(len(lengths)) if groups is None else groups)
    tokens = [sum(lengths[i] for i in rows) for rows in blocks]
    costs = [sum(row_cost(lengths[i]) for i in rows) for rows in blocks]
    largest_first = sorted(range(len(blocks)), key=lambda i: (-tokens[i], i))
    fitted = _first_fit(tokens, limit, largest_first)
    count = -(-max(len(fitted), 1) // ranks) * ranks
    balanced = _balance(tokens, costs, limit, largest_first, count)
    # Balancing may not find the room that first fit found: then first fit stands.
    packed = balanced if balanced is not None else fitted
    packed += [[] for _ in range(count - len(packed))]
    return [sorted(row for i in part for row in blocks[i]) for part in packed]


def rounds(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Which micro-batches `ranks` ranks compute at the same time: like costs together, since all wait for the dearest.

    A round holds at most `ranks` indices, of which rank r computes the r-th; a rank beyond them has nothing to do. The
    dearer ones go to the ranks in turn, so that none is always the last.

    >>> rounds([5.0, 1.0, 4.0, 2.0, 3.0], 2)
    [[0, 2], [3, 4], [1]]
    """
    dearest_first = sorted(range(len(costs)), key=lambda i: (-costs[i], i))
    found = [dearest_first[at : at + ranks] for at in range(0, len(costs), ranks)]
    return [part[::-1] if n % 2 and len(part) == ranks else part for n, part in enumerate(found)]


def _blocks(lengths: Sequence[int], limit: int, groups: Sequence[int]) -> list[list[int]]:
    """Rows that stay together: of one group, at most `limit` tokens or a single row."""
    blocks: list[list[int]] = []
    tokens = 0
    for row in sorted(range(len(lengths)), key=lambda i: (groups[i], i)):
        if blocks and groups[blocks[-1][0]] == groups[row] and tokens + lengths[row] <= limit:
            blocks[-1].append(row)
            tokens += lengths[row]
        else:
            blocks.append([row])
            tokens = lengths[row]
    return blocks


def _first_fit(tokens: Sequence[int], limit: int, order: Sequence[int]) -> list[list[int]]:
    """First fit, largest first: at most 11/9 of the fewest possible parts."""
    parts: list[list[int]] = []
    held: list[int] = []
    for block in order:
        fits = next((p for p, n in enumerate(held) if n + tokens[block] <= limit), None)
        if fits is None:
            parts.append([block])
            held.append(tokens[block])
        else:
            parts[fits].append(block)
            held[fits] += tokens[block]
    return parts


def _balance(
    tokens: Sequence[int], costs: Sequence[float], limit: int, order: Sequence[int], count: int
) -> list[list[int]] | None:
    """Largest first, each block to the cheapest part with room; None when one finds none."""
    parts: list[list[int]] = [[] for _ in range(count)]
    held, spent = [0] * count, [0.0] * count
    for block in order:
        room = [p for p in range(count) if held[p] + tokens[block] <= limit or not parts[p]]
        if not room:
            return None
        p = min(room, key=lambda p: (spent[p], p))
        parts[p].append(block)
        held[p] += tokens[block]
        spent[p] += costs[block]
    return parts
