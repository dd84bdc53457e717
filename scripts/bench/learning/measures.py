"""Numbers of a row, and what several seeds say together. Pure."""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

SMOOTHED = 10
"""Steps over which the success of new groups is averaged where a threshold is looked for."""
DRAWS = 10_000
LEVEL = 0.95


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean over the seeds with its bootstrap interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        digits = 3 if abs(self.mean) < 10 else 0
        return f"{self.mean:.{digits}f} ({self.low:.{digits}f} to {self.high:.{digits}f})"


def bootstrap(values: Sequence[float], level: float = LEVEL, draws: int = DRAWS) -> Interval:
    """The percentile interval of the mean over resampled seeds. The same values give the same interval.

    With five seeds it is somewhat too narrow, which is why a claim also asks that all seeds agree in sign (`agree`).
    Raises ValueError without values.
    """
    rng = random.Random(0)
    means = sorted(statistics.fmean(rng.choices(values, k=len(values))) for _ in range(draws))
    outside = (1 - level) / 2
    return Interval(statistics.fmean(values), means[int(outside * draws)], means[int((1 - outside) * draws) - 1])


def agree(differences: Sequence[float]) -> bool:
    """Whether all seeds' differences have one sign."""
    return all(d > 0 for d in differences) or all(d < 0 for d in differences)


def held_out(row: Mapping[str, Any]) -> float:
    """Success on the held-out tasks after the last step."""
    return float(row["held_out"])


def mean_held_out(row: Mapping[str, Any]) -> float:
    """Sampled success on the held-out tasks, averaged over the evaluations after the start. Of rows with `eval.every`.

    What tells how fast a run with a lag learned: its new episodes are those of an old policy."""
    return statistics.fmean(point["held_out"] for point in row["curve"] if "held_out" in point)


def mean_success(row: Mapping[str, Any]) -> float:
    """Success of new groups, averaged over all steps: the area under the learning curve."""
    return statistics.fmean(point["success"] for point in row["curve"])


def last_success(row: Mapping[str, Any]) -> float:
    """Success of new groups over the last `SMOOTHED` steps."""
    return statistics.fmean(point["success"] for point in row["curve"][-SMOOTHED:])


def lowest_after_best(row: Mapping[str, Any]) -> float:
    """The lowest success of new groups, over `SMOOTHED` steps, from the step of the highest on: a run that learned and
    then collapsed has a low one."""
    curve = [point["success"] for point in row["curve"]]
    smooth = [statistics.fmean(curve[end - SMOOTHED : end]) for end in range(SMOOTHED, len(curve) + 1)]
    return min(smooth[smooth.index(max(smooth)) :])


def steps_to(row: Mapping[str, Any], threshold: float) -> int | None:
    """Steps until the success of new groups, over `SMOOTHED` steps, is at least the threshold; None: never."""
    curve = [point["success"] for point in row["curve"]]
    for end in range(SMOOTHED, len(curve) + 1):
        if statistics.fmean(curve[end - SMOOTHED : end]) >= threshold:
            return end
    return None


def tokens_to(row: Mapping[str, Any], threshold: float = 0.9) -> float:
    """Tokens generated until then. A run that did not get there counts with all its tokens, which is a lower bound."""
    steps = steps_to(row, threshold)
    return float(row["curve"][(steps or len(row["curve"])) - 1]["tokens"])


def seconds_to(row: Mapping[str, Any], threshold: float = 0.9) -> float:
    """The same in seconds, of rows that have a clock (launched.py)."""
    steps = steps_to(row, threshold)
    return float(row["curve"][(steps or len(row["curve"])) - 1]["s"])


def tokens(row: Mapping[str, Any]) -> float:
    """Tokens generated in all."""
    return float(row["curve"][-1]["tokens"])


def held_out_reach(row: Mapping[str, Any], of: str = "held_out", threshold: float = 0.9) -> int | None:
    """Steps until the held-out success (`of`: `held_out` sampled, `greedy`) is at least the threshold in this
    evaluation and the next; None: never. Of rows made with `eval.every`."""
    evaluated = [(step, point[of]) for step, point in enumerate(row["curve"], 1) if of in point]
    for (step, one), (_, following) in itertools.pairwise(evaluated):
        if min(one, following) >= threshold:
            return step
    return None


def reached(row: Mapping[str, Any], of: str = "held_out") -> float:
    """1 if the held-out success reached 0.9, else 0."""
    return float(held_out_reach(row, of) is not None)


def to_reach(row: Mapping[str, Any], quantity: str, of: str = "held_out") -> float:
    """Training steps (`steps`) or a counter of the curve until then. A run that did not get there counts with all that
    it had, which is a lower bound."""
    steps = held_out_reach(row, of) or len(row["curve"])
    return float(steps if quantity == "steps" else row["curve"][steps - 1][quantity])


MEASURES: Mapping[str, Callable[[Mapping[str, Any]], float]] = {
    "held_out": held_out,
    "mean_success": mean_success,
    "mean_held_out": mean_held_out,
    "last_success": last_success,
    "lowest_after_best": lowest_after_best,
    "tokens_to_0.9": tokens_to,
    "seconds_to_0.9": seconds_to,
    "tokens": tokens,
    "held_out_reaches_0.9": reached,
    "greedy_reaches_0.9": partial(reached, of="greedy"),
    "steps_to_held_out_0.9": partial(to_reach, quantity="steps"),
    "steps_to_greedy_0.9": partial(to_reach, quantity="steps", of="greedy"),
    "tokens_to_held_out_0.9": partial(to_reach, quantity="tokens"),
    "cpu_s_to_held_out_0.9": partial(to_reach, quantity="cpu_s"),
}
QUOTIENTS = frozenset(name for name in MEASURES if "_to_held_out_" in name or "_to_greedy_" in name)
"""Of which the first arm's value is divided by another's, not subtracted: how many times less the other one needs."""
