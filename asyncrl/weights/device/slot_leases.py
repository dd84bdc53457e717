"""Which slots may be written, and which reader has which leased: decided without devices or clocks.

A version stays unchanged while a reader has its slot leased. A reader that has not released it when the lease ends may
have died: the slot is written again, and the reader learns at its release that what it read may be torn.

With two slots readers lease the newest version while the next one is written. A single slot takes half of the memory:
it is written in place once nobody reads it, and while its writer waits nobody new may lease it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class SlotLease:
    slot: int
    generation: int
    """Number of the publication in it."""
    until: float


class SlotLeases:
    """
    >>> leases = SlotLeases(slots=2, lease_s=10.0)
    >>> leases.commit(leases.begin(now=0.0))
    >>> leases.lease("actor-0", now=0.0).slot
    0
    >>> leases.commit(leases.begin(now=1.0))  # the other slot
    >>> leases.begin(now=2.0) is None  # one is the newest, the other is leased
    True
    >>> leases.release("actor-0")
    True
    >>> leases.begin(now=3.0)
    0
    """

    def __init__(self, slots: int, lease_s: float) -> None:
        self._generation = [0] * slots
        self._written = 0
        self._lease_s = lease_s
        self._leases: dict[str, SlotLease] = {}
        self._awaited = False
        """The only slot is waited for by its writer."""
        self.newest: int | None = None

    def begin(self, now: float) -> int | None:
        """A slot that may be written now; None if all others are leased. There is no newest while the only one is."""
        leased = {lease.slot for lease in self._leases.values() if lease.until > now}
        only = len(self._generation) == 1
        for slot in range(len(self._generation)):
            if slot not in leased and (only or slot != self.newest):
                self._written += 1
                self._generation[slot] = self._written
                self.newest = None if only else self.newest
                return slot
        self._awaited = only
        return None

    def commit(self, slot: int | None) -> None:
        """Mark `slot` as complete and the newest."""
        self.newest, self._awaited = slot, False

    def lease(self, reader: str, now: float) -> SlotLease | None:
        """Lease the newest slot to `reader` for `lease_s`, in place of what it had. None if there is none, or while its
        writer waits for it."""
        self._leases.pop(reader, None)
        if self.newest is None or self._awaited:
            return None
        lease = SlotLease(self.newest, self._generation[self.newest], now + self._lease_s)
        self._leases[reader] = lease
        return lease

    def of(self, reader: str) -> SlotLease | None:
        """The lease of `reader`, if its slot has not been written since."""
        lease = self._leases.get(reader)
        return lease if lease is not None and lease.generation == self._generation[lease.slot] else None

    def release(self, reader: str) -> bool:
        """End the lease. False if the slot was written meanwhile, so that what was read may be torn."""
        intact = self.of(reader) is not None
        self._leases.pop(reader, None)
        return intact

    def prolong(self, reader: str, now: float) -> None:
        """Let its lease last for another `lease_s`: it has been heard."""
        if (lease := self.of(reader)) is not None:
            self._leases[reader] = replace(lease, until=now + self._lease_s)

    def curtail(self, reader: str, lease: SlotLease, until: float) -> None:
        """Let this lease end at `until` at the latest, unless it has been prolonged or replaced since."""
        if self._leases.get(reader) is lease:
            self._leases[reader] = replace(lease, until=min(lease.until, until))

    def drop(self, reader: str, lease: SlotLease) -> None:
        """End this lease, whose reader will not read; not another one that the reader has got since."""
        if self._leases.get(reader) is lease:
            del self._leases[reader]
