"""Which actor holds which ticket until when. Terms are kept in memory only; the ledger records the attempts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from asyncrl.trajectory import Lease, TicketId

TicketKey = tuple[int, int]
"""(group, index)"""


@dataclass(slots=True)
class ActiveLease:
    id: TicketId
    attempt: int
    actor: str
    min_version: int
    """The oldest version that a token of this attempt may have."""
    expires: float
    eval: bool = False

    @property
    def key(self) -> TicketKey:
        return self.id.group, self.id.index

    def is_of(self, lease: Lease, actor: str) -> bool:
        """Whether `actor` holds exactly this attempt."""
        return (self.id, self.attempt, self.actor) == (*lease, actor)


class Leases:
    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._active: dict[TicketKey, ActiveLease] = {}
        self._per_group: dict[int, set[int]] = {}
        self.evals: Counter[str] = Counter()
        """By actor: how many evaluation tickets it holds."""
        self.of: Counter[str] = Counter()
        """By actor: how many tickets it holds."""

    def __len__(self) -> int:
        return len(self._active)

    def __iter__(self) -> Iterator[ActiveLease]:
        return iter(list(self._active.values()))

    def get(self, group: int, index: int) -> ActiveLease | None:
        return self._active.get((group, index))

    def add(self, now: float, id: TicketId, attempt: int, actor: str, min_version: int, eval: bool = False) -> None:
        self.remove(id.group, id.index)
        self.of[actor] += 1
        if eval:
            self.evals[actor] += 1
        self._active[id.group, id.index] = ActiveLease(id, attempt, actor, min_version, now + self._lease_s, eval)
        self._per_group.setdefault(id.group, set()).add(id.index)

    def remove(self, group: int, index: int) -> ActiveLease | None:
        lease = self._active.pop((group, index), None)
        if lease is not None:
            self.of[lease.actor] -= 1
            if not self.of[lease.actor]:
                del self.of[lease.actor]
            if lease.eval:
                self.evals -= Counter((lease.actor,))  # without those that hold none
            self._per_group[group].discard(index)
            if not self._per_group[group]:
                del self._per_group[group]
        return lease

    def of_group(self, group: int) -> list[ActiveLease]:
        return [self._active[group, index] for index in sorted(self._per_group.get(group, ()))]

    def renew(self, now: float, actor: str, leases: Iterable[Lease]) -> list[Lease]:
        """Renews leases for a full term; returns those that this actor no longer holds."""
        revoked = []
        for lease in leases:
            ticket, _ = lease
            active = self._active.get((ticket.group, ticket.index))
            if active is None or not active.is_of(lease, actor):
                revoked.append(lease)
            else:
                active.expires = now + self._lease_s
        return revoked

    def extend(self, seconds: float) -> None:
        """Gives every lease so much more time."""
        for lease in self._active.values():
            lease.expires += seconds

    def expired(self, now: float) -> list[ActiveLease]:
        return [lease for lease in self._active.values() if lease.expires <= now]
