"""Which task the next draw is: one that the run added, or the curriculum's choice, its state recorded with the batches.

A state is written in the transaction that records a batch's outcome, so after any crash it is that of the last recorded
batch; where history forks at batch b, it is again the one that was in force before b.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from asyncrl.buffer.ledger.ledger import Ledger
from asyncrl.buffer.tasks.added_tasks import Added
from asyncrl.data.added_tasks import ADDED, OnStepEnd
from asyncrl.data.base import Curriculum, GroupResult, Task, TaskSource
from asyncrl.errors import RunError
from asyncrl.wire import pack, unpack


@dataclass(frozen=True, slots=True)
class Draw:
    number: int
    """0, 1, 2 ... over the whole run."""
    task: int
    """Index into the source, or of a row that was added."""
    curriculum: int
    """Serial of the state that chose it."""


class Drawing:
    def __init__(
        self, ledger: Ledger, source: TaskSource, curriculum: Curriculum, on_step_end: OnStepEnd | None = None
    ) -> None:
        self._ledger = ledger
        self._db = ledger.db
        self._source, self._curriculum, self._on_step_end = source, curriculum, on_step_end
        self._added = Added(ledger.db)
        self._serial = -1
        if not self._restore(len(ledger.history.line)):
            self._save(0, 0)

    def next(self) -> Draw:
        """The draw to be made now; the same until it is made (`Ledger.issue`)."""
        number, index = self._ledger.next_draw, self._added.next()
        if index is None:
            index = self._curriculum.draw(number - self._added.drawn)
        return Draw(number, index, self._serial)

    def made(self, draw: Draw) -> None:
        """`draw` was issued."""
        if draw.task >= ADDED:
            self._added.draw(draw.task, draw.number)

    def task(self, index: int) -> Task:
        """The source's, or one that was added. Raises RunError for one that no ticket can carry."""
        return carried(self._source.task(index), f"task {index}") if index < ADDED else self._added.task(index)

    def finished(self, b: int, version: int) -> None:
        """The outcome of batch b is recorded, and the version after it is `version`."""
        completed = self._ledger.unmeasured.take()
        results = [GroupResult(g.task, g.task_id, g.rewards) for g in completed]
        self._curriculum.update(version, [result for result in results if result.index < ADDED])
        if self._on_step_end is not None:
            tasks = [self.task(result.index) for result in results]
            self._added.add(b + 1, self._on_step_end(version, results, tasks))
        self._save(b + 1, version)
        for group in completed:
            self._ledger.unmeasured.measured(group, self._serial)

    def forked(self, b: int) -> None:
        """Batches from b on were released: what they taught is forgotten, and groups that live on are counted anew."""
        self._db.write("UPDATE curriculum SET released = 1 WHERE batch > ?", (b,))
        self._restore(b)
        self._added.forked(b)
        self._ledger.unmeasured.forked(self._serial, self._ledger.live.values())

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


def carried(task: Task, place: str) -> Task:
    """`task`, of data.source at `place`. Raises RunError for one that no ticket can carry."""
    try:
        packed = pack(task)
        unpack(packed, len(packed))
    except (TypeError, ValueError, OverflowError) as error:
        raise RunError(
            f"data.source gave {place}, which no ticket can carry: {error}. Expected a mapping with texts for keys, "
            "in it mappings, lists, texts and numbers; mend the source and go on with --resume."
        ) from error
    return task


def encoded(state: Any) -> str:
    return json.dumps(state, sort_keys=True, separators=(",", ":"))
