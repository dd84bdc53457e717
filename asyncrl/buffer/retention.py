"""Which payloads stay on disk, and the copy of the ledger that every checkpoint carries.

A payload is reclaimed when its group has ended and the oldest checkpoint kept for resuming covers that end. A segment
goes once nothing in it is needed. Payloads of skipped batches stay, oldest removed first within `buffer.max_disk_gb`.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from asyncrl.buffer.database import Database, LedgerFailed
from asyncrl.buffer.ledger import Ledger
from asyncrl.buffer.payloads import Location, PayloadLost
from asyncrl.buffer.rules import Rules

_SKIPPED = "('guard', 'poison')"


class Retention:
    def __init__(self, ledger: Ledger, rules: Rules) -> None:
        self._ledger = ledger
        self._db: Database = ledger.db
        self._rules = rules

    @property
    def checkpoint_wanted(self) -> bool:
        """80% of the disk's allowance is used: an early checkpoint lets payloads go."""
        return self._db.payloads.disk_bytes >= 0.8 * self._rules.max_disk_bytes

    def snapshot(self, path: Path, batch: int) -> None:
        """Writes `path`/buffer: the committed ledger, and the payloads needed by a learner that resumes at `batch`."""
        target = path / "buffer"
        shutil.rmtree(target, ignore_errors=True)
        try:
            (target / "payloads").mkdir(parents=True)
            self._db.payloads.seal()
            self._db.snapshot(target / "ledger.sqlite")
            for segment in self._needed(covered=batch):
                source = self._db.payloads.path(segment)
                copy = target / "payloads" / source.name
                try:
                    os.link(source, copy)  # sealed, so never written again: a link costs nothing
                except OSError:
                    shutil.copy2(source, copy)
        except OSError as error:
            raise LedgerFailed(
                f"the ledger could not be written into the checkpoint {path}: {error}. Free space or fix the rights."
            ) from error

    def mark(self) -> None:
        """Notes what no resume needs any more. The files go in `sweep`, after the commit."""
        if self._rules.keep_all:
            return
        oldest = self._ledger.history.oldest_checkpoint()
        self._db.write(
            f"UPDATE groups SET payload = 0 WHERE payload = 1 AND ended_batch <= ? AND "
            f"(reason IS NULL OR reason NOT IN {_SKIPPED})",
            (oldest,),
        )
        if self.checkpoint_wanted:
            self._db.write(
                f"UPDATE groups SET payload = 0 WHERE payload = 1 AND ended_batch <= ? AND reason IN {_SKIPPED}",
                (oldest,),
            )

    def sweep(self) -> None:
        """Removes the segments in which nothing is needed. Call it when everything is committed."""
        payloads = self._db.payloads
        for segment in payloads.segments - self._needed() - {payloads.current}:
            payloads.remove(segment)

    def _needed(self, covered: int = -1) -> set[int]:
        """Segments that hold a payload, unless the end of its group is covered by a checkpoint at batch `covered`."""
        rows = self._db.read(
            "SELECT DISTINCT t.segment FROM groups g JOIN trajectories t ON t.grp = g.number "
            "WHERE g.payload = 1 AND (g.ended_batch IS NULL OR g.ended_batch > ?)",
            (covered,),
        )
        return {row[0] for row in rows}

    def recover(self) -> int:
        """After opening: trajectories whose bytes a power cut took are taken out, so that they are generated again.

        Gives how many. Only the end of the payloads can be missing: sizes are checked everywhere, contents in the last
        segment. A trained or assigned group keeps its state; handing out its batch once more then raises PayloadLost.
        """
        ends = self._db.read(
            "SELECT t.segment, max(t.start + t.bytes) FROM groups g JOIN trajectories t ON t.grp = g.number "
            "WHERE g.payload = 1 GROUP BY t.segment"
        )
        written = dict(ends)
        cut = {segment for segment, end in written.items() if self._db.payloads.size(segment) < end}
        suspects = cut | ({max(written)} if written else set())
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
            self._ledger.lose(group, index)
            return 1
        self._db.write("UPDATE groups SET payload = 0 WHERE number = ?", (number,))
        return 0
