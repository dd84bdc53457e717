"""Who holds which ticket until when. Clocks live here, in memory; the ledger knows the attempts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from asyncrl.trajectory import TicketId

Key = tuple[int, int]
"""(group, index)"""


@dataclass(slots=True)
class Lease:
    id: TicketId
    attempt: int
    actor: str
    min_version: int
    expires: float
    eval: bool = False


class Leases:
    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._held: dict[Key, Lease] = {}
        self._per_group: dict[int, set[int]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[Lease]:
        return iter(list(self._held.values()))

    def get(self, group: int, index: int) -> Lease | None:
        return self._held.get((group, index))

    def add(self, now: float, id: TicketId, attempt: int, actor: str, min_version: int, eval: bool = False) -> None:
        self._held[id.group, id.index] = Lease(id, attempt, actor, min_version, now + self._lease_s, eval)
        self._per_group.setdefault(id.group, set()).add(id.index)

    def remove(self, group: int, index: int) -> Lease | None:
        lease = self._held.pop((group, index), None)
        if lease is not None:
            self._per_group[group].discard(index)
            if not self._per_group[group]:
                del self._per_group[group]
        return lease

    def of_group(self, group: int) -> list[Lease]:
        return [self._held[group, index] for index in sorted(self._per_group.get(group, ()))]

    def renew(self, now: float, actor: str, held: Iterable[tuple[TicketId, int]]) -> list[tuple[TicketId, int]]:
        """A full term for each; gives those that this actor does not hold any more."""
        revoked = []
        for id, attempt in held:
            lease = self._held.get((id.group, id.index))
            if lease is None or (lease.id, lease.attempt, lease.actor) != (id, attempt, actor):
                revoked.append((id, attempt))
            else:
                lease.expires = now + self._lease_s
        return revoked

    def expired(self, now: float) -> list[Lease]:
        return [lease for lease in self._held.values() if lease.expires <= now]
