"""What the results of evaluations ask for: that the run stops, and which weights are the best. Pure; the audit computes
it again.

A result acts once, and only as the latest of its set on the line of history that led to the learner's weights.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from asyncrl.config.choosing import Choosing, Figure

_REPEATS = re.compile(r"version \d+ was published with the digest .*|batch \d+ was \w+ and is now \w+")
"""Reasons of branches that begin because redone steps, which nobody meant to change, gave something else."""


@dataclass(frozen=True, slots=True)
class Measured:
    """The success that one evaluation has measured."""

    serial: int
    figure: Figure
    branch: int
    due: int
    """The version at which it was due."""
    played: tuple[int, int]
    """Branch and version of the weights that played it."""
    share: float


@dataclass(frozen=True, slots=True)
class Stop:
    eval: int
    """Serial of the evaluation with the result."""
    why: str


def on_line(measured: Iterable[Measured], forks: Mapping[int, int], branch: int) -> list[Measured]:
    """Those at a version that the line of `branch` passed, by version; of two at one version that of the later branch.

    forks: the version at which each branch began.
    """
    kept: dict[tuple[Figure, int], Measured] = {}
    for each in sorted(measured, key=lambda m: (m.due, m.branch, m.serial)):
        if passed((each.branch, each.due), forks, branch):
            kept[each.figure, each.due] = each
    return list(kept.values())


def passed(version: tuple[int, int], forks: Mapping[int, int], branch: int) -> bool:
    """Whether (branch, version) is a point of the line of `branch`.

    >>> [passed(v, {0: 0, 1: 2}, 1) for v in ((0, 2), (0, 3), (1, 3), (2, 3))]
    [True, False, True, False]
    """
    left_at = min((at for later, at in forks.items() if version[0] < later <= branch), default=version[1])
    return version[0] <= branch and version[1] <= left_at


def voids(why: str, fork_version: int, due: int) -> bool:
    """Whether a branch that begins before the batch of a stop, or at it, voids the stop. It does not if it repeats the
    steps that it leaves, with other weights, and the result still is on its line.

    why: the reason for which it begins, as the ledger has it. due: the version of the result.

    >>> redone = "version 9 was published with the digest a, and was redone as b"
    >>> [voids(redone, 8, 5), voids(redone, 4, 5), voids("a fresh start at batch 8", 8, 5)]
    [False, True, True]
    """
    return due > fork_version or _REPEATS.fullmatch(why) is None


def stops(line: Sequence[Measured], choosing: Choosing, acted: Collection[int]) -> list[Stop]:
    """`line`: as `on_line` gives it. `acted`: serials of the evaluations whose results have stopped the run before.

    >>> dev = ("dev", "sampled")
    >>> line = [Measured(n, dev, 0, 10 * n, (0, 10 * n), share) for n, share in enumerate((0.5, 0.75, 0.75))]
    >>> stops(line, Choosing(patience=((dev, 1),)), ())[0].why
    'set dev has not exceeded the 75.0% sampled success of version 10 in 1 evaluation (eval.patience)'
    >>> stops(line, Choosing(stop_at=((dev, 0.8),), patience=((dev, 2),)), ())
    []
    """
    found = []
    for figure, value in choosing.stop_at:
        latest = [m for m in line if m.figure == figure][-1:]
        found += [Stop(m.serial, _reached(m, value)) for m in latest if m.share >= value and m.serial not in acted]
    for figure, count in choosing.patience:
        of_figure = [m for m in line if m.figure == figure]
        top = max(of_figure, key=lambda m: m.share, default=None)  # the first of them
        if top is None or of_figure[-1].serial in acted or len(of_figure) - 1 - of_figure.index(top) < count:
            continue
        found.append(Stop(of_figure[-1].serial, _patient(top, len(of_figure) - 1 - of_figure.index(top))))
    return found


def ranked(line: Sequence[Measured], choosing: Choosing) -> list[Measured]:
    """From the highest success on, the first of equal ones first; those that the version played at which they were due,
    since no other weights were exported."""
    of_figure = (m for m in line if m.figure == choosing.keep_best and m.played == (m.branch, m.due))
    return sorted(of_figure, key=lambda m: -m.share)


def _reached(m: Measured, value: float) -> str:
    return (
        f"set {m.figure[0]} reached {m.share:.1%} {m.figure[1]} success at version {m.due}, eval.stop_at is {value:g}"
    )


def _patient(top: Measured, since: int) -> str:
    return (
        f"set {top.figure[0]} has not exceeded the {top.share:.1%} {top.figure[1]} success of version {top.due} in "
        f"{since} evaluation{'s' * (since > 1)} (eval.patience)"
    )
