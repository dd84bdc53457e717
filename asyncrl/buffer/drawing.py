"""Which task the next draw is: the curriculum's decision, its state recorded with the batches.

A state is written in the transaction that records a batch's outcome, so after any crash it is that of the last recorded
batch; where history forks at batch b, it is again the one that was in force before b.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from asyncrl.buffer.ledger import Ledger
from asyncrl.data.base import Curriculum, GroupResult


@dataclass(frozen=True, slots=True)
class Draw:
    number: int
    """0, 1, 2 ... over the whole run."""
    task: int
    """Index into the source."""
    curriculum: int
    """Serial of the state that chose it."""


class Drawing:
    def __init__(self, ledger: Ledger, curriculum: Curriculum) -> None:
        self._ledger = ledger
        self._db = ledger.db
        self._curriculum = curriculum
        self._serial = -1
        if not self._restore(len(ledger.history.line)):
            self._save(0, 0)

    def next(self) -> Draw:
        """The draw to be made now; the same until it is made (`Ledger.issue`)."""
        number = self._ledger.next_draw
        return Draw(number, self._curriculum.draw(number), self._serial)

    def finished(self, b: int, version: int) -> None:
        """The outcome of batch b is recorded, and the version after it is `version`."""
        completed = sorted(self._ledger.completed, key=lambda group: group.number)
        self._ledger.completed.clear()
        self._curriculum.update(version, [GroupResult(g.task, g.task_id, g.rewards) for g in completed])
        self._save(b + 1, version)
        for group in completed:
            self._ledger.measure(group, self._serial)

    def forked(self, b: int) -> None:
        """Batches from b on were released: what they taught is forgotten, and groups that live on are counted anew."""
        self._db.write("UPDATE curriculum SET released = 1 WHERE batch > ?", (b,))
        self._restore(b)
        self._ledger.unmeasure(self._serial)

    def _restore(self, b: int) -> bool:
        """The state that is in force before batch b."""
        found = self._db.read(
            "SELECT serial, state FROM curriculum WHERE released = 0 AND batch <= ? ORDER BY serial DESC LIMIT 1", (b,)
        )
        for serial, state in found:
            self._serial = serial
            self._curriculum.restore(json.loads(state))
            return True
        return False

    def _save(self, batch: int, version: int) -> None:
        state = encoded(self._curriculum.state())
        self._serial = self._db.write(
            "INSERT INTO curriculum(batch, version, state) VALUES (?, ?, ?)", (batch, version, state)
        )


def encoded(state: Any) -> str:
    return json.dumps(state, sort_keys=True, separators=(",", ":"))
