"""The places of `buffer.capacity`, and used groups that yield theirs to new ones (`buffer.replay`).

Without replay a group keeps its places until its last possible use is assigned. With it the new groups alone decide
whether another one is issued, as if `buffer.max_uses` were 1: a group gives its places back at its first use, and waits
for another one in places that no new group needs. Where the capacity or the disk would refuse a new group, the oldest
used ones end as trained.
"""

from __future__ import annotations

from asyncrl.buffer.ledger.group import Group
from asyncrl.buffer.ledger.ledger import Ledger
from asyncrl.buffer.ledger.records import one
from asyncrl.buffer.ledger.replays import retire
from asyncrl.buffer.retention import ALMOST_FULL
from asyncrl.buffer.rules import Rules
from asyncrl.data.group_sizes import GroupSizes

_LIVE_BYTES = (
    "SELECT coalesce(sum(t.bytes), 0) FROM groups g JOIN trajectories t ON t.grp = g.number WHERE g.state IN "
    "('in_flight', 'waiting', 'assigned')"
)


class Places:
    def __init__(self, ledger: Ledger, rules: Rules, sizes: GroupSizes) -> None:
        self._ledger, self._rules, self._sizes = ledger, rules, sizes
        self.yielded = 0
        """Used groups that ended to make room, since this process began."""

    def taken(self) -> int:
        """Trajectories that count against the capacity: those of groups in flight, and of groups that may still be used
        after the open batch."""
        if self._rules.replay is not None:
            return sum(g.size for g in self._ledger.live.values() if g.state != "assigned")
        last = self._rules.max_uses - 1
        if last or self._sizes.smallest < self._sizes.largest:
            return sum(g.size for g in self._ledger.live.values() if g.state != "assigned" or g.uses < last)
        return self._ledger.account.count("in_flight", "waiting") * self._rules.group_size

    def why_full(self) -> str:
        """Why there is no room for a new group, after used ones have yielded; empty: there is."""
        rules, payloads = self._rules, self._ledger.db.payloads
        self.make_room(self._sizes.largest)
        if self.taken() + self._sizes.largest > rules.capacity:
            return f"capacity: {self.taken()} of {rules.capacity} trajectories are in flight or waiting"
        if payloads.disk_bytes >= rules.max_disk_bytes:
            return f"disk: the payloads reach buffer.max_disk_gb = {rules.max_disk_bytes / 1e9:g}"
        return ""

    def make_room(self, more: int = 0) -> None:
        """Used groups yield until `more` trajectories fit, and until the disk has room once a checkpoint releases what
        has ended."""
        if self._rules.replay is None:
            return
        excess = self.taken() + more - self._rules.capacity
        surplus = self._surplus_bytes()
        for group in self._oldest_first() if excess > 0 or surplus > 0 else ():
            if excess <= 0 and surplus <= 0:
                return
            excess -= group.size
            surplus -= sum(r.location.bytes for r in group.trajectories)
            retire(self._ledger, group, "yielded")
            self.yielded += 1

    def _surplus_bytes(self) -> float:
        """Of the live groups, beyond what leaves the disk less than almost full; all of them when it is full. The bytes
        of a group that ends are there until a checkpoint covers its end."""
        disk, most = self._ledger.db.payloads.disk_bytes, self._rules.max_disk_bytes
        if disk < ALMOST_FULL * most:
            return 0.0
        live = float(one(self._ledger.db, _LIVE_BYTES))
        return live if disk >= most else live - ALMOST_FULL * most

    def _oldest_first(self) -> list[Group]:
        """Used groups that wait."""
        used = [g for g in self._ledger.live.values() if g.state == "waiting" and g.uses]
        return sorted(used, key=lambda g: (g.oldest or 0, g.number))
