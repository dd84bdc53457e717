"""Calibration finds the speed that made the recorded seconds, near saturation too."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from random import Random

import pytest

from asyncrl.config import Config
from asyncrl.plan.calibrate import System, between, calibrated
from asyncrl.plan.fitting.fit import Fit
from asyncrl.plan.playing.simulate import Length
from asyncrl.plan.setting import Setting, domains
from asyncrl.plan.times import EngineTimes, Episode, LearnerTimes, Measured, Times, Turn

LENGTH = Length(3, 8)


@pytest.mark.parametrize(("off", "slower"), [(0.4, 1.0), (1.6, 1.0), (0.99, 1.1), (1.01, 1.1)])
def test_the_speeds_are_found_again(off: float, slower: float) -> None:
    """Of the engine and of the step, which is `slower` than the fit says, whichever of the two is nearly right."""
    config = Config.model_validate(
        {"actors": {"slots": 16}, "learner": {"groups_per_step": 4, "group_size": 4}, "buffer": {"capacity": 64}}
    )
    system, setting, rng = System(config, domains(config, 1)), Setting.of(config), Random(0)
    turns = [tuple(Turn(0, rng.randint(5, 20), rng.expovariate(2)) for _ in range(2)) for _ in range(200)]
    groups = [tuple(Episode("e", t, 0.0, 60, 1, 1.0, "done") for t in turns[i : i + 4]) for i in range(0, 200, 4)]
    true = Times(groups, EngineTimes(0.0, 0.0012, 0.0), LearnerTimes(0.1, 0, 0, 0, 0, 0), 0.0, 0.0, 0.0, 0.0)
    _, world = system.play(true, setting, LENGTH, 0)
    turn, step = (total / count for total, count in (world.generated, world.trained))
    measured = Measured(None, None, None, turn, slower * step, 1, 1, 1)
    fit = Fit(replace(true, engine=true.engine.scaled(off)), measured, 0.0)
    found = calibrated(fit, system, setting, LENGTH)
    _, again = system.play(found, setting, LENGTH, 0)
    assert again.trained[0] / again.trained[1] == pytest.approx(slower * step, rel=0.1)
    assert again.generated[0] / again.generated[1] == pytest.approx(turn, rel=0.05)
    assert found.engine.per_request_s == pytest.approx(true.engine.per_request_s, rel=0.1)


def test_a_scale_stays_between_those_that_were_tried() -> None:
    assert between(3.0, 1.0, 8.0) == 3.0
    assert between(9.0, 2.0, 8.0) == 4.0
    assert between(0.5, 0.0, 1.0) == 0.5
    assert between(1.01, 1.0, inf) == 1.01
    assert between(0.99, 0.0, 1.0) == 0.99
