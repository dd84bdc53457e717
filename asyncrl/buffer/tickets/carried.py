"""What the attempts at a ticket leave to the next one: under `buffer.turns`, recorded turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from asyncrl.buffer.ledger.group import Group
from asyncrl.buffer.ledger.storage.database import Database
from asyncrl.buffer.retention import ROOM_FOR_TURNS
from asyncrl.buffer.rules import Rules
from asyncrl.buffer.tickets.leases import Leases, TicketKey
from asyncrl.buffer.tickets.lengths import Lengths
from asyncrl.buffer.tickets.turns import Turns
from asyncrl.trajectory import Ticket, Trajectory
from asyncrl.trajectory.turns import DIVERGED, NOT_SCORED, Recorded

GIVEN_UP = ("aborted", "timeout", NOT_SCORED)
"""Reasons of failures after which the episode goes on at its turn: none is said by the environment."""
CARRIED_AT_ONCE = 32 << 20
"""Bytes of recorded turns from which no further ticket is issued in the same reply."""


@dataclass(frozen=True, slots=True)
class Beginning:
    """What a ticket that is issued brings along."""

    turns: tuple[Recorded, ...]
    oldest: int
    """Oldest version that a token of the attempt may have."""


class Carried:
    def __init__(self, db: Database, rules: Rules) -> None:
        self.turns = Turns(db, ROOM_FOR_TURNS * rules.max_disk_bytes)
        self._before = 0
        """`carried_bytes` when the latest reply was begun."""
        self._db, self._durable, auto_s = db, rules.durable, rules.turns_auto_s
        self._lengths = None if auto_s is None else Lengths(db, auto_s, rules.lease_s)
        self._masks = rules.over_age == "mask"
        """Tokens past the bound carry no loss: recorded turns may have them."""

    def begin(self, group: Group) -> None:
        """A new group: whether its episodes' turns are recorded is fixed."""
        group.durable = self._durable if self._lengths is None else self._lengths.decide(group)
        if group.durable or group.lengths is not None:
            values = (group.durable, group.lengths, group.number)
            self._db.write("UPDATE groups SET durable = ?, lengths = ? WHERE number = ?", values)

    def for_attempt(self, key: TicketKey, version: int, published: int, bound: int) -> Beginning:
        """`version`: the learner's; `published`: that the actor holds at least; `bound`: on staleness, in force."""
        turns, oldest = self.turns.for_attempt(key, version, float("inf") if self._masks else bound)
        return Beginning(turns, published if oldest is None else min(published, oldest))

    def fills(self, tickets: Sequence[Ticket]) -> bool:
        """Whether these tickets, all that were issued for one reply, carry so much that no other fits into it."""
        if not tickets:
            self._before = self.turns.carried_bytes
        return self.turns.carried_bytes - self._before >= CARRIED_AT_ONCE

    def versions(self, group: Group, leases: Leases, since: int) -> list[int]:
        """Oldest versions that the tickets of a group may bring: those of its leases, and of what the tickets carry
        that nobody holds, unless that is older than `since` and ends when it is issued."""
        held = {lease.id.index: lease.min_version for lease in leases.of_group(group.number)}
        ages = [self.turns.oldest((group.number, index)) for index in range(group.size) if index not in held]
        free = [age for age in ages if age is not None and age >= since]
        return [*held.values(), *free]

    def ended(self, key: TicketKey, attempt: int, group: Group | None) -> None:
        """An attempt has ended without a trajectory."""
        if self._lengths is not None and group is not None:
            self._lengths.ended(group, key[1], attempt)

    def received(self, trajectory: Trajectory, group: Group) -> None:
        """A trajectory is stored: what its ticket carried ends."""
        if self._lengths is not None:
            self._lengths.stored(group, trajectory)
        self.turns.received(trajectory)

    def failed(self, key: TicketKey, reason: str) -> None:
        """An episode failed: its ticket begins again, but recorded turns stay where the actor gave the episode up."""
        if reason in GIVEN_UP:
            return
        self.turns.end(key, "diverged" if reason == DIVERGED else "failed")

    def drop(self, number: int, size: int) -> None:
        """Ends what the tickets of a group carry."""
        self.turns.drop(number, size)

    def forked(self, version: int, live: Mapping[int, Group], size: int) -> None:
        """A branch has begun at `version`: later tokens are of weights that it does not have. `live`: the groups that
        go on. `size`: of the largest group."""
        for number in self.groups() - live.keys():
            self.drop(number, size)
        self.turns.forked(version)

    def groups(self) -> set[int]:
        """Numbers of the groups whose tickets carry anything."""
        return self.turns.groups()
