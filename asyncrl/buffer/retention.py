"""Which payloads stay on disk.

A payload is reclaimed when its group has ended and the oldest checkpoint kept for resuming covers that end. A segment
is removed once nothing in it is needed. Payloads of skipped batches stay; the oldest are removed first when
`buffer.max_disk_gb` is almost reached.
"""

from __future__ import annotations

from asyncrl.buffer.ledger.database import Database
from asyncrl.buffer.ledger.ledger import Ledger
from asyncrl.buffer.ledger.payloads import Location, PayloadLost
from asyncrl.buffer.ledger.snapshot import NEEDED
from asyncrl.buffer.rules import Rules

ALMOST_FULL = 0.8
"""Share of `buffer.max_disk_gb` from which on the learner writes a checkpoint after every step, to release payloads."""
_SKIPPED = "('guard', 'poison')"


class Retention:
    def __init__(self, ledger: Ledger, rules: Rules) -> None:
        self._ledger = ledger
        self._db: Database = ledger.db
        self._rules = rules

    @property
    def checkpoint_wanted(self) -> bool:
        """The disk is almost full: an early checkpoint releases payloads."""
        return self._db.payloads.disk_bytes >= ALMOST_FULL * self._rules.max_disk_bytes

    @property
    def keep_checkpoints(self) -> int:
        """Number of checkpoints kept for resuming; 2 when the disk is almost full.

        At least 2: a checkpoint gets its final name after it was announced, and until then the one before is needed.
        """
        return 2 if self.checkpoint_wanted else max(2, self._rules.keep_checkpoints)

    def mark(self) -> None:
        """Marks the payloads that no resume needs any more. `sweep` removes the files after the commit."""
        if self._rules.keep_all:
            return
        oldest = self._ledger.history.oldest_checkpoint()
        self._db.write(
            f"UPDATE groups SET payload = 0 WHERE payload = 1 AND ended_batch <= ? AND "
            f"(reason IS NULL OR reason NOT IN {_SKIPPED})",
            (oldest,),
        )
        while self._kept_bytes() >= ALMOST_FULL * self._rules.max_disk_bytes:
            skipped = self._db.read(
                f"SELECT ended_batch FROM groups WHERE payload = 1 AND ended_batch <= ? AND reason IN {_SKIPPED} "
                "ORDER BY ended_batch LIMIT 1",
                (oldest,),
            )
            first = next(iter(skipped), None)
            if first is None:
                return
            self._db.write(f"UPDATE groups SET payload = 0 WHERE ended_batch = ? AND reason IN {_SKIPPED}", (first[0],))

    def sweep(self) -> None:
        """Removes the segments in which nothing is needed. Call it after a commit."""
        payloads = self._db.payloads
        for segment in payloads.segments - self._needed() - {payloads.current}:
            payloads.remove(segment)

    def _needed(self) -> set[int]:
        return {row[0] for row in self._db.read(NEEDED, (-1,))}

    def _kept_bytes(self) -> int:
        """Bytes in the segments that the next sweep leaves."""
        payloads = self._db.payloads
        return sum(payloads.size(segment) for segment in self._needed() | {payloads.current})

    def recover(self) -> int:
        """Removes trajectories whose bytes a power cut took, so that they are generated again; returns how many.

        Only the end of the payloads can be missing: sizes are checked everywhere, contents in the last two segments. A
        trained or assigned group keeps its state, and handing out its batch again raises PayloadLost. A group that was
        trained on and waits for another use ends as trained.
        """
        ends = self._db.read(
            "SELECT t.segment, max(t.start + t.bytes) FROM groups g JOIN trajectories t ON t.grp = g.number "
            "WHERE g.payload = 1 GROUP BY t.segment"
        )
        written = dict(ends)
        cut = {segment for segment, end in written.items() if self._db.payloads.size(segment) < end}
        suspects = cut | set(sorted(written)[-2:])
        lost = 0
        for segment in sorted(suspects):
            for grp, idx, start, size, checksum in list(
                self._db.read(
                    "SELECT t.grp, t.idx, t.start, t.bytes, t.checksum FROM trajectories t "
                    "JOIN groups g ON g.number = t.grp WHERE t.segment = ? AND g.payload = 1",
                    (segment,),
                )
            ):
                try:
                    self._db.payloads.read(Location(segment, start, size, checksum))
                except PayloadLost:
                    lost += self._lose(grp, idx)
        return lost

    def _lose(self, number: int, index: int) -> int:
        group = self._ledger.live.get(number)
        if group is not None and group.state != "assigned":
            if not group.uses:
                self._ledger.lose(group, index)
                return 1
            self._ledger.retire(group)
        self._db.write("UPDATE groups SET payload = 0 WHERE number = ?", (number,))
        return 0
