"""What is fitted to a record equals what made it."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest

from asyncrl.config import Config
from asyncrl.plan.fitting.engine_speed import _features, _Generated, nonnegative
from asyncrl.plan.grid import Asked, Point, front, picked, settings, thinning
from asyncrl.plan.playing.clock import Clock, Cores
from asyncrl.plan.playing.engine import Engine
from asyncrl.plan.playing.outcome import Outcome
from asyncrl.plan.setting import Setting
from asyncrl.plan.times import EngineTimes

BASE = Setting(2, 48, 24, 2, 1, "fifo")


def test_the_speed_of_an_engine_is_found_again() -> None:
    """Turns of the modelled engine under changing load, read as a record is."""
    clock, rng, turns = Clock(), Random(0), []
    times = EngineTimes(0.02, 0.004, 0.0005)
    engine = Engine(clock, Cores(float("inf")), times, 1.0, 0)

    def request(left: int) -> None:
        began, prefilled, sampled = clock.now, rng.randint(0, 60), rng.randint(5, 60)

        def done(_: object) -> None:
            turns.append(_Generated(began, clock.now, sampled, prefilled))
            if left:
                clock.after(rng.expovariate(1.0), lambda: request(left - 1))

        engine.request(prefilled, sampled, done)

    for _ in range(20):
        clock.after(rng.uniform(0, 40), lambda: request(15))
    while clock.next():
        pass
    rows = _features(turns)
    found, left = nonnegative(rows[:, 1:], rows[:, 0])
    assert found == pytest.approx([0.02, 0.004, 0.0005], rel=0.1)
    assert left.std() < 0.1 * rows[:, 0].mean()


def test_no_coefficient_is_negative() -> None:
    features = np.array([[1.0, 0.0], [1.0, 1.0], [1.0, 2.0]])
    found, _ = nonnegative(features, np.array([3.0, 2.0, 1.0]))
    assert found.tolist() == [2.0, 0.0]


def point(setting: Setting, rate: float, staleness: float) -> Point:
    outcome = Outcome(10, 1.0, rate, rate, 0.5, 0.0, staleness, 2, 0.0, 0.0, 0.0, 10, 1.0, 1.0, 0, ())
    return Point(setting, (outcome,))


def test_the_front_holds_what_nothing_beats() -> None:
    a, b, c = (point(replace(BASE, max_staleness=n), rate, s) for n, rate, s in ((0, 1, 0.0), (1, 3, 0.5), (2, 2, 0.9)))
    assert front([c, a, b]) == [b, a]


def test_the_freshest_of_the_fast_ones_is_picked() -> None:
    base, one, two = (
        point(BASE, 100.0, 0.9),
        point(replace(BASE, max_staleness=1), 99.0, 0.5),
        point(replace(BASE, max_staleness=4), 101.0, 1.4),
    )
    assert picked([base, one, two], BASE, Asked({})) is one
    assert picked([base, two], BASE, Asked({})) is base
    slow = point(replace(BASE, max_staleness=1), 90.0, 0.5)
    assert picked([base, slow], BASE, Asked({})) is base, "a tenth slower is too much"


def test_more_actors_and_other_batches_are_picked_only_where_asked_for() -> None:
    more = point(replace(BASE, actors=4), 200.0, 0.9)
    base = point(BASE, 100.0, 0.9)
    assert picked([base, more], BASE, Asked({})) is base
    assert picked([base, more], BASE, Asked({"actors": (2, 4)})) is more


def test_a_grid_is_the_product_of_what_is_given() -> None:
    found = settings(Config(), BASE, Asked({"max_staleness": (0, 1), "actors": (1, 2)}))
    assert len(found) == 5
    assert found[0] == BASE
    assert {(s.actors, s.max_staleness) for s in found[1:]} == {(1, 0), (1, 1), (2, 0), (2, 1)}


def test_a_grid_of_a_tuned_run_plays_it_as_it_is_and_fixed_settings_around_what_it_came_to() -> None:
    config = Config()
    tuned = BASE.tuned(config)
    found = settings(config, tuned, Asked({}, BASE), slots_fixed=True)
    assert found[:2] == [tuned, BASE]
    fixed = [s for s in found if s.tuning == "off"]
    assert {s.max_staleness for s in fixed} == {0, 1, 2, 4, 8}
    assert {s.slots for s in fixed} == {BASE.slots}
    assert {s.actors for s in found if s.tuning == "auto"} == {2, 3, 4}
    tried = settings(config, tuned, Asked({"max_staleness": (1, 3)}, BASE))
    assert tried == [tuned, replace(BASE, max_staleness=1), replace(BASE, max_staleness=3)]
    assert settings(config, BASE, Asked({"tuning": ("off", "auto")})) == [BASE, tuned]


def test_gpus_are_divided_between_actors_and_ranks_and_every_division_may_be_picked() -> None:
    asked = Asked({"max_staleness": (1, 2)}, machines=[(6, 2), (4, 4)])
    found = settings(Config(), BASE, asked)
    assert found[0] == BASE
    assert {(s.actors, s.ranks, s.max_staleness) for s in found[1:]} == {(6, 2, 1), (6, 2, 2), (4, 4, 1), (4, 4, 2)}
    base, more = point(BASE, 100.0, 1.0), point(replace(BASE, actors=6, ranks=2), 200.0, 1.0)
    assert picked([base, more], BASE, Asked({})) is base
    assert picked([base, more], BASE, asked) is more


def test_a_tuned_setting_is_picked_only_where_it_is_recorded_or_asked_for() -> None:
    tuned = point(BASE.tuned(Config()), 200.0, 0.1)
    base = point(BASE, 100.0, 1.0)
    assert picked([base, tuned], BASE, Asked({})) is base
    assert picked([base, tuned], BASE, Asked({"tuning": ("off", "auto")})) is tuned
    assert picked([base, tuned], tuned.setting, Asked({})) is tuned


def test_a_large_system_is_thinned_evenly() -> None:
    assert thinning(Setting(1000, 64, 512, 2, 1, "fifo"), 5.0) == 8
    assert thinning(BASE, 100.0) == 2
    assert thinning(BASE, 0.5) == 1
