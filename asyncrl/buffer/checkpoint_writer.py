"""The buffer's part of a checkpoint: a copy of the ledger, written beside the buffer's work.

the learner announces a checkpoint ──> checked, committed ──> a thread copies the ledger ──> recorded, committed
                                                                                                   │
                                            payloads that no checkpoint needs any more are removed <┘
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from asyncrl.buffer.batches.disk_losses import COVERED
from asyncrl.buffer.ledger import checkpoints
from asyncrl.buffer.ledger.ledger import Ledger
from asyncrl.buffer.ledger.storage.database import LedgerFailed
from asyncrl.buffer.ledger.storage.snapshot import Snapshot
from asyncrl.buffer.retention import Retention
from asyncrl.buffer.rules import Refused


class CheckpointWriter:
    def __init__(self, ledger: Ledger, retention: Retention) -> None:
        self._ledger = ledger
        self._database = ledger.db
        self._retention = retention
        self._sweep_due = False
        self._snapshot: Snapshot | None = None
        self._written: tuple[int, int, Path] | None = None
        """The last one that was written, as `Snapshot.key`."""

    def commit(self, now: float) -> None:
        """Everything decided so far is durable. Raises LedgerFailed."""
        self._database.commit(now)
        if self._sweep_due:
            self._sweep_due = False
            self._retention.sweep()

    def write(self, now: float, incarnation: int, version: int, batch: int, path: Path, wait: bool) -> bool:
        """Whether the buffer's part is written; False, only without `wait`: not yet. Raises Refused, LedgerFailed."""
        key = (incarnation, batch, path)
        if self._written == key:
            return True  # a repeat; the learner may have renamed what was written
        if self._snapshot is None or self._snapshot.key != key:
            self._check(version, batch, path)
            if self._snapshot is not None:
                with suppress(LedgerFailed):  # its learner is gone, and so perhaps its folder
                    self._snapshot.result()
            self.commit(now)
            self._snapshot = Snapshot(self._database, incarnation, batch, path)
        if not wait and not self._snapshot.done:
            return False
        snapshot, self._snapshot = self._snapshot, None
        try:
            snapshot.result()
        except LedgerFailed:
            _check_folder(path)  # a new learner removes what the one before it left unfinished
            raise
        self._written = snapshot.key
        self._database.set(COVERED, str(snapshot.covered))
        checkpoint = (self._ledger.history.branch, batch, version, str(path))
        checkpoints.record(self._database, checkpoint, self._retention.keep_checkpoints)
        self._retention.mark()
        self._sweep_due = True
        self.commit(now)
        return True

    def _check(self, version: int, batch: int, path: Path) -> None:
        current = self._ledger.history.incarnations[-1]
        if (batch, version) != (current.next_batch, current.version):
            raise Refused(
                "bad_checkpoint",
                f"a checkpoint at batch {batch}, version {version} was announced; the learner stands at batch "
                f"{current.next_batch}, version {current.version}",
            )
        _check_folder(path)
        live = self._database.path.parent.resolve()
        if (path / "buffer").resolve() in (live, *live.parents):
            raise Refused(
                "bad_checkpoint", f"{path}/buffer holds the live ledger: a checkpoint has a folder of its own"
            )


def _check_folder(path: Path) -> None:
    if not path.is_dir():
        raise Refused("bad_checkpoint", f"{path} is not a folder on the buffer's host")
