"""Complete groups whose rewards the curriculum has not seen yet, whatever became of them since."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from asyncrl.buffer.ledger.group import Group
from asyncrl.buffer.ledger.storage.database import Database


class Unmeasured:
    def __init__(self, database: Database, load: Callable[[int], Group]) -> None:
        self._db = database
        self.groups = [load(number) for number in _numbers(database)]

    def add(self, group: Group) -> None:
        if group.measured is None:
            self.groups.append(group)

    def discard(self, group: Group) -> None:
        """The group is no longer complete."""
        self.groups = [g for g in self.groups if g is not group]

    def take(self) -> list[Group]:
        """All of them, in issue order."""
        taken, self.groups = sorted(self.groups, key=lambda group: group.number), []
        return taken

    def measured(self, group: Group, serial: int) -> None:
        """The curriculum's state `serial` knows the rewards of the group."""
        group.measured = serial
        self._db.write("UPDATE groups SET measured = ? WHERE number = ?", (serial, group.number))

    def forked(self, serial: int, live: Iterable[Group]) -> None:
        """States after `serial` are void: what they measured of the live groups is measured again; of one that has been
        incomplete since, once it is complete."""
        self.groups = [group for group in self.groups if group.reason != "discarded_branch"]
        for group in live:
            if group.measured is not None and group.measured > serial:
                group.measured = None
                self._db.write("UPDATE groups SET measured = NULL WHERE number = ?", (group.number,))
                if group.state != "in_flight":
                    self.groups.append(group)


def _numbers(database: Database) -> list[int]:
    rows = database.read(
        "SELECT number FROM groups g WHERE measured IS NULL AND reason IS NOT 'discarded_branch' "
        "AND (SELECT count(*) FROM trajectories WHERE grp = number) = size"
    )
    return [number for (number,) in rows]
