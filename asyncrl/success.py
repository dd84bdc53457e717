"""Success on held-out tasks: shares with their intervals, and pass@k. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from asyncrl.errors import RunError
from asyncrl.trajectory import succeeded

Z_95 = 1.959964


@dataclass(frozen=True, slots=True)
class Success:
    """Success of one way of sampling."""

    share: float
    low: float
    """95% interval"""
    high: float
    tasks: int
    episodes: int
    failed: int
    """Episodes that failed in their environment: not counted."""
    reward: float
    """Mean over tasks of their mean reward."""
    reward_half: float
    """Half its 95% interval."""
    pass_at: Mapping[int, float]
    """By k: the chance that at least one of k episodes of a task succeeds."""

    def __str__(self) -> str:
        interval = f"95%: {self.low:.1%} to {self.high:.1%}"
        failed = f", {self.failed} failed in their environment" if self.failed else ""
        counts = f"{self.episodes} episodes, {self.tasks} tasks{failed}"
        passes = "".join(f"  pass@{k} {share:.1%}" for k, share in self.pass_at.items())
        return f"{self.share:.1%}  ({interval}; {counts})  reward {self.reward:.3f} ± {self.reward_half:.3f}{passes}"


class Outcome(Protocol):
    """The part of a trajectory that is evaluated."""

    @property
    def task_id(self) -> str: ...
    @property
    def reward(self) -> float: ...
    @property
    def rewards(self) -> Mapping[str, float]: ...


def success(trajectories: Sequence[Outcome | None], reward: str, pass_at: Sequence[int] = ()) -> Success:
    """Success as `trajectory.succeeded` defines it; `reward` is the reward's name, None stands for a failed episode.
    `pass_at`: the k of pass@k; empty: the powers of two. Raises RunError when all of them failed."""
    finished = [t for t in trajectories if t is not None]
    if not finished:
        raise RunError(f"all {len(trajectories)} episodes failed in their environment: see above for why.")
    by_task: dict[str, list[Outcome]] = {}
    for t in finished:
        by_task.setdefault(t.task_id, []).append(t)
    counts = [(len(own), sum(succeeded(t.reward, t.rewards, reward) for t in own)) for own in by_task.values()]
    share = sum(solved for _, solved in counts) / len(finished)
    # Several samples of one task are not independent. Counted as one, they give an interval that is rather too wide.
    low, high = wilson(share, len(by_task))
    means = [statistics.fmean(t.reward for t in own) for own in by_task.values()]
    half = Z_95 * statistics.stdev(means) / math.sqrt(len(means)) if len(means) > 1 else 0.0
    failed = len(trajectories) - len(finished)
    return Success(
        share, low, high, len(by_task), len(finished), failed, statistics.fmean(means), half, passes_at(counts, pass_at)
    )


def passes_at(counts: Sequence[tuple[int, int]], wanted: Sequence[int] = ()) -> dict[int, float]:
    """pass@k, each over the tasks that have k episodes, for the `wanted` k; with none, for k = 2, 4, 8, ... up to the
    largest number of episodes.

    `counts`: (episodes, successes) of each task.
    """
    most = max(n for n, _ in counts)
    every = [k for k in wanted if k <= most] if wanted else [2**i for i in range(1, most.bit_length())]
    return {k: statistics.fmean(pass_at(k, n, c) for n, c in counts if n >= k) for k in every}


def pass_at(k: int, n: int, c: int) -> float:
    """Chance of a success among k episodes drawn from n of which c succeeded; unbiased (Chen et al., 2107.03374).

    >>> pass_at(1, 4, 1), pass_at(2, 4, 2), pass_at(3, 4, 2)
    (0.25, 0.8333333333333334, 1.0)
    """
    return 1 - math.comb(n - c, k) / math.comb(n, k)


def wilson(share: float, n: int, z: float = Z_95) -> tuple[float, float]:
    """Interval of a share observed in n trials (Wilson, 1927); also valid near 0 and 1.

    >>> tuple(round(x, 3) for x in wilson(0.9, 200))
    (0.851, 0.934)
    >>> tuple(round(x, 3) for x in wilson(1.0, 10))
    (0.722, 1.0)
    """
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    # The interval contains the share itself in spite of rounding.
    return max(0.0, min(centre - half, share)), min(1.0, max(centre + half, share))
