"""Makes the played times of the recorded setting equal the recorded ones. Pure.

What was fitted holds for the cores that a role had in the recorded run, and in a play roles that share cores slow each
other down again. So the speed of the engine and of the step is scaled until a play of the recorded setting shows the
mean seconds of a turn and of a step that the record has. Nothing else is adjusted: seconds per step, staleness and
drops of the recorded setting are what the play makes of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

from asyncrl.buffer.rules import Rules
from asyncrl.config import Config
from asyncrl.plan.fitting.fit import Fit
from asyncrl.plan.playing.clock import Clock
from asyncrl.plan.playing.outcome import Outcome
from asyncrl.plan.playing.simulate import Joins, Length, Play
from asyncrl.plan.playing.world import Modelled
from asyncrl.plan.setting import Setting, rules_of
from asyncrl.plan.times import Domain, Times

ROUNDS = 9
_NEAR = 0.02
_MOST = 4.0
"""Largest factor of one round."""


@dataclass(frozen=True, slots=True)
class System:
    """What does not change from setting to setting: config, and who shares cores."""

    config: Config
    domains: Sequence[Domain]

    @property
    def threads(self) -> tuple[int, int]:
        return self.config.actors.threads, self.config.learner.threads

    def rules(self, setting: Setting) -> Rules:
        return rules_of(self.config, setting)

    def play(
        self, times: Times, setting: Setting, length: Length, seed: int, joins: Joins | None = None
    ) -> tuple[Outcome, Modelled]:
        """Raises ConfigError for a setting that the config's rules refuse."""
        worlds: list[Modelled] = []

        def world(clock: Clock) -> Modelled:
            worlds.append(Modelled(clock, times, self.domains, Random(seed), self.threads))
            return worlds[0]

        played = Play(
            self.rules(setting), setting, world, length,
            checkpoint_every=self.config.learner.checkpoint_every, renew_s=self.config.buffer.lease_s / 3, joins=joins,
        ).run()  # fmt: skip
        return played, worlds[0]


def calibrated(fit: Fit, system: System, setting: Setting, length: Length, seed: int = 0) -> Times:
    """The fitted times, scaled to the recorded setting.

    Near saturation the seconds of a turn change far more than the engine's speed does. So a scale is taken only between
    those that were too slow and too fast already, and the one that came nearest is kept.
    """
    best, nearest = fit.times, float("inf")
    engine, learner, low, high = 1.0, 1.0, 0.0, float("inf")
    for _ in range(ROUNDS):
        times = replace(fit.times, engine=fit.times.engine.scaled(engine), learner=fit.times.learner.scaled(learner))
        played, world = system.play(times, setting, length, seed)
        turn, step = (total / max(1.0, count) for total, count in (world.generated, world.trained))
        faster, sooner = _factor(fit.measured.generate_s, turn), _factor(fit.measured.compute_s, step)
        off = max(abs(math.log(faster)), abs(math.log(sooner)))
        if off < nearest and not played.stuck:
            best, nearest = times, off
        if nearest < _NEAR:
            break
        low, high = (low, engine) if faster < 1 else (engine, high)
        engine, learner = between(engine * faster, low, high), learner * sooner
    return best


def between(wanted: float, low: float, high: float) -> float:
    """`wanted` where it lies well between the two, else their geometric mean. 0 and inf stand for no bound: on that
    side, `wanted` is taken.

    >>> between(3.0, 1.0, 8.0), between(9.0, 2.0, 8.0), between(0.5, 0.0, 1.0), between(1.01, 1.0, math.inf)
    (3.0, 4.0, 0.5, 1.01)
    """
    bounded = low > 0 and math.isfinite(high)
    return wanted if not bounded or low * 1.02 < wanted < high / 1.02 else math.sqrt(low * high)


def _factor(measured: float, played: float) -> float:
    return min(_MOST, max(1 / _MOST, measured / played)) if measured > 0 and played > 0 else 1.0
