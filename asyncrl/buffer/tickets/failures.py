"""The budget of failures: how many of the latest attempts at episodes may fail; and whether all of them do.

An outage is never a reward. Without a budget, a run whose environment is down would go through its tasks and drop each.
"""

from __future__ import annotations

from collections import deque

from asyncrl.buffer.rules import Rules
from asyncrl.user_errors import Cause

ATTEMPTS = 20
"""Attempts that must all fail in the same way."""
ATTEMPTS_IN_ANY_WAY = 100
"""Attempts that must all fail where they do so in several ways: a score may raise at another line for each row."""
OUTAGE_S = 60.0
"""Seconds for which an outage must last to count."""


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


class AllFail:
    """Judges the first attempts since this process began: when all fail in the same way, or many in whatever ways, no
    later one will succeed."""

    def __init__(self) -> None:
        """
        >>> every = AllFail()
        >>> for _ in range(20):
        ...     every.failed(Cause("KeyError at score.py:3"), "KeyError: 'answer' (score.py, line 3, in score)")
        >>> every.verdict.partition(". ")[0]
        "the first 20 episodes all failed in the same way: KeyError: 'answer' (score.py, line 3, in score)"
        """
        self.verdict = ""
        """Why the run ends; empty while it does not."""
        self._over = False
        """Whether an attempt has succeeded."""
        self._places: set[str] = set()
        """The ways in which attempts failed."""
        self._failed = 0
        self._outage_since: float | None = None
        self._last: tuple[bool, str] = (False, "")

    def succeeded(self) -> None:
        self._over = True

    def failed(self, cause: Cause | None, detail: str) -> None:
        """Notes a failed attempt. One without a cause (an actor stopped, an episode took too long) does not count."""
        if cause is None or self._over:
            return
        # What does not answer is reported in many ways.
        place = "outage" if cause.outage else cause.place
        self._last = (cause.outage, detail)
        self._failed += 1
        if self._failed <= ATTEMPTS_IN_ANY_WAY:
            self._places.add(place)
        if not cause.outage:
            self.look(0.0)  # at once: what is tried until the next look fails for good, and with it an evaluation

    def look(self, now: float) -> None:
        """Decides; how long an outage lasts is known only here."""
        outage, detail = self._last
        if self._over or self.verdict or not self._failed:
            return
        if outage and self._outage_since is None:
            self._outage_since = now
        same = len(self._places) == 1
        if self._failed < (ATTEMPTS if same else ATTEMPTS_IN_ANY_WAY) or (
            outage and now < (self._outage_since or 0.0) + OUTAGE_S
        ):
            return
        lasting = f" for {OUTAGE_S:g} s" if outage else ""
        self.verdict = (
            f"the first {self._failed} episodes all failed {'in the same way' if same else 'in several ways'}{lasting}"
            f"{'' if same else '; the last one'}: {detail[:1200]}. Correct it and continue with --resume; "
            "env.on_failures warn goes on all the same."
        )


class Failures:
    """Judges failed attempts in both ways, as `env.on_failures` says."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self.budget = FailureBudget(rules.max_failures, rules.failure_window)
        self.all_fail = AllFail()

    @property
    def verdict(self) -> str:
        """Why the run ends: all episodes fail, or too many under `env.on_failures: stop`. Empty while it does not."""
        all_fail = self.all_fail.verdict if self._rules.stop_if_all_fail else ""
        return (self.budget.exceeded if self._rules.stop_on_failures else "") or all_fail
