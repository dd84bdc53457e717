"""The buffer's part of a checkpoint: the ledger as it is now, and the payloads that a resume from it needs.

A thread writes it, on a connection of its own, in a read transaction that begins when the snapshot is made: later
commits are not in it and do not wait for it. `restore` reads it back when the ledger's host was lost: what was recorded
after that checkpoint is gone, so the learner's next start begins a new branch, with a number that was never given.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

from asyncrl.buffer.ledger.storage import schema
from asyncrl.buffer.ledger.storage.branches import GIVEN, noted
from asyncrl.buffer.ledger.storage.chain import Chain
from asyncrl.buffer.ledger.storage.database import Database, LedgerFailed

log = logging.getLogger(__name__)

NEEDED = (
    "SELECT DISTINCT t.segment FROM groups g JOIN trajectories t ON t.grp = g.number "
    "WHERE g.payload = 1 AND (g.ended_batch IS NULL OR g.ended_batch > ?1) "
    "UNION SELECT s.segment FROM groups g JOIN scores s ON s.grp = g.number "
    "WHERE g.payload = 1 AND (g.ended_batch IS NULL OR g.ended_batch > ?1) "
    "UNION SELECT segment FROM turns WHERE ended IS NULL"
)
"""Segments that hold a recorded turn that a ticket has, or a payload, or scores, whose group has not ended, or ended
after a checkpoint at this batch number."""


RECLAIMED = "UPDATE groups SET payload = 0 WHERE payload = 1 AND ended_batch <= ?"
"""Marks the payloads that a checkpoint at this batch number does not hold: `NEEDED` leaves them out."""


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
    """Fills `folder` from the newest complete checkpoint whose ledger can be read, if it has no ledger; returns the
    checkpoint.

    None if there is a ledger already, or no checkpoint (a new run). Raises LedgerFailed if every checkpoint's ledger is
    damaged, or none can be copied, or it cannot be read which numbers of branches were given.
    """
    if (folder / "ledger.sqlite").exists():
        return None
    every = list(checkpoints.glob("step-*"))
    complete = [p for p in every if (p / "state.json").is_file() and (p / "buffer").is_dir()]
    given = max([noted(checkpoints), *(_place(p)[0] for p in every)])
    damaged = []
    for checkpoint in sorted(complete, key=lambda p: (_place(p), p.name), reverse=True):
        try:
            damage = _damage(checkpoint)
            if not damage:
                _copy(checkpoint, folder, given)
                return checkpoint
        except (OSError, sqlite3.Error) as error:
            raise LedgerFailed(
                f"{checkpoint}/buffer cannot be restored into {folder}: {error}. Free space or fix the rights."
            ) from error
        log.warning("%s is passed over: its ledger cannot be restored: %s", checkpoint, damage)
        damaged.append(f"{checkpoint.name} ({damage})")
    if not damaged:
        return None
    raise LedgerFailed(
        f"there is no ledger in {folder}, and that of no checkpoint in {checkpoints} can be restored: "
        f"{', '.join(damaged)}. Put back one of these checkpoints' buffer/ folders from a copy, fork the run that they "
        "came from at another step (--fork RUN --at-step K), or begin a new run with model.path at a checkpoint's hf/."
    )


def _damage(checkpoint: Path) -> str:
    """Why the ledger in a checkpoint cannot be used; empty if it can. Raises OSError where it cannot be read."""
    if _place(checkpoint) == _UNREADABLE:
        return "its state.json is not what was written"
    ledger = checkpoint / "buffer" / "ledger.sqlite"
    if missing := [path.name for path in (ledger, checkpoint / "buffer" / "payloads") if not path.exists()]:
        return f"there is no {missing[0]}"
    ledger.open("rb").close()
    try:
        # Immutable: what reads it leaves no files beside it.
        with closing(sqlite3.connect(f"{ledger.absolute().as_uri()}?mode=ro&immutable=1", uri=True)) as db:
            version = int(db.execute("PRAGMA user_version").fetchone()[0])
            answer = str(db.execute("PRAGMA quick_check(1)").fetchone()[0])
    except sqlite3.Error as error:
        return f"it is damaged: {error}"
    if answer != "ok":
        return f"it is damaged: {' '.join(answer.split())}"
    return "" if version == schema.VERSION else schema.refusal(version)


def _copy(checkpoint: Path, folder: Path, given: int) -> None:
    source, unfinished = checkpoint / "buffer", folder / ".restoring.sqlite"
    shutil.rmtree(folder / "payloads", ignore_errors=True)
    (folder / "payloads").mkdir(parents=True)
    for segment in sorted((source / "payloads").iterdir()):
        try:
            os.link(segment, folder / "payloads" / segment.name)
        except OSError:
            shutil.copy2(segment, folder / "payloads" / segment.name)
    shutil.copy2(source / "ledger.sqlite", unfinished)
    with closing(sqlite3.connect(unfinished)) as db, db:
        chain = Chain(db)
        changes: tuple[tuple[str, tuple[object, ...]], ...] = (
            ("INSERT OR REPLACE INTO kv VALUES (?, ?)", ("restored", str(checkpoint))),
            ("INSERT OR REPLACE INTO kv VALUES (?, ?)", (GIVEN, str(given))),
            (RECLAIMED, (_place(checkpoint)[1],)),
        )
        for change in changes:
            db.execute(*change)
            chain.note(*change)
        chain.seal()
    unfinished.rename(folder / "ledger.sqlite")  # last: a ledger that exists is complete


_UNREADABLE = (-1, -1)


def _place(checkpoint: Path) -> tuple[int, int]:
    """Branch and batch of a checkpoint, by which checkpoints are ordered."""
    try:
        state = json.loads((checkpoint / "state.json").read_text())
        return int(state["branch"]), int(state["batch"])
    except (ValueError, KeyError, TypeError):
        return _UNREADABLE
