"""How many episodes an actor plays at once, under `actors.slots: auto`: more while the engine has room, a third less
when it had to take KV cache away from a running request (additive increase, multiplicative decrease).

A preempted request is computed twice. Below that point more requests cost nothing that the engine would notice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from asyncrl.config import Config

FIRST, STEP = 16, 8
"""Slots at the start; slots more at one look."""
FULL = 0.9
"""Share of the KV cache in use from which on nothing grows: what runs grows by itself."""
BACK_OFF = 2 / 3
CALM = 20
"""Looks after a preemption before anything grows again."""


@dataclass(slots=True)
class Slots:
    """`now` is the number; it stays within `low` and `high`."""

    low: int
    high: int
    now: int
    _preempted: float = field(default=0.0, init=False)
    _calm: int = field(default=0, init=False)

    @classmethod
    def of(cls, config: Config) -> Slots:
        most = config.actors.most_slots
        first = min(FIRST, most) if config.actors.slots == "auto" else most
        return cls(1 if config.actors.slots == "auto" else most, most, first)

    def look(self, playing: int, stats: Mapping[str, float]) -> bool:
        """To be called at a steady pace, with the episodes that are played and what the engine says of its load
        (Engine.load_stats). Whether there are more slots than before."""
        before, preempted = self.now, stats.get("preempted", 0.0)
        if preempted > self._preempted:
            self.now, self._calm = max(self.low, int(self.now * BACK_OFF)), CALM
        elif self._calm:
            self._calm -= 1
        elif playing >= self.now and not stats["waiting"] and stats["kv_use"] < FULL:
            self.now = min(self.high, self.now + STEP)
        self._preempted = preempted
        return self.now > before
