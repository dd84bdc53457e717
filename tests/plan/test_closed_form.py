"""Mean staleness in closed form against the virtual clock, which plays the buffer's own code."""

from __future__ import annotations

from random import Random
from statistics import fmean

import pytest

from asyncrl.plan.closed_form import Rates, mean_staleness, smallest_bound
from asyncrl.plan.playing.outcome import Outcome
from asyncrl.plan.playing.simulate import Length, Play
from asyncrl.plan.playing.world import Modelled
from asyncrl.plan.setting import Setting
from asyncrl.plan.times import EngineTimes, Episode, LearnerTimes, Times, Turn
from tests.buffer.fakes import rules

TOKEN_S, SIZE = 0.01, 4


def episode(rng: Random, sigma: float) -> Episode:
    turns = tuple(Turn(0, rng.randint(5, 40), rng.lognormvariate(-1, sigma) if n < 2 else 0.0) for n in range(3))
    tokens = sum(turn.sampled for turn in turns)
    return Episode("fake", turns, 0.0, tokens + 10, 100, 1.0, "done")


def measured(groups: list[tuple[Episode, ...]], in_flight: float, training: float, delay: float) -> Rates:
    """The rates of these episodes, token by token."""
    ends, remaining, ages, counts = [], 0.0, 0.0, 0
    for group in groups:
        lasts = [sum(t.sampled * TOKEN_S + t.environment for t in e.turns) for e in group]
        ends += lasts
        for e in group:
            at = 0.0
            for t in e.turns:
                middle = at + t.sampled * TOKEN_S / 2
                remaining, ages, counts = (
                    remaining + t.sampled * (max(lasts) - middle), ages + t.sampled * middle, counts + t.sampled
                )  # fmt: skip
                at += t.sampled * TOKEN_S + t.environment
    return Rates(in_flight, fmean(ends), remaining / counts, ages / counts, training, delay)


def both(setting: Setting, training: float, delay: float, sigma: float) -> tuple[Outcome, Rates]:
    rng = Random(0)
    groups = [tuple(episode(rng, sigma) for _ in range(SIZE)) for _ in range(300)]
    learner = LearnerTimes(training, 0.0, 0.0, delay / 2, 0.0, 0.0)
    times = Times(groups, EngineTimes(TOKEN_S, 0.0, 0.0), learner, delay / 2, 0.0, 0.0, 0.0)
    of = rules(
        steps=1 << 30, groups_per_step=setting.groups_per_step, group_size=SIZE, capacity=10**6,
        max_staleness=setting.max_staleness, lease_s=1e12, slots=setting.slots,
    )  # fmt: skip
    length = Length(3 * setting.max_staleness + 5, 30)
    played = Play(of, setting, lambda clock: Modelled(clock, times, [], Random(0), (1, 1)), length).run()
    return played, measured(groups, setting.actors * setting.slots / SIZE, training, delay)


@pytest.mark.parametrize(
    ("setting", "training", "sigma"),
    [
        (Setting(2, 16, 8, 4, 1, "fifo"), 0.2, 0.5),
        (Setting(2, 16, 16, 4, 2, "fifo"), 0.4, 0.5),
        (Setting(1, 16, 8, 4, 1, "fifo"), 1.0, 1.0),
        (Setting(4, 16, 4, 8, 1, "fifo"), 0.2, 0.5),
        (Setting(4, 16, 8, 4, 2, "fifo"), 3.0, 0.5),
        (Setting(4, 32, 8, 4, 1, "fifo"), 1.2, 0.5),
        (Setting(2, 16, 8, 0, 1, "fifo"), 0.2, 0.5),
    ],
    ids=["generation", "cadence 2", "one actor", "small batch", "training", "training, long episodes", "synchronous"],
)
@pytest.mark.system
def test_the_closed_form_is_near_the_played_staleness(setting: Setting, training: float, sigma: float) -> None:
    """docs/how-to/planning.md states this error, for one side clearly slower and hardly any drops."""
    played, rates = both(setting, training, 0.05, sigma)
    found = mean_staleness(rates, setting.groups_per_step, setting.max_staleness, setting.every)
    assert played.dropped < 0.02
    assert found == pytest.approx(played.staleness_mean, abs=0.15)


@pytest.mark.system
def test_the_smallest_bound_that_costs_no_generation() -> None:
    setting = Setting(2, 16, 8, 4, 1, "fifo")
    played, rates = both(setting, 0.2, 0.05, 0.5)
    bound = smallest_bound(rates, 8)
    assert 1 < bound < 2
    assert played.slots_idle < 0.01
    above, _ = both(Setting(2, 16, 8, 2, 1, "fifo"), 0.2, 0.05, 0.5)
    below, _ = both(Setting(2, 16, 8, 1, 1, "fifo"), 0.2, 0.05, 0.5)
    assert above.slots_idle < 0.01 < 0.05 < below.slots_idle
