"""The bound on staleness that is in force: `buffer.max_staleness`, or what the ends of batches have decided (`auto`).

The one place that says which bound holds. It is decided once, when a batch first ends, and recorded with that batch
(`Decision`); a batch is fixed with its own bound, which every repetition uses. While a batch is open, the decision at
the end of the one before it holds. On a new branch that of the last batch holds which the branch kept.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace

from asyncrl.buffer.bounds.automatic import Auto, decision, in_force, stale_share
from asyncrl.buffer.client.messages import Told
from asyncrl.buffer.ledger.group import Group
from asyncrl.buffer.ledger.ledger import Ledger
from asyncrl.buffer.ledger.records import Batch, Decision, Measures, last_ended, one
from asyncrl.buffer.rules import Rules
from asyncrl.buffer.staleness import must_hold
from asyncrl.buffer.tickets.leases import Leases
from asyncrl.buffer.tickets.slots_in_force import SlotsInForce


class BoundInForce:
    """Changes go through the ledger's open transaction."""

    def __init__(self, ledger: Ledger, rules: Rules, leases: Leases) -> None:
        self._ledger, self._rules = ledger, rules
        self.slots = SlotsInForce(ledger, rules, leases)

    @property
    def admits(self) -> int:
        """S of the admission of new groups."""
        return self._rules.max_staleness if self._rules.auto is None else self._decided(self._rules.auto).target

    @property
    def holds(self) -> int:
        """S of the next batch that is fixed, and of what is dropped for its age until then."""
        return self._rules.max_staleness if self._rules.auto is None else self._decided(self._rules.auto).bound

    def _decided(self, auto: Auto) -> Decision:
        return in_force(auto, last_ended(self._ledger.history.line))

    def fixed(self, batch: Batch, bound: int) -> None:
        """Records the bound of a batch that has just been fixed."""
        batch.bound = bound
        self._ledger.db.write("UPDATE batches SET bound = ? WHERE serial = ?", (bound, batch.serial))

    def ended(self, batch: Batch, told: Told | None, idle: float, last_version: Callable[[Group], float]) -> None:
        """Decides the bound after a batch that has just ended, with what its end told.

        Args:
            idle: share of the slots that admission left without a ticket since the batch before it ended.
            last_version: the highest version at which a group meets the bound that holds now.
        """
        auto = self._rules.auto
        if auto is None:
            return
        if told is not None:
            batch.measures = Measures(told.waited, idle, self._stale(batch), told.ess, told.lr, told.seconds)
        line, unused = self._ledger.history.line, [g for g in self._ledger.live.values() if g.state != "assigned"]
        oldest, issued = min((g.number for g in unused), default=None), one(self._ledger.db, _ISSUED)
        found = decision(auto, line, issued, oldest, True)
        if self._rules.over_age == "wait" and found.bound < batch.bound:
            lasts = [last_version(group) - self.holds + found.bound for group in unused if not group.uses]
            version, per_step = batch.version_after, self._rules.groups_per_step
            in_time = min(lasts, default=version) >= version
            in_time = in_time and must_hold(lasts, version, found.bound, per_step) <= per_step
            found = decision(auto, line, issued, oldest, in_time)
        self._record(batch, found)
        self.slots.ended(batch)

    def taken_over(self, batch: Batch, former: Batch) -> None:
        """A branch has repeated `former`, which a fork released: what was decided at its end holds again."""
        batch.measures = former.measures
        if former.decision is not None:
            self._record(batch, replace(former.decision))
        self.slots.taken_over(batch, former)

    def _record(self, batch: Batch, found: Decision) -> None:
        batch.decision = found
        measures = None if batch.measures is None else json.dumps(asdict(batch.measures))
        self._ledger.db.write(
            "UPDATE batches SET measures = ?, target = ?, next_bound = ?, since = ?, why = ? WHERE serial = ?",
            (measures, found.target, found.bound, found.since, found.why, batch.serial),
        )

    def _stale(self, batch: Batch) -> float:
        """Share of the groups that ended while the batch was filled which were dropped as stale."""
        stale = int(one(self._ledger.db, _STALE, (batch.b, batch.branch)))
        return stale_share(stale, batch.first_uses)


_ISSUED = "SELECT coalesce(max(number), -1) + 1 FROM groups"
_STALE = "SELECT count(*) FROM groups WHERE reason = 'stale' AND ended_batch = ? AND ended_branch = ?"
