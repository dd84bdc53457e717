"""Tickets that no actor holds, and which of them is issued next.

In issue order, and under `wait` earliest deadline first. Tickets that were issued before are limited to as many per
second as one training step takes, so that a dead host's tickets are re-issued within seconds, without a burst.
"""

from __future__ import annotations

from bisect import insort

from asyncrl.buffer.ledger.group import Group
from asyncrl.buffer.ledger.ledger import Ledger
from asyncrl.buffer.rules import Rules
from asyncrl.buffer.staleness import due, last_version
from asyncrl.buffer.tickets.bound_in_force import BoundInForce
from asyncrl.buffer.tickets.carried import Carried
from asyncrl.buffer.tickets.leases import Leases, TicketKey


class IssueQueue:
    def __init__(self, ledger: Ledger, rules: Rules, leases: Leases, carried: Carried, size: int, now: float) -> None:
        self._carried = carried
        self._ledger, self._rules, self._leases, self.bound = ledger, rules, leases, BoundInForce(ledger, rules, leases)
        self._keys: list[TicketKey] = []
        """Sorted. Some are no longer issuable: a late put stored them, or their group was dropped."""
        self._per_s = max(16, rules.groups_per_step * size)  # of the largest group
        self._allowance = float(self._per_s)
        """How many tickets that were issued before may be issued now."""
        self._allowance_at = now
        self.reissued = 0
        """Tickets issued again, since this process began."""

    def add_group(self, group: Group) -> None:
        for index in range(group.size):
            self.add((group.number, index))

    def add(self, key: TicketKey) -> None:
        """Does nothing if the ticket cannot be issued."""
        if self._is_issuable(key):
            insort(self._keys, key)

    def pop(self, now: float, actor: str) -> TicketKey | None:
        """The next ticket to issue to this actor."""
        self._allowance = min(self._per_s, self._allowance + (now - self._allowance_at) * self._per_s)
        self._allowance_at = now
        while self._keys and not self._is_issuable(self._keys[0]):
            del self._keys[0]
        candidates = (key for key in self._keys if self._is_issuable(key) and self._may_get(actor, key))
        if self._rules.over_age == "wait":
            key = min(candidates, key=lambda key: (self.last_version(self._ledger.live[key[0]]), key), default=None)
        else:
            key = next(candidates, None)
        if key is not None:
            self._keys.remove(key)
            self._allowance -= self._was_issued(key)
            self.reissued += self._was_issued(key)
        return key

    def last_version(self, group: Group) -> float:
        """The highest version at which the group still meets the bound, with what its tickets may bring."""
        since = self._ledger.history.version - self.bound.holds
        return last_version(group, self._carried.versions(group, self._leases, since), self.bound.holds)

    def due(self, version: int) -> list[Group]:
        """Under `wait`: the groups that the batch for `version` must hold, complete or not. Otherwise none."""
        if self._rules.over_age != "wait":
            return []
        unused = [g for g in self._ledger.live.values() if g.state in ("in_flight", "waiting") and not g.uses]
        deadlines = [(self.last_version(group), group) for group in unused]
        return due(deadlines, version, self.bound.holds, self._rules.groups_per_step)

    def _may_get(self, actor: str, key: TicketKey) -> bool:
        """Whether the rate allows it and, where groups are scored together, no other actor plays the group."""
        if self._allowance < 1 and self._was_issued(key):
            return False
        return not self._rules.group_scored or all(lease.actor == actor for lease in self._leases.of_group(key[0]))

    def _is_issuable(self, key: TicketKey) -> bool:
        group = self._ledger.live.get(key[0])
        if group is None or group.state != "in_flight":
            return False
        return group.stored[key[1]] is None and self._leases.get(*key) is None

    def _was_issued(self, key: TicketKey) -> bool:
        return self._ledger.live[key[0]].attempts[key[1]] > 0
