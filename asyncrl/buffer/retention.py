"""Which payloads stay on disk.

A payload is reclaimed when its group has ended and the oldest checkpoint kept for resuming covers that end. A segment
is removed once nothing in it is needed. Payloads of skipped batches stay; the oldest are removed first when
`buffer.max_disk_gb` is almost reached.
"""

from __future__ import annotations

from asyncrl.buffer.ledger import checkpoints
from asyncrl.buffer.ledger.ledger import Ledger
from asyncrl.buffer.ledger.storage.database import Database
from asyncrl.buffer.ledger.storage.snapshot import NEEDED
from asyncrl.buffer.rules import Rules

ALMOST_FULL = 0.8
"""Share of `buffer.max_disk_gb` from which on the learner writes a checkpoint after every step, to release payloads."""
ROOM_FOR_TURNS = 0.75
"""Share of `buffer.max_disk_gb` up to which recorded turns are stored: below ALMOST_FULL, so that they alone bring
neither early checkpoints nor an end of new groups."""
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
        oldest = checkpoints.oldest(self._ledger.db)
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
