"""The slots in force: how many tickets an actor may hold, as the ends of batches have decided (`launch.tuning: auto`).

As the bound on staleness (bound_in_force.py), it is decided once, when a batch first ends, and recorded with that batch
(`Tuned`). Actors learn it with each reply to a request for tickets. One that holds more keeps them, and gets no others.
"""

from __future__ import annotations

from dataclasses import replace

from asyncrl.buffer.bounds.slots import slots_after
from asyncrl.buffer.ledger.ledger import Ledger
from asyncrl.buffer.ledger.records import Batch, Tuned, last_ended
from asyncrl.buffer.rules import Rules
from asyncrl.buffer.tickets.leases import Leases


class SlotsInForce:
    """Changes go through the ledger's open transaction."""

    def __init__(self, ledger: Ledger, rules: Rules, leases: Leases) -> None:
        self._ledger, self._rules, self._leases = ledger, rules, leases

    @property
    def number(self) -> int | None:
        """Tickets that one actor may hold; None: as many as it asks for."""
        limits = self._rules.tuning
        if limits is None:
            return None
        last = last_ended(self._ledger.history.line)
        return limits.within(limits.start if last is None or last.tuned is None else last.tuned.slots)

    def left(self, actor: str) -> int | None:
        """Further tickets that this actor may get now; None: as many as it asks for."""
        number = self.number
        return None if number is None else max(0, number - self._leases.of[actor])

    def ended(self, batch: Batch) -> None:
        """Decides the slots after a batch that has just ended, which has what was measured."""
        limits = self._rules.tuning
        if limits is not None:
            slots, why = slots_after(limits, self._ledger.history.line)
            self._record(batch, Tuned(slots, self._ledger.attempts, why))

    def taken_over(self, batch: Batch, former: Batch) -> None:
        """A branch has repeated `former`: what was decided at its end holds again, from now on."""
        if former.tuned is not None:
            self._record(batch, replace(former.tuned, lent=self._ledger.attempts))

    def _record(self, batch: Batch, tuned: Tuned) -> None:
        batch.tuned = tuned
        self._ledger.db.write(
            "UPDATE batches SET slots = ?, slots_why = ?, lent = ? WHERE serial = ?",
            (tuned.slots, tuned.why, tuned.lent, batch.serial),
        )
