"""Adjusts how many episodes an actor plays at once (`actors.slots: auto`): more while the engine has room, a third less
when it had to take KV cache away from a running request (additive increase, multiplicative decrease).

A preempted request is computed twice. Below that point additional requests cost the engine next to nothing.

Under `launch.tuning: auto` the buffer says with each reply how many tickets the actor may hold; then the limit begins
at the maximum, and the smaller of the two counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from asyncrl.config import Config

FIRST, STEP = 16, 8
"""Slots at the start; slots added at one adjustment."""
FULL = 0.9
"""Share of the KV cache in use above which no slots are added: running requests still need room to grow."""
BACK_OFF = 2 / 3
CALM = 20
"""Adjustments after a preemption before slots are added again."""


@dataclass(slots=True)
class Concurrency:
    """`limit` is the number of episode slots that the engine has room for; it stays within `low` and `high`."""

    low: int
    high: int
    limit: int
    told: int | None = None
    """What the buffer said last; None: it leaves the number to the actor."""
    _preempted: float = field(default=0.0, init=False)
    _calm: int = field(default=0, init=False)

    @classmethod
    def of(cls, config: Config) -> Concurrency:
        most = config.actors.most_slots
        first = min(FIRST, most) if config.actors.slots == "auto" and config.launch.tuning == "off" else most
        return cls(1 if config.actors.slots == "auto" else most, most, first)

    @property
    def slots(self) -> int:
        return self.limit if self.told is None else min(self.limit, self.told)

    def free(self, busy: int) -> int:
        """Slots left when `busy` are in use."""
        return max(0, self.slots - busy)

    def adjust(self, playing: int, stats: Mapping[str, float]) -> bool:
        """Adjust the limit to `playing`, the episodes in progress, and the engine's load (Engine.load_stats). Called at
        a steady pace. Returns whether the limit grew."""
        before, preempted = self.limit, stats.get("preempted", 0.0)
        if preempted > self._preempted:
            self.limit, self._calm = max(self.low, int(self.slots * BACK_OFF)), CALM
        elif self._calm:
            self._calm -= 1
        elif playing >= self.limit and not stats["waiting"] and stats["kv_use"] < FULL:
            self.limit = min(self.high, self.limit + STEP)
        self._preempted = preempted
        return self.limit > before
