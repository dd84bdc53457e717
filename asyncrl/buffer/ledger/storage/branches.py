"""Numbers of branches: a run gives none twice, not even when the ledger that gave it is lost with its host.

Tickets and published weights carry the number, and actors that hold some outlive the buffer's host. So the highest
number is written beside the checkpoints, to the disk, before the ledger commits the branch and the first ticket or
version of it can exist; a ledger that is restored continues above it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from asyncrl.buffer.ledger.storage.database import Database, LedgerFailed

NAME = "branch"
"""The file, in the folder of checkpoints, from the first start of a learner on."""
GIVEN = "branches_given"
"""In a restored ledger: the highest number of a branch that the run had given before, which this ledger may lack."""
NOTHING = "nothing: the one before was lost ahead of its first checkpoint"
"""From what a ledger was restored that began anew, in a run in which a learner had started."""


class Branches:
    """The branches of a ledger. A number is noted before anything that carries it can exist."""

    def __init__(self, db: Database, checkpoints: Path | None) -> None:
        """`checkpoints`: their folder, where numbers are noted; None: nowhere."""
        self._db, self._checkpoints = db, checkpoints
        if not list(db.read("SELECT 1 FROM branches")):
            db.write("INSERT INTO branches VALUES (0, NULL, 0, 0, 'the start of the run')")
            if checkpoints is not None and (given := noted(checkpoints)) >= 0:
                db.set("restored", NOTHING)
                db.set(GIVEN, str(given))
        self.numbers: list[int] = [n for (n,) in db.read("SELECT branch FROM branches ORDER BY branch")]
        if list(db.read("SELECT 1 FROM incarnations LIMIT 1")):  # a run of before may have noted none
            self.note()

    def __iter__(self) -> Iterator[int]:
        return iter(self.numbers)

    def note(self) -> None:
        """Makes the number of the newest branch durable, as `begin` has done for all but the first."""
        self._note(self.numbers[-1])

    def begin(self, b: int, version: int, why: str) -> None:
        """A branch begins at batch b, with the weights of `version`."""
        number = next_branch(self.numbers[-1], [int(self._db.get(GIVEN) or 0)])
        self._note(number)
        self._db.write("INSERT INTO branches VALUES (?, ?, ?, ?, ?)", (number, self.numbers[-1], b, version, why))
        self.numbers.append(number)

    def _note(self, number: int) -> None:
        if self._checkpoints is not None:
            note(self._checkpoints, number)


def next_branch(current: int, named: Iterable[int]) -> int:
    """The number behind `current` and every number that is named elsewhere.

    >>> next_branch(0, []), next_branch(0, [1, 3]), next_branch(2, [1])
    (1, 4, 3)
    """
    return max([current, *named]) + 1


def noted(checkpoints: Path) -> int:
    """The highest number that was given; -1: none was. Raises LedgerFailed if the file cannot be read."""
    file = checkpoints / NAME
    try:
        return int(file.read_bytes())
    except FileNotFoundError:
        return -1
    except (OSError, ValueError) as error:
        raise LedgerFailed(
            f"{file} cannot be read: {error}. It holds the highest number of a branch of this run: write the highest "
            "`branch` of events.jsonl into it."
        ) from error


def note(checkpoints: Path, branch: int) -> None:
    """Makes the number durable if it is higher than what was noted. Raises LedgerFailed."""
    if branch <= noted(checkpoints):
        return
    file, unfinished = checkpoints / NAME, checkpoints / f".{NAME}"
    try:
        with unfinished.open("w") as text:
            text.write(f"{branch}\n")
            text.flush()
            os.fsync(text.fileno())
        unfinished.replace(file)
        folder = os.open(checkpoints, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise LedgerFailed(
            f"{file} cannot be written: {error}. Branch {branch} cannot begin without it. Free space or fix the rights."
        ) from error
