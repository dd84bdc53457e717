"""Plays a grid of settings, and picks one: throughput against mean staleness. Pure.

Every setting is played once; the recorded one, the synchronous one and those on the Pareto front are played again with
other seeds and with the recorded groups drawn again, so that a difference can be compared with its spread.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from random import Random
from statistics import fmean
from typing import Any

from asyncrl.config import Config
from asyncrl.errors import ConfigError
from asyncrl.plan.calibrate import System
from asyncrl.plan.fitting.fit import resampled
from asyncrl.plan.playing.outcome import Outcome
from asyncrl.plan.playing.simulate import Length
from asyncrl.plan.setting import TUNED, Setting
from asyncrl.plan.times import Times

AS_GOOD = 0.05
"""Share of the best throughput within which a setting counts as just as fast."""
MOST_PUTS = 12_000
"""Trajectories of one play; a larger system is thinned."""
LEARNING = ("groups_per_step", "sampler")
"""Dimensions that change what is learned from: shown, but picked only where they were asked for."""


@dataclass(frozen=True, slots=True)
class Point:
    setting: Setting
    outcomes: tuple[Outcome, ...]
    """One per seed."""

    def mean(self, name: str) -> float:
        return fmean(float(getattr(outcome, name)) for outcome in self.outcomes)

    def spread(self, name: str) -> float:
        """Largest minus smallest value over the seeds, over the mean."""
        values = [float(getattr(outcome, name)) for outcome in self.outcomes]
        return (max(values) - min(values)) / max(fmean(values), 1e-9)

    @property
    def rate(self) -> float:
        return self.mean("tokens_per_s")

    @property
    def staleness(self) -> float:
        return self.mean("staleness_mean")


@dataclass(frozen=True, slots=True)
class Grid:
    base: Point
    points: Sequence[Point]
    """All settings, the base among them."""
    refused: Mapping[Setting, str]
    """Settings that cannot be played, and why."""
    front: Sequence[Point]
    """No other point is both faster and fresher."""
    pick: Point
    synchronous: Point | None


@dataclass(frozen=True, slots=True)
class Asked:
    """What a grid is asked to try."""

    given: Mapping[str, Sequence[Any]]
    """Values by dimension."""
    fixed: Setting | None = None
    """What a base under `launch.tuning: auto` came to: bounds and slots are tried there. None: the base."""
    machines: Sequence[tuple[int, int]] = ()
    """Pairs of actors and ranks of the learner, each of which is tried with every other value; empty: the base's."""

    @property
    def names_tuned(self) -> bool:
        """Whether values are asked for of what `launch.tuning: auto` chooses, or of itself."""
        return bool({*TUNED, "tuning"} & self.given.keys())

    @property
    def kept(self) -> list[str]:
        """Dimensions in which a pick must equal the base: those of machines and of what is learned from, and whether it
        is tuned, unless they were asked for."""
        machines = () if self.machines else ("actors", "ranks")
        kept = [name for name in (*machines, *LEARNING) if name not in self.given]
        return kept if self.names_tuned else [*kept, "tuning"]


def settings(config: Config, base: Setting, asked: Asked, slots_fixed: bool = False) -> list[Setting]:
    """The settings of a grid: the product of the values by dimension that are asked for, or, without any, bounds from 0
    on and one change of every other dimension at a time."""
    given, fixed = asked.given, asked.fixed or base
    if given or asked.machines:
        names = [field.name for field in fields(Setting)]
        around = fixed if asked.names_tuned else base
        found = [
            Setting(*each)
            for one in (
                replace(around, actors=a, ranks=r) for a, r in asked.machines or [(around.actors, around.ranks)]
            )
            for each in itertools.product(*(given.get(name, (getattr(one, name),)) for name in names))
        ]
        return list(dict.fromkeys([base, *(each.tuned(config) if each.tuning == "auto" else each for each in found)]))
    tried = [fixed, *_one_changed(base, fixed, slots_fixed)] if base.tuning == "auto" else []
    return list(dict.fromkeys([base, *(tried or _one_changed(base, fixed, slots_fixed))]))


