"""The policy `buffer.over_age: wait`: which groups the next batch must hold so that none of them exceeds the bound."""

from __future__ import annotations

from collections.abc import Callable

from asyncrl.buffer.ledger.group import Group
from asyncrl.buffer.ledger.ledger import Ledger
from asyncrl.buffer.rules import Rules
from asyncrl.buffer.staleness import due
from asyncrl.buffer.tickets.tickets import Tickets


class Deadlines:
    def __init__(self, ledger: Ledger, rules: Rules, tickets: Tickets) -> None:
        self._ledger, self._rules, self._tickets = ledger, rules, tickets
        self._missing_since: dict[int, float] = {}

    def due(self, version: int) -> list[Group]:
        """The groups that the batch for `version` must hold, complete or not; none under other policies."""
        rules = self._rules
        if rules.over_age != "wait":
            return []
        unused = [g for g in self._ledger.live.values() if g.state in ("in_flight", "waiting") and not g.uses]
        deadlines = [(self._tickets.queue.last_version(group), group) for group in unused]
        return due(deadlines, version, rules.max_staleness, rules.groups_per_step)

    def missing(self, now: float, version: int, usable: Callable[[Group], bool]) -> list[Group]:
        """The due groups that are not usable yet. One that was awaited for `buffer.wait_s` is dropped instead."""
        missing = [group for group in self.due(version) if not usable(group)]
        self._missing_since = {group.number: self._missing_since.get(group.number, now) for group in missing}
        overdue = [g for g in missing if now >= self._missing_since[g.number] + self._rules.wait_s]
        for group in overdue:
            self._tickets.drop(group, "wait_deadline", self._rules.requeue)
        return [group for group in missing if group not in overdue]
