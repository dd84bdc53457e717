"""A virtual clock with events, and cores that several workers share. Pure: nothing waits."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count
from typing import Protocol

from asyncrl.buffer.in_process import VirtualClock


class Clock(VirtualClock):
    """Time jumps from event to event; those of one time happen in the order in which they were planned."""

    def __init__(self) -> None:
        super().__init__()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    def after(self, seconds: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._numbers), do))

    def next(self) -> bool:
        """Lets the next event happen. Returns whether there was one."""
        if not self._events:
            return False
        self.now, _, do = heapq.heappop(self._events)
        do()
        return True


class Worker(Protocol):
    """What works at a speed that others change."""

    def settle(self) -> None:
        """Count the work done until now, at the speed that held since the last call."""

    def plan(self) -> None:
        """Plan the end of the work that is next, at the speed that holds from now on."""


class Cores:
    """Every worker has full speed while all together ask for no more cores than there are, else all slow down alike."""

    def __init__(self, cores: float) -> None:
        self._cores = cores
        self._busy: dict[Worker, float] = {}
        self.speed = 1.0

    def ask(self, worker: Worker, cores: float) -> None:
        """From now on `worker` uses so many cores; 0: none. It has settled before, and plans afterwards."""
        if self._busy.get(worker, 0.0) == cores:
            return
        if cores:
            self._busy[worker] = cores
        else:
            self._busy.pop(worker, None)
        speed = min(1.0, self._cores / max(sum(self._busy.values()), 1e-9))
        if speed != self.speed:
            others = [each for each in self._busy if each is not worker]
            for each in others:
                each.settle()
            self.speed = speed
            for each in others:
                each.plan()


class Task:
    """Work of a known length, one at a time: the learner's step."""

    def __init__(self, clock: Clock, cores: Cores, uses: float) -> None:
        """`uses`: cores that it asks for."""
        self._clock, self._cores, self._uses = clock, cores, uses
        self._left, self._since = 0.0, 0.0
        self._done: Callable[[], None] = lambda: None
        self._serial = 0

    def begin(self, seconds: float, done: Callable[[], None]) -> None:
        """`done` happens after `seconds` at full speed."""
        self._left, self._since, self._done = seconds, self._clock.now, done
        self._cores.ask(self, self._uses)
        self.plan()

    def settle(self) -> None:
        self._left = max(0.0, self._left - (self._clock.now - self._since) * self._cores.speed)
        self._since = self._clock.now

    def plan(self) -> None:
        self._serial += 1
        serial = self._serial
        self._clock.after(self._left / self._cores.speed, lambda: self._end(serial))

    def _end(self, serial: int) -> None:
        if serial == self._serial:
            self.settle()
            self._left = 0.0
            self._cores.ask(self, 0.0)
            self._done()
