"""Used groups in the ledger: those that a batch got beside its new ones, and those that ended before another use."""

from __future__ import annotations

from typing import Literal

from asyncrl.buffer.ledger.group import Group
from asyncrl.buffer.ledger.ledger import Ledger
from asyncrl.buffer.ledger.records import Batch, Draw
from asyncrl.buffer.ledger.storage.database import Database

Why = Literal["stale", "yielded", "no_payload"]


def record(db: Database, batch: Batch, draw: Draw) -> None:
    """Records the draw of a batch that has just been fixed."""
    batch.replay = draw
    if draw.candidates:
        db.write("UPDATE batches SET candidates = ? WHERE serial = ?", (draw.candidates, batch.serial))
    for one in draw.drawn:
        db.write("INSERT INTO replays VALUES (?, ?, ?, ?)", (batch.serial, one.group, one.chance, one.weight))


def retire(ledger: Ledger, group: Group, why: Why) -> None:
    """Waiting, used before -> trained, with the batch after which it happened."""
    ledger.retire(group)
    values = (group.number, ledger.history.branch, len(ledger.history.line), why)
    ledger.db.write("INSERT INTO retired(grp, branch, batch, why) VALUES (?, ?, ?, ?)", values)
