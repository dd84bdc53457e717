"""Stops of the run by results of evaluations, as the ledger records them: before which batch each acts.

A redo ends there too, also where it gives other weights behind the result, so that it becomes a branch. Any other
branch that begins at this batch or before it voids the stop; its result does not act again.
"""

from __future__ import annotations

from asyncrl.buffer.evaluations.choices import Measured, on_line, passed, ranked, stops, voids
from asyncrl.buffer.ledger.records import one
from asyncrl.buffer.ledger.storage.database import Database
from asyncrl.buffer.rules import Rules


class Stops:
    """Changes go through the ledger's open transaction."""

    def __init__(self, database: Database, rules: Rules) -> None:
        self._db, self._choosing = database, rules.choosing
        self._in_force = self._read()
        self._news = True
        """There may be a result on which nobody has acted."""

    def measured(self) -> None:
        """An evaluation has a result."""
        self._news = True

    def forked(self, b: int) -> None:
        """The newest branch begins at batch b."""
        self._news = True
        ((version, why),) = self._db.read("SELECT fork_version, why FROM branches ORDER BY branch DESC LIMIT 1")
        left = "SELECT stops.serial, due FROM stops JOIN evals ON evals.serial = eval WHERE batch >= ?"
        for serial, due in list(self._db.read(left, (b,))):
            if voids(why, version, due):
                self._db.write("UPDATE stops SET released = 1 WHERE serial = ?", (serial,))
        self._in_force = self._read()

    def recorded(self, b: int) -> str:
        """Why the run stops before batch b; empty: it was not told to."""
        return self._in_force.get(b, "")

    def decide(self, b: int, version: int) -> str:
        """The same for a batch that would be fixed now, at `version`; records it."""
        if not self._news:
            return ""
        self._news = False
        acted = {serial for (serial,) in self._db.read("SELECT eval FROM stops")}
        if not (asked_for := stops(self._line(), self._choosing, acted)):
            return ""
        stop, branch = asked_for[0], one(self._db, "SELECT max(branch) FROM branches")
        values = (branch, b, version, stop.eval, stop.why, fixed(self._db), self._db.wall_clock())
        columns = "branch, batch, version, eval, why, fixed, at"
        self._db.write(f"INSERT INTO stops({columns}) VALUES (?, ?, ?, ?, ?, ?, ?)", values)
        self._in_force[b] = stop.why
        return stop.why

    def ranked(self) -> list[Measured]:
        """The results by which weights are kept (`eval.keep_best`), from the best on."""
        return ranked(self._line(), self._choosing) if self._choosing.keep_best else []

    def passed(self, version: tuple[int, int]) -> bool:
        """Whether the learner's weights have passed it."""
        return passed(version, forks := self._forks(), max(forks))

    def _read(self) -> dict[int, str]:
        """Why the run stops before which batch."""
        return dict(self._db.read("SELECT batch, why FROM stops WHERE released = 0"))

    def _forks(self) -> dict[int, int]:
        return dict(self._db.read("SELECT branch, fork_version FROM branches"))

    def _line(self) -> list[Measured]:
        forks = self._forks()
        rows = self._db.read(
            "SELECT serial, name, way, branch, due, on_branch, version, share "
            "FROM evals JOIN eval_measures USING (serial) WHERE state = 'done'"
        )
        measured = [
            Measured(serial, (name, way), b, due, (on, v), share) for serial, name, way, b, due, on, v, share in rows
        ]
        return on_line(measured, forks, max(forks))


def fixed(database: Database) -> int:
    """Batches that were ever fixed."""
    return one(database, "SELECT count(*) FROM batches") or 0
