"""Prefixes: what interrupted attempts have sampled, kept with their tickets until a trajectory continues them.

    handed back ──> kept ──> continued   a trajectory begins with it
                       ├──> longer      an attempt that continued it was interrupted too, and handed back more
                       ├──> stale       its oldest token is past the bound: the ticket is issued without it
                       ├──> anew        a trajectory came that does not begin with it
                       ├──> failed      an episode that continued it failed
                       ├──> discarded_branch    a branch began before a version of its tokens
                       └──> dropped     its group was dropped

    handed back = kept + continued + longer + stale + anew + failed + discarded_branch + dropped

An attempt that continues a prefix may have tokens as old as the prefix: the ledger records it with that version.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal

from asyncrl.buffer.ledger.storage.database import Database
from asyncrl.buffer.record import join, split
from asyncrl.buffer.tickets.leases import TicketKey
from asyncrl.trajectory import Row, Trajectory
from asyncrl.wire import decode_prefix, encode_row

End = Literal["continued", "longer", "stale", "anew", "failed", "discarded_branch", "dropped"]
USED = ("continued", "longer")


@dataclass(frozen=True, slots=True)
class _KeptPrefix:
    attempt: int
    """The attempt that handed it back."""
    sampled: int
    """Number of sampled tokens."""
    oldest: int
    """Oldest version among them."""
    newest: int


class Prefixes:
    """Changes go through the ledger's open transaction."""

    def __init__(self, db: Database) -> None:
        self._db = db
        rows = db.read("SELECT grp, idx, attempt, sampled, oldest, newest FROM prefixes WHERE ended IS NULL")
        self._kept = {(group, index): _KeptPrefix(*about) for group, index, *about in rows}
        ended = db.read("SELECT ended, count(*), sum(sampled) FROM prefixes WHERE ended IS NOT NULL GROUP BY 1")
        self.counts: Counter[str] = Counter()
        """All that were ever handed back, by how they ended; `kept`: they have not."""
        self.counts["kept"] = len(self._kept)
        self.wasted = 0
        """Sampled tokens that are in no trajectory."""
        for how, count, sampled in ended:
            self.counts[how] = count
            self.wasted += 0 if how in USED else sampled

    def store(self, key: TicketKey, attempt: int, prefix: Row) -> None:
        """Keeps what an interrupted attempt hands back."""
        sampled = prefix.versions[prefix.mask]
        self.end(key, "longer" if self._begins(key, prefix) else "anew")
        kept = _KeptPrefix(attempt, len(sampled), int(sampled.min()), int(sampled.max()))
        row = join(encode_row(prefix))
        self._db.write(
            "INSERT INTO prefixes VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, NULL)",
            (*key, attempt, len(prefix), kept.sampled, kept.oldest, kept.newest, prefix.digest(), row),
        )
        self._kept[key] = kept
        self.counts["kept"] += 1

    def for_attempt(self, key: TicketKey, version: int, max_staleness: int) -> tuple[Row, int] | None:
        """The prefix of a ticket that is issued and its oldest version, unless that is past the bound by now."""
        kept = self._kept.get(key)
        if kept is None:
            return None
        if version - kept.oldest > max_staleness:
            self.end(key, "stale")
            return None
        return self._row(key, kept), kept.oldest

    def oldest(self, key: TicketKey) -> int | None:
        """The oldest version among the tokens of a ticket's prefix."""
        kept = self._kept.get(key)
        return None if kept is None else kept.oldest

    def received(self, trajectory: Trajectory) -> None:
        """A trajectory is stored: the prefix of its ticket ends. An attempt before the one that handed it back cannot
        have continued it, even where it sampled the same."""
        key = trajectory.id.group, trajectory.id.index
        if (kept := self._kept.get(key)) is not None:
            continued = trajectory.attempt >= kept.attempt and self._begins(key, trajectory.rows[0])
            self.end(key, "continued" if continued else "anew")

    def end(self, key: TicketKey, how: End) -> None:
        """Does nothing if the ticket has no prefix."""
        kept = self._kept.pop(key, None)
        if kept is not None:
            self._db.write(
                "UPDATE prefixes SET ended = ?, row = NULL WHERE grp = ? AND idx = ? AND attempt = ?",
                (how, *key, kept.attempt),
            )
            self.counts["kept"] -= 1
            self.counts[how] += 1
            self.wasted += 0 if how in USED else kept.sampled

    def drop(self, group: int, size: int) -> None:
        """Ends all prefixes of a group."""
        if self._kept:
            for index in range(size):
                self.end((group, index), "dropped")

    def forked(self, version: int) -> None:
        """A branch has begun at `version`: prefixes with later tokens end."""
        for key, kept in list(self._kept.items()):
            if kept.newest > version:
                self.end(key, "discarded_branch")

    def groups(self) -> set[int]:
        """Numbers of the groups that have a prefix."""
        return {group for group, _ in self._kept}

    def _begins(self, key: TicketKey, row: Row) -> bool:
        kept = self._kept.get(key)
        return kept is not None and row.begins_with(self._row(key, kept))

    def _row(self, key: TicketKey, kept: _KeptPrefix) -> Row:
        where = "WHERE grp = ? AND idx = ? AND attempt = ?"
        (record,) = next(iter(self._db.read(f"SELECT row FROM prefixes {where}", (*key, kept.attempt))))
        return decode_prefix(split(record))
