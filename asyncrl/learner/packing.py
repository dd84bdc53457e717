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


def row_cost(length: int) -> float:
    """Of one row, in tokens of a short row."""
    return length + ATTENTION_COST * length * length


def pack(lengths: Sequence[int], limit: int, ranks: int = 1) -> list[list[int]]:
    """Row indices of each micro-batch: every row once, at most `limit` tokens together, costs balanced.

    A row longer than `limit` stands alone. `ranks`: the number of micro-batches is a multiple of it, so that ranks that
    compute one each at the same time are all busy; without rows for that, some are empty.
    The result depends on `lengths` alone; indices ascend within a micro-batch.
    """
    if limit < 1 or ranks < 1:
        raise ValueError(f"limit is {limit} and ranks {ranks}, expected at least 1")
    if any(length < 1 for length in lengths):
        raise ValueError("a row is empty: every row has at least one token")
    longest_first = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    fitted = _first_fit(lengths, limit, longest_first)
    count = -(-max(len(fitted), 1) // ranks) * ranks
    balanced = _balance(lengths, limit, longest_first, count)
    # Balancing may not find the room that first fit found: then first fit stands.
    packed = balanced if balanced is not None else fitted
    packed += [[] for _ in range(count - len(packed))]
    return [sorted(rows) for rows in packed]


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


def _first_fit(lengths: Sequence[int], limit: int, order: Sequence[int]) -> list[list[int]]:
    """First fit, longest first: at most 11/9 of the fewest possible parts."""
    parts: list[list[int]] = []
    tokens: list[int] = []
    for row in order:
        fits = next((p for p, held in enumerate(tokens) if held + lengths[row] <= limit), None)
        if fits is None:
            parts.append([row])
            tokens.append(lengths[row])
        else:
            parts[fits].append(row)
            tokens[fits] += lengths[row]
    return parts


def _balance(lengths: Sequence[int], limit: int, order: Sequence[int], count: int) -> list[list[int]] | None:
    """Longest first, each row to the cheapest part with room; None when one finds none."""
    parts: list[list[int]] = [[] for _ in range(count)]
    tokens, costs = [0] * count, [0.0] * count
    for row in order:
        room = [p for p in range(count) if tokens[p] + lengths[row] <= limit or not parts[p]]
        if not room:
            return None
        p = min(room, key=lambda p: (costs[p], p))
        parts[p].append(row)
        tokens[p] += lengths[row]
        costs[p] += row_cost(lengths[row])
    return parts
