"""Sums of the seconds that episodes spend in environments and tools, by name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

MOST = 50
"""Names of one actor; further ones are counted as `other`, since names come from users' code."""
OTHER = "other"


@dataclass(slots=True)
class Spent:
    """How often something was used, and for how many seconds altogether, by name."""

    times: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, seconds: float, times: int = 1) -> None:
        """Count `times` uses that took `seconds` altogether.

        >>> spent = Spent()
        >>> spent.add("web search", 2.0)
        >>> spent.times, spent.seconds
        ({'web_search': 1}, {'web_search': 2.0})
        """
        name = re.sub(r"[^\w.:-]", "_", name, flags=re.ASCII)[:64] or "_"
        if name not in self.times and len(self.times) >= MOST:
            name = OTHER
        self.times[name] = self.times.get(name, 0) + times
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def merge(self, other: Spent) -> None:
        for name, times in other.times.items():
            self.add(name, other.seconds[name], times)

    def series(self, times: str, seconds: str) -> Iterator[tuple[str, float]]:
        """Values of two families of series, `times`/NAME and `seconds`/NAME."""
        for name, count in self.times.items():
            yield f"{times}/{name}", float(count)
            yield f"{seconds}/{name}", self.seconds[name]
