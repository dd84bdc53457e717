"""Which complete, eligible groups make the next batch. `SAMPLERS` names them; `buffer.sampler` takes import paths too.

A sampler gets the candidates in issue order, the learner's version, how many to take, and a random generator seeded by
the batch, and gives that many of them. With `buffer.max_uses` above 1 it is asked for unused groups first.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from random import Random

from asyncrl.buffer.ledger.group import Group

Sampler = Callable[[Sequence[Group], int, int, Random], Sequence[Group]]


def fifo(candidates: Sequence[Group], version: int, count: int, rng: Random) -> Sequence[Group]:
    """Issue order, oldest first; never completion order, which favours short episodes."""
    return candidates[:count]


def freshest(candidates: Sequence[Group], version: int, count: int, rng: Random) -> Sequence[Group]:
    """Those whose oldest token is youngest; among equals in issue order."""
    return sorted(candidates, key=lambda g: (-(g.oldest or 0), g.number))[:count]


def uniform(candidates: Sequence[Group], version: int, count: int, rng: Random) -> Sequence[Group]:
    """Any, with equal probability."""
    return rng.sample(list(candidates), count)


def priority(candidates: Sequence[Group], version: int, count: int, rng: Random) -> Sequence[Group]:
    """Where there is most to learn: the spread of rewards (the size of advantages), halved with each version of age."""

    def worth(group: Group) -> float:
        return statistics.pstdev(group.rewards) * 0.5 ** (version - (group.oldest or 0))

    return sorted(candidates, key=lambda g: (-worth(g), g.number))[:count]


SAMPLERS: dict[str, Sampler] = {"fifo": fifo, "freshest": freshest, "uniform": uniform, "priority": priority}


def choose(sampler: Sampler, candidates: Sequence[Group], version: int, count: int, rng: Random) -> list[Group]:
    """`count` groups, unused ones first, in issue order. Raises ValueError when a sampler breaks its contract."""
    unused = [g for g in candidates if not g.uses]
    used = [g for g in candidates if g.uses]
    chosen = list(sampler(unused, version, min(count, len(unused)), rng))
    if len(chosen) < count:
        chosen += sampler(used, version, count - len(chosen), rng)
    if len({g.number for g in chosen}) != count or not {g.number for g in chosen} <= {g.number for g in candidates}:
        name = getattr(sampler, "__name__", repr(sampler))
        raise ValueError(f"buffer.sampler {name} gave {len(chosen)} groups, expected {count} different candidates.")
    return sorted(chosen, key=lambda g: g.number)
