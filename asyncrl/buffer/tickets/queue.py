"""Tickets that nobody holds, and which of them is lent next.

In issue order, and under `wait` earliest deadline first; those lent before only as fast as one training step takes per
second, so that a host that died is made good in seconds, and never by an avalanche.
"""

from __future__ import annotations

import heapq

from asyncrl.buffer.ledger.group import Group
from asyncrl.buffer.ledger.ledger import Ledger
from asyncrl.buffer.rules import Rules
from asyncrl.buffer.staleness import last_version
from asyncrl.buffer.tickets.leases import Key, Leases


class FreeTickets:
    def __init__(self, ledger: Ledger, rules: Rules, leases: Leases, largest_group: int, now: float) -> None:
        self._ledger = ledger
        self._rules = rules
        self._leases = leases
        self._keys: list[Key] = []
        """A heap. Some are not free any more: a late put stored them, or their group was dropped."""
        self._per_s = max(16, rules.groups_per_step * largest_group)
        self._allowance = float(self._per_s)
        """Of tickets lent before."""
        self._allowance_at = now
        self.reissued = 0
        """Tickets lent again, since this process began."""

    def offer_all(self, group: Group) -> None:
        for index in range(group.size):
            self.offer((group.number, index))

    def offer(self, key: Key) -> None:
        """To be lent, if it is free."""
        if self._is_free(key):
            heapq.heappush(self._keys, key)

    def take(self, now: float, actor: str) -> Key | None:
        """The next to lend to this actor."""
        self._allowance = min(self._per_s, self._allowance + (now - self._allowance_at) * self._per_s)
        self._allowance_at = now
        while self._keys and not self._is_free(self._keys[0]):
            heapq.heappop(self._keys)
        key = min(self._usable(actor), key=self._urgency, default=None)
        if key is None:
            return None
        if key == self._keys[0]:
            heapq.heappop(self._keys)
        else:
            self._keys.remove(key)
            heapq.heapify(self._keys)
        self._allowance -= self._lent_before(key)
        self.reissued += self._lent_before(key)
        return key

    def last_version(self, group: Group) -> int | None:
        """The highest at which it still meets the bound; None: nothing ties it to a version yet."""
        leased = [lease.min_version for lease in self._leases.of_group(group.number)]
        return last_version(group, leased, self._rules.max_staleness)

    def _usable(self, actor: str) -> list[Key]:
        rules, again = self._rules, self._allowance >= 1
        first_will_do = again and rules.over_age != "wait" and not rules.together
        keys = [
            key
            for key in (self._keys[:1] if first_will_do else self._keys)
            if self._is_free(key) and (again or not self._lent_before(key))
        ]
        if rules.together:
            return [key for key in keys if all(lease.actor == actor for lease in self._leases.of_group(key[0]))]
        return keys

    def _is_free(self, key: Key) -> bool:
        group = self._ledger.live.get(key[0])
        return (
            group is not None
            and group.state == "in_flight"
            and group.stored[key[1]] is None
            and self._leases.get(*key) is None
        )

    def _urgency(self, key: Key) -> tuple[float, ...]:
        if self._rules.over_age != "wait":
            return key
        last = self.last_version(self._ledger.live[key[0]])
        return (float("inf") if last is None else last, *key)

    def _lent_before(self, key: Key) -> bool:
        return self._ledger.live[key[0]].attempts[key[1]] > 0
