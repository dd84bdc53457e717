"""Which complete groups a batch may hold, which it takes, and which learner rank gets them. Pure.

A filter gets a complete group and returns True to drop it; it sees raw rewards and sizes, not the arrays. A sampler
gets the candidates in issue order, the learner's version, the number to take and a random generator seeded by the
batch, and returns that many of them; with `buffer.max_uses` above 1 it is asked for unused groups first. `FILTERS` and
`SAMPLERS` name those that come with asyncrl; `buffer.filters` and `buffer.sampler` also take import paths.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from random import Random

from asyncrl.buffer.ledger.group import Group

Filter = Callable[[Group], bool]


def zero_variance(group: Group) -> bool:
    """All rewards equal: every group-relative advantage is zero."""
    return len(set(group.rewards)) == 1


def too_long(group: Group) -> bool:
    """An episode ran into a limit on tokens, so its reward says little about what it would have done."""
    return any(r.stop_reason in ("max_tokens", "length") for r in group.trajectories)


FILTERS: dict[str, Filter] = {"zero_variance": zero_variance, "too_long": too_long}

Sampler = Callable[[Sequence[Group], int, int, Random], Sequence[Group]]


def fifo(candidates: Sequence[Group], version: int, count: int, rng: Random) -> Sequence[Group]:
    """Issue order, oldest first; never completion order, which favours short episodes."""
    return candidates[:count]


def freshest(candidates: Sequence[Group], version: int, count: int, rng: Random) -> Sequence[Group]:
    """Groups whose oldest token is youngest; ties in issue order."""
    return sorted(candidates, key=lambda g: (-(g.oldest or 0), g.number))[:count]


def uniform(candidates: Sequence[Group], version: int, count: int, rng: Random) -> Sequence[Group]:
    """A uniform random sample."""
    return rng.sample(list(candidates), count)


def priority(candidates: Sequence[Group], version: int, count: int, rng: Random) -> Sequence[Group]:
    """Groups with the largest spread of rewards (the size of advantages), halved with each version of age."""

    def priority_of(group: Group) -> float:
        return statistics.pstdev(group.rewards) * 0.5 ** (version - (group.oldest or 0))

    return sorted(candidates, key=lambda g: (-priority_of(g), g.number))[:count]


SAMPLERS: dict[str, Sampler] = {"fifo": fifo, "freshest": freshest, "uniform": uniform, "priority": priority}


def choose(sampler: Sampler, candidates: Sequence[Group], version: int, count: int, rng: Random) -> list[Group]:
    """Chooses `count` groups, unused ones first, in issue order. Raises ValueError if a sampler breaks its contract."""
    unused = [g for g in candidates if not g.uses]
    used = [g for g in candidates if g.uses]
    chosen = list(sampler(unused, version, min(count, len(unused)), rng))
    if len(chosen) < count:
        chosen += sampler(used, version, count - len(chosen), rng)
    if len({g.number for g in chosen}) != count or not {g.number for g in chosen} <= {g.number for g in candidates}:
        name = getattr(sampler, "__name__", repr(sampler))
        raise ValueError(f"buffer.sampler {name} gave {len(chosen)} groups, expected {count} different candidates.")
    return sorted(chosen, key=lambda g: g.number)


def share(costs: Sequence[int], rank: int, size: int) -> list[int]:
    """Places in the batch, ascending, of the groups for `rank` of `size` ranks. `costs` are tokens per group.

    The longest group goes first, to the rank with the fewest tokens so far; ranks differ by at most one group.

    >>> [share([9, 5, 4, 1], rank, 2) for rank in range(2)]
    [[0, 3], [1, 2]]
    """
    if not 0 <= rank < size:
        raise ValueError(f"dp_rank is {rank}, expected 0 <= dp_rank < dp_size = {size}")
    most = -(-len(costs) // size)
    full = len(costs) % size or size  # number of ranks that may hold `most` groups
    shares: list[list[int]] = [[] for _ in range(size)]
    loads = [0] * size
    for place in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        filled = sum(len(s) == most for s in shares)
        open_ranks = [r for r in range(size) if len(shares[r]) < (most if filled < full else most - 1)]
        target = min(open_ranks, key=lambda r: (loads[r], r))
        shares[target].append(place)
        loads[target] += costs[place]
    return sorted(shares[rank])
