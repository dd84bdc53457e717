"""A batch cut into one share per data-parallel rank: whole groups, equal in number where that is possible, balanced by
tokens. The same groups give the same cut; another number of ranks cuts the same groups again.
"""

from __future__ import annotations

from collections.abc import Sequence


def share(costs: Sequence[int], rank: int, size: int) -> list[int]:
    """Places in the batch, ascending, that `rank` of `size` ranks trains on. `costs` are tokens per group.

    Longest first onto the rank with the least so far, no rank more than one group ahead of another.

    >>> [share([9, 5, 4, 1], rank, 2) for rank in range(2)]
    [[0, 3], [1, 2]]
    """
    if not 0 <= rank < size:
        raise ValueError(f"dp_rank is {rank}, expected 0 <= dp_rank < dp_size = {size}")
    most = -(-len(costs) // size)
    full = len(costs) % size or size  # so many ranks may hold `most` groups
    shares: list[list[int]] = [[] for _ in range(size)]
    loads = [0] * size
    for place in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        filled = sum(len(s) == most for s in shares)
        open_ranks = [r for r in range(size) if len(shares[r]) < (most if filled < full else most - 1)]
        target = min(open_ranks, key=lambda r: (loads[r], r))
        shares[target].append(place)
        loads[target] += costs[place]
    return sorted(shares[rank])
