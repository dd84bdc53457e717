"""The buffer's part of a checkpoint: the ledger as it is now, and the payloads that a resume from it needs.

A thread writes it, on a connection of its own, in a read transaction that begins when the snapshot is made: later
commits are not in it and do not wait for it. `restore` reads it back when the ledger's host was lost: what was recorded
after that checkpoint is gone, so the learner's next start begins a new branch.
"""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

from asyncrl.buffer.ledger.chain import Chain
from asyncrl.buffer.ledger.database import Database, LedgerFailed

NEEDED = (
    "SELECT DISTINCT t.segment FROM groups g JOIN trajectories t ON t.grp = g.number "
    "WHERE g.payload = 1 AND (g.ended_batch IS NULL OR g.ended_batch > ?)"
)
"""Segments that hold a payload whose group has not ended, or ended after a checkpoint at this batch number."""


class Snapshot:
    """Writes the committed `database` into `path`/buffer, for a learner that resumes at `batch`; begins at once.

    Everything appended must be committed. No segment may be removed before the snapshot is done.
    """

    def __init__(self, database: Database, incarnation: int, batch: int, path: Path) -> None:
        self.key = (incarnation, batch, path)
        self._path, self._batch = path, batch
        self._payloads = database.payloads
        try:
            self._payloads.seal()  # a segment that is never written again can be linked
            self.covered = self._payloads.current - 1
            """The last segment that it covers."""
            self._source = sqlite3.connect(database.path, isolation_level=None, check_same_thread=False)
            self._source.execute("BEGIN")
            self._source.execute("SELECT count(*) FROM kv").fetchone()  # fixes what the transaction sees
        except (OSError, sqlite3.Error) as error:
            raise self._failed(error) from error
        thread = ThreadPoolExecutor(1, "snapshot")
        self._writing = thread.submit(self._write)
        thread.shutdown(wait=False)

    @property
    def done(self) -> bool:
        return self._writing.done()

    def result(self) -> None:
        """Waits until the snapshot is done. Raises LedgerFailed."""
        try:
            self._writing.result()
        except (OSError, sqlite3.Error) as error:
            raise self._failed(error) from error

    def _write(self) -> None:
        target = self._path / "buffer"
        with closing(self._source):
            shutil.rmtree(target, ignore_errors=True)
            for folder in (target, target / "payloads"):
                folder.mkdir()  # without parents: a checkpoint that was removed is not created again
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


def restore(checkpoints: Path, folder: Path) -> Path | None:
    """Fills `folder` from the newest complete checkpoint if it has no ledger; returns the checkpoint.

    None if there is a ledger already, or no checkpoint (a new run). Raises LedgerFailed if it cannot be copied.
    """
    if (folder / "ledger.sqlite").exists():
        return None
    complete = [p for p in checkpoints.glob("step-*") if (p / "state.json").is_file() and (p / "buffer").is_dir()]
    if not complete:
        return None
    newest = max(complete, key=lambda p: (_place(p), p.name))
    unfinished = folder / ".restoring.sqlite"
    try:
        shutil.rmtree(folder / "payloads", ignore_errors=True)
        (folder / "payloads").mkdir(parents=True)
        for segment in sorted((newest / "buffer" / "payloads").iterdir()):
            try:
                os.link(segment, folder / "payloads" / segment.name)
            except OSError:
                shutil.copy2(segment, folder / "payloads" / segment.name)
        shutil.copy2(newest / "buffer" / "ledger.sqlite", unfinished)
        with closing(sqlite3.connect(unfinished)) as db, db:
            chain, change = Chain(db), ("INSERT OR REPLACE INTO kv VALUES (?, ?)", ("restored", str(newest)))
            db.execute(*change)
            chain.note(*change)
            chain.seal()
        unfinished.rename(folder / "ledger.sqlite")  # last: a ledger that exists is complete
    except (OSError, sqlite3.Error) as error:
        raise LedgerFailed(
            f"{newest}/buffer cannot be restored into {folder}: {error}. Free space or fix the rights."
        ) from error
    return newest


def _place(checkpoint: Path) -> tuple[int, int]:
    state = json.loads((checkpoint / "state.json").read_text())
    return state["branch"], state["batch"]