def _one_changed(base: Setting, fixed: Setting, slots_fixed: bool) -> Iterator[Setting]:
    yield from (replace(fixed, max_staleness=s, every=min(base.every, s + 1)) for s in (0, 1, 2, 4, 8))
    changes: dict[str, Sequence[Any]] = {
        "actors": (base.actors + 1, 2 * base.actors),
        "slots": () if slots_fixed else (max(1, base.slots // 2), 2 * base.slots),
        "groups_per_step": (max(1, base.groups_per_step // 2), 2 * base.groups_per_step),
        "every": [n for n in (1, 2) if n <= base.max_staleness + 1],
        "sampler": ("fifo", "freshest"),
    }
    yield from (replace(base, **{name: value}) for name, values in changes.items() for value in values)


def played(system: System, times: Times, setting: Setting, length: Length, seed: int) -> Outcome:
    """One play, of a thinned system where the whole one is too large. Raises ConfigError."""
    trajectories = setting.groups_per_step * system.config.learner.group_size * (length.warm_up + length.steps)
    factor = 1 if system.domains else thinning(setting, trajectories / MOST_PUTS)
    thin = replace(setting, actors=setting.actors // factor, groups_per_step=setting.groups_per_step // factor)
    by_ranks = system.config.learner.ranks / setting.ranks  # each computes its share of the batch
    learner = replace(times.learner, per_token_s=times.learner.per_token_s * factor * by_ranks)
    outcome, _ = system.play(replace(times, learner=learner), thin, length, seed)
    grown = ("tokens_per_s", "generated_per_s", "live_trajectories", "live_bytes", "bytes_per_step")
    return replace(outcome, **{name: getattr(outcome, name) * factor for name in grown})


def thinning(setting: Setting, wanted: float) -> int:
    """By how much actors and groups per step are divided together: the smallest divisor of both that is at least
    `wanted`, else the largest that leaves 8 groups a step.

    >>> thinning(Setting(1000, 64, 512, 2, 1, "fifo"), 3.5)
    4
    """
    both = [
        k for k in range(1, setting.actors + 1)
        if setting.actors % k == 0 and setting.groups_per_step % k == 0 and setting.groups_per_step // k >= 8
    ] or [1]  # fmt: skip
    return next((k for k in both if k >= wanted), both[-1])


def grid(
    system: System,
    times: Times,
    base: Setting,
    asked: Asked,
    *,
    steps: int,
    seeds: int,
    note: Callable[[Setting], None] = lambda setting: None,
) -> Grid:
    """`note` is told of every setting before it is played. Raises ConfigError if the base cannot be played."""
    points: dict[Setting, Point] = {}
    refused: dict[Setting, str] = {}
    variants = [times, *(resampled(times, Random(seed)) for seed in range(1, seeds))]

    def play(setting: Setting, seed: int) -> Outcome:
        length = Length(setting.warm_up, steps)
        return played(system, variants[seed], setting, length, seed)

    slots_fixed = system.config.actors.slots == "auto"
    for setting in settings(system.config, base, asked, slots_fixed):
        note(setting)
        try:
            outcome = play(setting, 0)
        except ConfigError as error:
            refused[setting] = str(error)
            continue
        if outcome.stuck:
            refused[setting] = f"no further batch: {outcome.stuck}"
        else:
            points[setting] = Point(setting, (outcome,))
    if base not in points:
        raise ConfigError(f"the recorded setting cannot be played ({base}): {refused[base]}")
    for setting in {p.setting: None for p in _worth(list(points.values()), base, asked)}:
        more = tuple(play(setting, seed) for seed in range(1, seeds))
        points[setting] = replace(points[setting], outcomes=points[setting].outcomes + more)
    found = list(points.values())
    pick = picked(found, base, asked)
    return Grid(points[base], found, refused, front(found), pick, _synchronous(found, pick))


def _worth(points: Sequence[Point], base: Setting, asked: Asked) -> Iterator[Point]:
    """The points that are played with every seed."""
    pick = picked(points, base, asked)
    yield from (p for p in points if p.setting in (base, pick.setting))
    yield from front(points)
    synchronous = _synchronous(points, pick)
    if synchronous is not None:
        yield synchronous


def front(points: Sequence[Point]) -> list[Point]:
    """The Pareto front, fastest first."""
    ordered = sorted(points, key=lambda p: (-p.rate, p.staleness))
    least, found = float("inf"), []
    for point in ordered:
        if point.staleness < least:
            least = point.staleness
            found.append(point)
    return found


def candidates(points: Sequence[Point], base: Setting, asked: Asked) -> list[Point]:
    """The points that may be picked: as many actors and ranks as recorded, the same batches, and tuned or not as
    recorded, unless others were asked for."""
    return [p for p in points if all(getattr(p.setting, name) == getattr(base, name) for name in asked.kept)]


def picked(points: Sequence[Point], base: Setting, asked: Asked) -> Point:
    """The freshest of those within `AS_GOOD` of the fastest; the recorded one, if it is among them and a tenth of a
    training step at most behind in staleness."""
    allowed = candidates(points, base, asked)
    best = max(p.rate for p in allowed)
    fast = [p for p in allowed if p.rate >= (1 - AS_GOOD) * best]
    freshest = min(fast, key=lambda p: (round(p.staleness, 2), len(p.setting.changes(base)), -p.rate))
    own = next((p for p in fast if p.setting == base), None)
    return own if own is not None and own.staleness <= freshest.staleness + 0.1 else freshest


def _synchronous(points: Sequence[Point], pick: Point) -> Point | None:
    """The fastest point with the bound 0 and otherwise the machines and batches of the pick."""
    same = [
        p for p in points
        if p.setting.value("max_staleness") == 0 and p.setting.actors == pick.setting.actors
        and p.setting.ranks == pick.setting.ranks
        and p.setting.groups_per_step == pick.setting.groups_per_step
    ]  # fmt: skip
    return max(same, key=lambda p: p.rate, default=None)
