"""Which task comes next: one that the run added, or the choice of the curriculum, whose state is in the ledger.

A state is written in the transaction that records a batch's outcome, so after a crash it is that of the last recorded
batch; when history forks at batch b, the state before b is restored.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from asyncrl.buffer.ledger.ledger import Ledger
from asyncrl.buffer.tasks.added_tasks import AddedTasks
from asyncrl.data.added_tasks import ADDED, OnStepEnd
from asyncrl.data.base import Curriculum, GroupResult, Task, TaskSource
from asyncrl.data.checked import readable
from asyncrl.errors import RunError
from asyncrl.wire import MAX_TEXT, pack, unpack

_REMEMBERED = 256
"""Tasks that are not asked for again: the tickets of one group are issued one after the other, mostly."""


@dataclass(frozen=True, slots=True)
class Draw:
    number: int
    """0, 1, 2 ... over the run."""
    task: int
    """Index into the source, or of an added task."""
    curriculum: int
    """Serial of the curriculum's state that chose it."""


class TaskDraws:
    def __init__(
        self, ledger: Ledger, source: TaskSource, curriculum: Curriculum, on_step_end: OnStepEnd | None = None
    ) -> None:
        self._ledger = ledger
        self._db = ledger.db
        self._source, self._curriculum, self._on_step_end = source, curriculum, on_step_end
        self._added = AddedTasks(ledger.db)
        self.task = lru_cache(_REMEMBERED)(self._task)
        """A task of the source, or an added one, by index. Raises RunError if it does not fit into a ticket."""
        self._serial = -1
        if not self._restore(len(ledger.history.line)):
            self._save(0, 0)

    def next(self) -> Draw:
        """The next draw; the same until a group of it is issued."""
        number, index = self._ledger.next_draw, self._added.next()
        if index is None:
            index = self._curriculum.draw(number - self._added.drawn)
        return Draw(number, index, self._serial)

    def issued(self, draw: Draw) -> None:
        """A group of `draw` was issued."""
        if draw.task >= ADDED:
            self._added.draw(draw.task, draw.number)

    def _task(self, index: int) -> Task:
        if index >= ADDED:
            return self._added.task(index)
        return checked_task(readable(lambda: self._source.task(index), f"task {index}"), f"task {index}")

    def finished(self, b: int, version: int) -> None:
        """The outcome of batch b is recorded; the version after it is `version`."""
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
        """Batches from b on were released: restores the curriculum's state before b. Live groups are measured again."""
        self._db.write("UPDATE curriculum SET released = 1 WHERE batch > ?", (b,))
        self._restore(b)
        self._added.forked(b)
        self._ledger.unmeasured.forked(self._serial, self._ledger.live.values())

    def _restore(self, b: int) -> bool:
        """Restores the state before batch b; False if there is none."""
        states = self._db.read(
            "SELECT serial, state FROM curriculum WHERE released = 0 AND batch <= ? ORDER BY serial DESC LIMIT 1", (b,)
        )
        for serial, state in states:
            self._serial = serial
            self._curriculum.restore(json.loads(state))
            return True
        return False

    def _save(self, batch: int, version: int) -> None:
        state = encoded(self._curriculum.state())
        self._serial = self._db.write(
            "INSERT INTO curriculum(batch, version, state) VALUES (?, ?, ?)", (batch, version, state)
        )


def checked_task(task: Task, place: str) -> Task:
    """The task of data.source at `place`, of plain values: what an actor reads from its ticket, where numpy's strings
    and numbers are Python's. Raises RunError if it does not fit into a ticket."""
    try:
        packed = pack(task)
        plain: Task = unpack(packed, len(packed))
    except (TypeError, ValueError, OverflowError) as error:
        raise RunError(
            f"data.source gave {place}, which no ticket can carry: {error}. Expected a mapping with strings as keys, "
            "holding mappings, lists, strings and numbers; correct the source and continue with --resume."
        ) from error
    if len(named := str(plain.get("id", ""))) > MAX_TEXT:
        raise RunError(
            f"data.source gave {place} an id of {len(named)} characters, {named[:60]!r}...: expected at most "
            f"{MAX_TEXT}, else no trajectory of it could be stored. Shorten the ids and continue with --resume."
        )
    return plain


def encoded(state: Any) -> str:
    return json.dumps(state, sort_keys=True, separators=(",", ":"))
