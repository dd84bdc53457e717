"""Decides what follows when a process of the run has ended. Pure: time is an argument."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from asyncrl.process.logs import CONFIG_ERROR, RUN_ERROR


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the run ended."""

    kind: str
    """"finished", "interrupted" or "failed"."""
    exit_code: int
    why: str = ""


@dataclass(slots=True)
class RestartBudget:
    """At most `restarts` restarts within a sliding window.

    >>> budget = RestartBudget(restarts=2, window_s=10.0)
    >>> budget.take(0.0), budget.take(1.0), budget.take(2.0), budget.take(10.5)
    (True, True, False, True)
    """

    restarts: int
    window_s: float
    _taken: deque[float] = field(default_factory=deque)

    def take(self, now: float) -> bool:
        while self._taken and now - self._taken[0] > self.window_s:
            self._taken.popleft()
        if len(self._taken) >= self.restarts:
            return False
        self._taken.append(now)
        return True


def after_exit(role: str, code: int, why: str, budget: RestartBudget, now: float) -> Outcome | None:
    """The outcome of the run; None: start the role again. `code` is subprocess's return code, `why` the last error in
    the log."""
    if role == "learner" and code == 0:
        return Outcome("finished", 0)
    if code == CONFIG_ERROR:
        return Outcome("failed", 2, why)
    if code == RUN_ERROR:
        return Outcome("failed", 1, f"{role}: {why}")
    if budget.take(now):
        return None
    return Outcome(
        "failed",
        1,
        f"{role} died more than {budget.restarts} times within {budget.window_s:g} s (launch.restarts, "
        f"launch.restart_window_s), the last time: {why}",
    )
