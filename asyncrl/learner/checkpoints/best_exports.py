"""Which exports of evaluated weights stay. Pure.

The best on the line of history stays, and for every point at which a branch may begin the best up to there: on that
branch it may be the best again, and no step would make its weights a second time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

Version = tuple[int, int]
"""(branch, version)"""
Result = tuple[int, int, float]
"""Branch and version of the weights, and their success."""


def best(results: Sequence[Result], there: Collection[Version], until: int | None = None) -> Result | None:
    """The first of `results`, which are sorted from the best on, whose export is there; `until`: of versions up to it.

    >>> best([(0, 20, 0.9), (0, 30, 0.8), (0, 10, 0.5)], {(0, 10), (0, 30)})
    (0, 30, 0.8)
    """
    ok = (each for each in results if each[:2] in there and (until is None or each[1] <= until))
    return next(ok, None)


def wanted(results: Sequence[Result], there: Collection[Version], points: Iterable[int]) -> set[Version]:
    """Exports that stay; `points`: versions at which a branch may begin.

    >>> sorted(wanted([(0, 20, 0.9), (0, 10, 0.5), (0, 5, 0.4)], {(0, 5), (0, 10), (0, 20)}, [15, 25]))
    [(0, 10), (0, 20)]
    """
    found = [best(results, there), *(best(results, there, until) for until in points)]
    return {each[:2] for each in found if each is not None}
