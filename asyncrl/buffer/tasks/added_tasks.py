"""Tasks that the run itself added, in the ledger: recorded with the outcome of the batch after which they were added.

Each is drawn once, before any further task of the source, in the order of addition. After a crash they are those of the
last recorded batch; when history forks at batch b, undrawn tasks of later batches are void.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from asyncrl.buffer.ledger.storage.database import Database
from asyncrl.data.added_tasks import ADDED
from asyncrl.data.base import Task


class AddedTasks:
    def __init__(self, database: Database) -> None:
        self._db = database
        self._waiting: list[int] = []
        """Serials of the tasks to be drawn, in order."""
        self.drawn = 0
        """Number of tasks drawn so far."""
        self._load()

    def add(self, batch: int, tasks: Sequence[str]) -> None:
        """Adds tasks, as JSON, that can be drawn from `batch` on."""
        for task in tasks:
            serial = self._db.write("INSERT INTO added(batch, task) VALUES (?, ?)", (batch, task))
            self._waiting.append(serial)

    def next(self) -> int | None:
        """Index of the task to be drawn now, if there is one."""
        return ADDED + self._waiting[0] if self._waiting else None

    def draw(self, index: int, draw: int) -> None:
        """The task at `index` became draw number `draw` of the run."""
        serial = self._waiting.pop(0)
        assert index == ADDED + serial
        self._db.write("UPDATE added SET draw = ? WHERE serial = ?", (draw, serial))
        self.drawn += 1

    def task(self, index: int) -> Task:
        """The task at `index`, also a released one: its prompt may have been put back."""
        (text,) = next(iter(self._db.read("SELECT task FROM added WHERE serial = ?", (index - ADDED,))))
        return task_of(index, text)

    def forked(self, b: int) -> None:
        self._db.write("UPDATE added SET released = 1 WHERE batch > ?", (b,))
        self._load()

    def _load(self) -> None:
        rows = self._db.read("SELECT serial FROM added WHERE draw IS NULL AND released = 0 ORDER BY serial")
        self._waiting = [serial for (serial,) in rows]
        self.drawn = next(iter(self._db.read("SELECT count(draw) FROM added")))[0]


def task_of(index: int, text: str) -> Task:
    """The recorded task, with an id made from its place if it has none."""
    row: dict[str, Any] = json.loads(text)
    return {"id": f"added/{index - ADDED}"} | row
