"""How long episodes take, and whether that is long enough to record their turns (`buffer.turns: auto`).

An attempt counts when its trajectory is stored, with the seconds that its episode took, in whichever attempts. One
that ends otherwise counts if it had lasted longer than the limit by the buffer's clock, since the buffer was opened at
the earliest, or else nothing would ever be recorded where no episode comes to its end. The last `WINDOW` of an
environment decide for the groups of it that are issued: their turns are recorded if the 90th percentile is above the
limit. The ledger has each in order, and with each group how many there were then: the audit decides again.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable

from asyncrl.buffer.ledger.group import Group
from asyncrl.buffer.ledger.storage.database import Database
from asyncrl.trajectory import Trajectory, episode_seconds

WINDOW = 100
LEAST = 10
"""Attempts without which nothing is recorded."""


def long_enough(seconds: Iterable[float], limit: float) -> bool:
    """Whether the 90th percentile of these times, the last of one environment, is above the limit.

    >>> long_enough([90.0, 80.0] + [5.0] * 8, 60.0), long_enough([90.0] + [5.0] * 9, 60.0)
    (True, False)
    >>> long_enough([90.0] * 9, 60.0)
    False
    """
    times = list(seconds)
    return len(times) >= LEAST and 10 * sum(each > limit for each in times) > len(times)


class Lengths:
    """Changes go through the ledger's open transaction."""

    def __init__(self, db: Database, limit: float, lease_s: float) -> None:
        """`limit`: `buffer.turns_auto_s`. `lease_s`: for that long nobody may have been heard of an attempt that ends
        without a trajectory; it does not count."""
        self._db, self._limit, self._lease_s = db, limit, lease_s
        self._opened_at = db.wall_clock()
        """Before it the buffer was down, and nobody can say for how long an attempt went on."""
        self._recent: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=WINDOW))
        self._count = 0
        """Rows so far."""
        for env, seconds in db.read(
            "SELECT task_env, seconds FROM lengths JOIN groups ON number = grp ORDER BY serial"
        ):
            self._recent[env].append(seconds)
            self._count += 1

    def decide(self, group: Group) -> bool:
        """Whether the turns of a group that is issued are recorded."""
        group.lengths = self._count
        return long_enough(self._recent[group.task_env], self._limit)

    def stored(self, group: Group, trajectory: Trajectory) -> None:
        self._add(group, trajectory.id.index, trajectory.attempt, episode_seconds(trajectory))

    def ended(self, group: Group, index: int, attempt: int) -> None:
        """An attempt has ended without a trajectory."""
        where = "WHERE grp = ? AND idx = ? AND attempt = ?"
        rows = self._db.read(f"SELECT issued_at FROM attempts {where}", (group.number, index, attempt))
        for (issued_at,) in list(rows):
            seconds = self._db.wall_clock() - max(issued_at, self._opened_at) - self._lease_s
            if seconds > self._limit:
                self._add(group, index, attempt, seconds)

    def _add(self, group: Group, index: int, attempt: int, seconds: float) -> None:
        values = (self._count, group.number, index, attempt, seconds)
        self._db.write("INSERT INTO lengths VALUES (?, ?, ?, ?, ?)", values)
        self._recent[group.task_env].append(seconds)
        self._count += 1
