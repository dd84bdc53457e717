"""Which slots may be written, and who reads which: decided without devices or clocks.

A version stays as it is while somebody reads it. A reader that has not given back when its time is over may have died:
its slot is written again, and should it live, it is told that what it read may be torn.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Loan:
    slot: int
    generation: int
    """How often the slot had been written."""
    until: float


class Lending:
    """
    >>> lending = Lending(slots=2, lease_s=10.0)
    >>> lending.commit(lending.begin(now=0.0))
    >>> lending.lend("actor-0", now=0.0).slot
    0
    >>> lending.commit(lending.begin(now=1.0))  # the other slot
    >>> lending.begin(now=2.0) is None  # one is the newest, the other is read
    True
    >>> lending.give_back("actor-0")
    True
    >>> lending.begin(now=3.0)
    0
    """

    def __init__(self, slots: int, lease_s: float) -> None:
        self._generation = [0] * slots
        self._lease_s = lease_s
        self._loans: dict[str, Loan] = {}
        self.newest: int | None = None

    def begin(self, now: float) -> int | None:
        """A slot that may be written now; None: all are read."""
        read = {loan.slot for loan in self._loans.values() if loan.until > now}
        for slot in range(len(self._generation)):
            if slot != self.newest and slot not in read:
                self._generation[slot] += 1
                return slot
        return None

    def commit(self, slot: int | None) -> None:
        """`slot` is complete, and the newest."""
        self.newest = slot

    def lend(self, reader: str, now: float) -> Loan | None:
        """The newest, until `lease_s` from now; what the reader had is given back. None: there is none."""
        self._loans.pop(reader, None)
        if self.newest is None:
            return None
        loan = Loan(self.newest, self._generation[self.newest], now + self._lease_s)
        self._loans[reader] = loan
        return loan

    def lent(self, reader: str) -> Loan | None:
        """What `reader` has, as far as it is still what it was."""
        loan = self._loans.get(reader)
        return loan if loan is not None and loan.generation == self._generation[loan.slot] else None

    def give_back(self, reader: str) -> bool:
        """Whether it was, all the time, what was lent."""
        whole = self.lent(reader) is not None
        self._loans.pop(reader, None)
        return whole
