"""Which demonstrations each batch takes: the next ones, recorded when the batch is fixed, in a table of their own.

    batch b          0         1         2  skipped   3 ...      the cursor of batch b: what the batches before it on
    draws            0 .. 3    4 .. 7    8 .. 11      12 ...     the line have taken, whatever became of them

A batch that is redone has the same; a branch begins at the cursor of its batch. They are no groups: neither the
equation nor the bound on staleness knows them.
"""

from __future__ import annotations

from asyncrl.buffer.client.messages import Demonstration
from asyncrl.buffer.ledger.records import Batch, one
from asyncrl.buffer.ledger.storage.database import Database
from asyncrl.buffer.rules import Refused
from asyncrl.data.demonstrations import Demonstrations
from asyncrl.errors import RunError

BEGUN_WITH = "demonstrations"
"""Key of the digest of all rows."""


class DemonstrationDraws:
    def __init__(self, database: Database, data: Demonstrations | None, per_step: int) -> None:
        """Raises RunError if the run began with other demonstrations than `data`."""
        self._db, self._data, self._per_step = database, data, per_step
        self._read: tuple[int, list[Demonstration]] = (-1, [])
        """Serial and demonstrations of the batch that was read last: every rank of the learner asks for it."""
        if data is None:
            return
        began = database.get(BEGUN_WITH)
        if began is None:
            database.set(BEGUN_WITH, data.digest)
        elif began != data.digest:
            raise RunError(
                "data.demonstrations is not what the run began with: its rows have another digest. Put the files back "
                "as they were, or begin a new run with model.path at a checkpoint's hf/."
            )

    @property
    def drawn(self) -> int:
        """How many the batches of the line have taken."""
        return self._cursor(int(one(self._db, "SELECT count(*) FROM batches WHERE released = 0")))

    def fix(self, batch: Batch) -> None:
        """Records those of a batch that was fixed just now."""
        if self._data is None:
            return
        first = self._cursor(batch.b)
        for place in range(self._per_step):
            row = self._data.row(first + place)
            values = (batch.serial, place, first + place, row, self._data.digest_of(row))
            self._db.write("INSERT INTO demonstrations VALUES (?, ?, ?, ?, ?)", values)

    def of(self, batch: Batch | None) -> list[Demonstration]:
        """Those of a fixed batch, in training order. Raises Refused if a file has changed."""
        if self._data is None or batch is None:
            return []
        if self._read[0] == batch.serial:
            return self._read[1]
        chosen = "SELECT draw, line, digest FROM demonstrations WHERE serial = ? ORDER BY place"
        chats = self._data.chats
        try:
            found = [
                Demonstration(draw, chats.where(row), digest, chats.chat(row))
                for draw, row, digest in self._db.read(chosen, (batch.serial,))
            ]
        except RunError as error:
            raise Refused("demonstrations_changed", str(error)) from error
        self._read = batch.serial, found
        return found

    def _cursor(self, b: int) -> int:
        """The draw behind those of the batch before b."""
        before = "SELECT serial FROM batches WHERE released = 0 AND b = ?"
        return int(
            one(self._db, f"SELECT ifnull(max(draw) + 1, 0) FROM demonstrations WHERE serial = ({before})", (b - 1,))
        )
