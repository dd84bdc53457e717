"""The learner's history as the ledger records it: branches, incarnations, batches and their outcomes, publications.

Batches 0, 1, 2... form one line without gaps. A branch begins where recorded batches are not redone: it releases the
rest of the line and continues from there, so versions below the fork are shared and mean the same weights. Branches are
numbered 0, 1, 2...; one that begins on a restored ledger is above every number that the run ever gave.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from asyncrl.buffer.client.messages import Outcome
from asyncrl.buffer.ledger.checkpoints import release_after
from asyncrl.buffer.ledger.records import Batch, Incarnation, one, read_incarnations, read_line
from asyncrl.buffer.ledger.storage.branches import Branches
from asyncrl.buffer.ledger.storage.database import Database


class IllegalTransition(RuntimeError):
    """A change that the ledger does not allow in this state: a bug in the caller, never the fault of a message."""


class History:
    """Loads the history from the database, and changes both together."""

    def __init__(self, database: Database, branches: Branches) -> None:
        self._db, self.branches = database, branches
        self.line = read_line(database)
        self.incarnations = read_incarnations(database)
        self.published: int | None = None
        """Latest version published on this branch."""
        self._load_published()

    @property
    def branch(self) -> int:
        return self.branches.numbers[-1]

    @property
    def current(self) -> Incarnation | None:
        return self.incarnations[-1] if self.incarnations else None

    @property
    def version(self) -> int:
        """Version of the learner's weights now; behind `recorded_version` while it redoes recorded batches."""
        return self.current.version if self.current else 0

    @property
    def recorded_version(self) -> int:
        return self.line[-1].version_after if self.line else 0

    def version_before(self, b: int) -> int:
        """The version that batch b is, or would be, trained on."""
        return self.line[b - 1].version_after if b else 0

    def on_line(self, branch: int, b: int) -> bool:
        """Whether weights of `branch` that have seen the batches before b are a point of the recorded line."""
        left_at = one(self._db, "SELECT min(fork_batch) FROM branches WHERE branch > ?", (branch,))
        recorded = b <= len(self.line) and (b == 0 or self.line[b - 1].outcome is not None)
        return branch in self.branches and recorded and (left_at is None or b <= left_at)

    def first_uses_since(self, version: int) -> int:
        """Groups whose first use is in a batch fixed at `version` or later that is open or applied."""
        recent = takewhile(lambda batch: batch.version >= version, reversed(self.line))
        return sum(batch.first_uses for batch in recent if batch.outcome in (None, "applied"))

    def skipped_in_a_row(self) -> int:
        """Batches at the end of the line that were skipped."""
        return sum(1 for _ in takewhile(lambda batch: batch.outcome in ("guard", "poison"), reversed(self.line)))

    def deaths_in_a_row(self, b: int) -> int:
        """Incarnations that died one after the other while they held batch b. Those ended on purpose do not count, but
        one that had passed b ends the row: it has trained b."""
        died = (i for i in reversed(self.incarnations) if not i.caused or i.next_batch > b)
        return sum(1 for _ in takewhile(lambda incarnation: incarnation.holds == b, died))

    def start(self, next_batch: int, version: int, settings: str) -> Incarnation:
        """Begins an incarnation. Checkpoints at later batches were announced but not completed: they are released."""
        self.branches.note()
        release_after(self._db, next_batch)
        new = Incarnation(len(self.incarnations) + 1, self.branch, next_batch, version, settings=settings)
        values = (new.incarnation, new.branch, next_batch, version, next_batch, version, settings)
        self._db.write("INSERT INTO incarnations VALUES (?, ?, ?, ?, ?, ?, NULL, 0, ?)", values)
        self.incarnations.append(new)
        return new

    def move(self, next_batch: int, version: int, holds: int | None) -> None:
        """Records where the current incarnation stands."""
        current = self._current()
        if (current.next_batch, current.version, current.holds) != (next_batch, version, holds):
            current.next_batch, current.version, current.holds = next_batch, version, holds
            self._db.write(
                "UPDATE incarnations SET next_batch = ?, version = ?, holds = ? WHERE incarnation = ?",
                (next_batch, version, holds, current.incarnation),
            )

    def caused(self) -> None:
        """The current incarnation ends, or ended, on purpose."""
        self._current().caused = True
        self._db.write("UPDATE incarnations SET caused = 1 WHERE incarnation = ?", (self._current().incarnation,))

    def publish(self, version: int, digest: str, attempts: int) -> None:
        """A repeat changes nothing; another digest is one for `Batches.published`. `attempts`: how many were issued
        before."""
        values = (self.branch, version, digest, self._db.wall_clock(), attempts)
        self._db.write("INSERT OR IGNORE INTO published VALUES (?, ?, ?, ?, ?)", values)
        self._load_published()

    def fix(self, b: int, version: int, groups: Sequence[int], first_uses: int) -> Batch:
        if b != len(self.line) or (self.line and self.line[-1].outcome is None):
            raise IllegalTransition(f"batch {b} cannot be fixed: the line has {len(self.line)} batches or one is open")
        incarnation = self._current().incarnation
        serial = self._db.write(
            "INSERT INTO batches(b, branch, version, incarnation, first_uses, fixed_at) VALUES (?, ?, ?, ?, ?, ?)",
            (b, self.branch, version, incarnation, first_uses, self._db.wall_clock()),
        )
        for place, number in enumerate(groups):
            self._db.write("INSERT INTO uses VALUES (?, ?, ?)", (serial, place, number))
        batch = Batch(serial, b, self.branch, version, incarnation, first_uses, tuple(groups))
        self.line.append(batch)
        return batch

    def finish(self, b: int, outcome: Outcome) -> Batch:
        batch = self.line[b]
        if batch.outcome is not None:
            raise IllegalTransition(f"batch {b} is {batch.outcome} already and cannot become {outcome}")
        batch.outcome = outcome
        finished = (outcome, self._db.wall_clock(), batch.serial)
        self._db.write("UPDATE batches SET outcome = ?, finished_at = ? WHERE serial = ?", finished)
        return batch

    def fork(self, b: int, version: int, why: str) -> list[Batch]:
        """Begins a branch whose first batch is b, on weights of `version`; returns the released batches, in order."""
        released = self.line[b:]
        for batch in released:
            self._db.write("UPDATE batches SET released = 1 WHERE serial = ?", (batch.serial,))
        del self.line[b:]
        for incarnation in self.incarnations:
            if incarnation.holds is not None and incarnation.holds >= b:
                incarnation.holds = None  # this number names another batch now, which is not suspected
        self._db.write("UPDATE incarnations SET holds = NULL WHERE holds >= ?", (b,))
        release_after(self._db, b)
        self.branches.begin(b, version, why)
        self.published = None
        return released

    def _current(self) -> Incarnation:
        if self.current is None:
            raise IllegalTransition("no learner has started")
        return self.current

    def _load_published(self) -> None:
        self.published = one(self._db, "SELECT max(version) FROM published WHERE branch = ?", (self.branch,))
