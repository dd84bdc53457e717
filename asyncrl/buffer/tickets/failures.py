"""The budget of failures: how many of the latest attempts at episodes may fail in their environment.

An outage is never a reward. Without a budget, a run whose environment is down would go through its tasks and drop each.
"""

from __future__ import annotations

from collections import deque


class FailureBudget:
    """Judges the last `window` attempts since this process began, once there are that many."""

    def __init__(self, max_share: float, window: int) -> None:
        """
        >>> budget = FailureBudget(0.5, 2)
        >>> for detail in ("tool f: away", "", "tool g: away", "tool h: away"):
        ...     budget.note(detail)
        >>> budget.exceeded
        '2 of the last 2 episodes failed in their environment (env.max_failures is 0.5); the last one: tool h: away'
        """
        self._max_share, self._window = max_share, window
        self._ends: deque[bool] = deque(maxlen=window)
        self._last = ""

    def note(self, failure: str) -> None:
        """Notes how an attempt ended: why it failed, or an empty text."""
        self._ends.append(bool(failure))
        self._last = failure or self._last

    @property
    def share(self) -> float:
        """Share of the latest attempts that failed."""
        return sum(self._ends) / len(self._ends) if self._ends else 0.0

    @property
    def exceeded(self) -> str:
        """Why the budget is exceeded; empty while it is not."""
        if len(self._ends) < self._window or self.share <= self._max_share:
            return ""
        return (
            f"{sum(self._ends)} of the last {self._window} episodes failed in their environment (env.max_failures is "
            f"{self._max_share:g}); the last one: {self._last[:300]}"
        )
