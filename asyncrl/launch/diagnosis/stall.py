"""Decides when a run counts as stalled, and when to act on it. Pure: time is an argument.

progress ──> watching ── stall_s without progress ──> "report": say who waits for whom, write all stacks
                ▲                                        │ the stacks are written
                └── progress came meanwhile ─────────────┴──> "act": what `launch.on_stall` says; watch again
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

PROGRESS = frozenset({"ready", "step", "eval", "checkpoint", "published"})
"""Kinds of events that count as progress."""


@dataclass(slots=True)
class StallWatch:
    """
    >>> watch = StallWatch(stall_s=120.0, progress=0.0)
    >>> watch.look(120.0), watch.look(121.0)
    (None, 'report')
    >>> watch.look(125.0, reporting=True), watch.look(130.0)
    (None, 'act')
    """

    stall_s: float
    progress: float
    """Time of the last progress, or of the last action."""
    _reported: float | None = None
    """The `progress` of the stall that was reported and not yet acted on."""

    def note(self, now: float, events: Iterable[str]) -> None:
        """Takes note of events, by kind, that have just come."""
        if any(kind in PROGRESS for kind in events):
            self.progress = now

    def look(self, now: float, *, reporting: bool = False) -> Literal["report", "act"] | None:
        """What is due. `reporting`: the stacks of a reported stall are still being written."""
        if self._reported is None:
            if now - self.progress <= self.stall_s:
                return None
            self._reported = self.progress
            return "report"
        if reporting:
            return None
        still_stalled, self._reported = self._reported == self.progress, None
        if not still_stalled:
            return None
        self.progress = now
        return "act"
