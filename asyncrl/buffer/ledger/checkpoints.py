"""The checkpoints that the ledger knows: which are kept for resuming, and from which one a learner may resume."""

from __future__ import annotations

from asyncrl.buffer.ledger.storage.database import Database


def record(database: Database, checkpoint: tuple[int, int, int, str], keep: int) -> None:
    """Records `checkpoint` (branch, batch, version, path); only the latest `keep` are kept for resuming."""
    _, batch, _, path = checkpoint
    recorded = "SELECT 1 FROM checkpoints WHERE path = ? AND batch = ? AND released = 0"
    if not list(database.read(recorded, (path, batch))):
        new = (*checkpoint, database.wall_clock())
        database.write("INSERT INTO checkpoints(branch, batch, version, path, at) VALUES (?, ?, ?, ?, ?)", new)
    database.write(
        "UPDATE checkpoints SET released = 1 WHERE released = 0 AND serial NOT IN "
        "(SELECT serial FROM checkpoints WHERE released = 0 ORDER BY batch DESC, serial DESC LIMIT ?)",
        (keep,),
    )


def release_after(database: Database, batch: int) -> None:
    """Releases the checkpoints at later batches than `batch`: they belong to another branch, or were announced but not
    completed, and must not replace others."""
    database.write("UPDATE checkpoints SET released = 1 WHERE batch > ?", (batch,))


def oldest(database: Database) -> int:
    """The earliest batch number from which a learner may have to resume.

    A checkpoint is announced before it gets its final name, which may never happen. With a single one, the learner
    may therefore resume from where it started, at first from the initial weights.
    """
    kept = [batch for (batch,) in database.read("SELECT batch FROM checkpoints WHERE released = 0")]
    if len(kept) < 2:
        started = database.read("SELECT start_batch FROM incarnations ORDER BY incarnation DESC LIMIT 1")
        kept += [batch for (batch,) in started]
    return min(kept, default=0)
