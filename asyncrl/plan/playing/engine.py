"""One engine on the virtual clock: continuous batching as processor sharing.

With n requests in flight each gets a token every `step_s(n)` seconds. So the engine needs one number, the tokens that a
request in flight since the beginning would have by now (its age); a request ends when the age has grown by its tokens.
Tokens to be prefilled stop the age until they are computed, as a new version does while it is loaded.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count

from asyncrl.plan.playing.clock import Clock, Cores
from asyncrl.plan.times import EngineTimes

Versions = list[tuple[int, int]]
"""(policy version, tokens sampled by it), oldest first."""

_NEAR = 1e-6
"""Tokens below which a request is over."""


class Engine:
    def __init__(self, clock: Clock, cores: Cores, times: EngineTimes, uses: float, version: int) -> None:
        """`uses`: cores that it asks for while a request is in flight. `version`: the weights that it begins with."""
        self._clock, self._cores, self._times, self._uses = clock, cores, times, uses
        self._age, self._stalled, self._since = 0.0, 0.0, 0.0
        self._requests: list[tuple[float, int, float, int, Callable[[Versions], None]]] = []
        """By the age at which each ends."""
        self._numbers = count()
        self._serial = 0
        self._loaded: list[tuple[float, int]] = [(0.0, version)]
        """Age at which each version was taken over."""
        self.busy_s = 0.0

    @property
    def version(self) -> int:
        return self._loaded[-1][1]

    def request(self, prefilled: int, sampled: int, done: Callable[[Versions], None]) -> None:
        """`done` gets the versions that sampled the tokens."""
        self.settle()
        self._stalled += prefilled * self._times.prefill_s
        heapq.heappush(self._requests, (self._age + sampled, next(self._numbers), self._age, sampled, done))
        self._cores.ask(self, self._uses)
        self.plan()

    def load(self, version: int, pause_s: float) -> None:
        """Tokens from now on are sampled by `version`."""
        self.settle()
        self._stalled += pause_s if self._requests else 0.0
        self._loaded.append((self._age, version))
        self.plan()

    def settle(self) -> None:
        passed, self._since = self._clock.now - self._since, self._clock.now
        if not self._requests or passed <= 0:
            return
        self.busy_s += passed
        worked = passed * self._cores.speed
        stalled = min(self._stalled, worked)
        self._stalled -= stalled
        self._age += (worked - stalled) / max(self._times.step_s(len(self._requests)), 1e-12)

    def plan(self) -> None:
        self._serial += 1
        if not self._requests:
            return
        serial = self._serial
        left = max(0.0, self._requests[0][0] - self._age) * self._times.step_s(len(self._requests))
        self._clock.after((self._stalled + left) / self._cores.speed, lambda: self._end(serial))

    def _end(self, serial: int) -> None:
        """The requests whose tokens are all sampled."""
        if serial != self._serial:
            return
        self.settle()
        over = []
        self._age = max(self._age, self._requests[0][0] - _NEAR)  # rounding must not plan the same end for ever
        while self._requests and self._requests[0][0] <= self._age + _NEAR:
            over.append(heapq.heappop(self._requests))
        if not self._requests:
            self._stalled = 0.0
            self._cores.ask(self, 0.0)
        self.plan()
        for _, _, began, sampled, done in over:
            done(self._sampled_by(began, sampled))

    def _sampled_by(self, began: float, sampled: int) -> Versions:
        """The versions of `sampled` tokens since the age `began`."""
        versions: Versions = []
        end = sampled
        for age, version in reversed(self._loaded):
            before = min(end, max(0, int(age - began))) if age > began else 0
            if end > before:
                versions.append((version, end - before))
            end = before
            if not end:
                break
        return versions[::-1] or [(self.version, 0)]
