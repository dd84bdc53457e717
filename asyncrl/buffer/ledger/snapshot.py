"""The buffer's part of a checkpoint: the ledger as it is now, and the payloads that a resume from it needs.

A thread writes it, on a connection of its own whose read transaction begins here: what is committed meanwhile is not in
it, and nobody waits for it.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

from asyncrl.buffer.ledger.database import Database, LedgerFailed

NEEDED = (
    "SELECT DISTINCT t.segment FROM groups g JOIN trajectories t ON t.grp = g.number "
    "WHERE g.payload = 1 AND (g.ended_batch IS NULL OR g.ended_batch > ?)"
)
"""Segments that hold a payload, unless the end of its group is covered by a checkpoint at this batch number."""


class Snapshot:
    """Of the committed `database`, for a learner that resumes at `batch`, into `path`/buffer; begins at once.

    Nothing may be appended and not committed. No segment may be removed before it is done.
    """

    def __init__(self, database: Database, incarnation: int, batch: int, path: Path) -> None:
        self.key = (incarnation, batch, path)
        self._path, self._batch = path, batch
        self._payloads = database.payloads
        try:
            self._payloads.seal()  # a segment that is never written again can be linked
            self._source = sqlite3.connect(database.path, isolation_level=None, check_same_thread=False)
            self._source.execute("BEGIN")
            self._source.execute("SELECT count(*) FROM kv").fetchone()  # from here on it sees no commit
        except (OSError, sqlite3.Error) as error:
            raise self._failed(error) from error
        thread = ThreadPoolExecutor(1, "snapshot")
        self._writing = thread.submit(self._write)
        thread.shutdown(wait=False)

    @property
    def done(self) -> bool:
        return self._writing.done()

    def result(self) -> None:
        """Waits until it is done. Raises LedgerFailed."""
        try:
            self._writing.result()
        except (OSError, sqlite3.Error) as error:
            raise self._failed(error) from error

    def _write(self) -> None:
        target = self._path / "buffer"
        with closing(self._source):
            shutil.rmtree(target, ignore_errors=True)
            for folder in (target, target / "payloads"):
                folder.mkdir()  # without parents: a checkpoint that was given up stays away
            with closing(sqlite3.connect(target / "ledger.sqlite")) as copy:
                self._source.backup(copy)
            for segment in self._needed():
                source = self._payloads.path(segment)
                copied = target / "payloads" / source.name
                try:
                    os.link(source, copied)
                except OSError:
                    shutil.copy2(source, copied)

    def _needed(self) -> Iterator[int]:
        for (segment,) in self._source.execute(NEEDED, (self._batch,)):
            yield segment

    def _failed(self, error: Exception) -> LedgerFailed:
        return LedgerFailed(
            f"the ledger could not be written into the checkpoint {self._path}: {error}. Free space or fix the rights."
        )
