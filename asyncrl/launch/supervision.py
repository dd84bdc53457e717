"""What to do when a process of the run has ended, and what to say when nothing goes on. Pure: time is an argument."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from asyncrl.launch.logs import CONFIG_ERROR, RUN_ERROR


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the run ended."""

    kind: str
    """finished, interrupted, failed."""
    exit_code: int
    why: str = ""


@dataclass(slots=True)
class RestartBudget:
    """So many restarts within a sliding window.

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
    """None: start it again. `code` as subprocess gives it; `why` is what its log says last."""
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


def who_waits(waits: Mapping[str, tuple[str, str, float]], roles: Mapping[str, bool]) -> str:
    """One line: every role, what it waits for, on whom, for how long. `roles`: by name, whether it is ready.

    >>> who_waits({"learner": ("batch", "actor-0", 130.2)}, {"learner": True, "actor-0": False})
    'learner waits for batch (actor-0) since 130 s; actor-0 is still starting'
    """
    parts = []
    for role, ready in roles.items():
        if role in waits:
            cause, on, seconds = waits[role]
            parts.append(f"{role} waits for {cause}{f' ({on})' if on else ''} since {seconds:.0f} s")
        else:
            parts.append(f"{role} works" if ready else f"{role} is still starting")
    return "; ".join(parts)
