"""The ledger's committed rows for a reader, page by page, over a connection of its own that cannot write.

Each page is one short read transaction. Under a write-ahead log neither the writer nor the reader waits for the other.
"""

from __future__ import annotations

import sqlite3
import struct
from collections import defaultdict
from pathlib import Path
from typing import Any

from asyncrl.buffer.client.pages import (
    MOST_BATCHES,
    MOST_GROUPS,
    MOST_TRAJECTORIES,
    BatchEntry,
    BranchEntry,
    FailureEntry,
    GroupEntry,
    Page,
    TrajectoryEntry,
)
from asyncrl.buffer.ledger.storage import schema
from asyncrl.buffer.ledger.storage.payloads import Location
from asyncrl.errors import RunError

_DETAIL_CHARS = 2000
"""Of the reason of a failure."""


class Pages:
    """Raises RunError for a ledger that is missing, damaged, or of another version of the tables."""

    def __init__(self, path: Path, immutable: bool = False) -> None:
        """`immutable`: nobody writes, so the file may also lie on a read-only disk."""
        if not path.is_file():
            raise RunError(f"{path.parent} holds no ledger (ledger.sqlite): give a run whose buffer has started.")
        self._path = path
        options = "?mode=ro" + ("&immutable=1" if immutable else "")
        try:
            self._db = sqlite3.connect(
                f"{path.absolute().as_uri()}{options}", uri=True, isolation_level=None, check_same_thread=False
            )
            version = self._db.execute("PRAGMA user_version").fetchone()[0]
        except sqlite3.Error as error:
            raise self._unreadable(error) from error
        if version != schema.VERSION:
            self.close()
            raise RunError(f"the ledger of this run cannot be read: {schema.refusal(version)}")

    def close(self) -> None:
        self._db.close()

    def page(self, group: int, batch: int, limit: int = MOST_GROUPS) -> Page:
        """At most `limit` groups from number `group` on, and the batches from serial `batch` on."""
        try:
            self._db.execute("BEGIN")
            try:
                return self._page(group, batch, limit)
            finally:
                self._db.execute("ROLLBACK")
        except (sqlite3.Error, struct.error) as error:
            raise self._unreadable(error) from error

    def location(self, group: int, index: int) -> Location | None:
        """Where the payload of a trajectory lies; None: there is none, or none any more."""
        sql = (
            "SELECT segment, start, bytes, checksum FROM trajectories JOIN groups ON number = grp "
            "WHERE grp = ? AND idx = ? AND payload"
        )
        try:
            row = self._db.execute(sql, (group, index)).fetchone()
        except sqlite3.Error as error:
            raise self._unreadable(error) from error
        return None if row is None else Location(*row)

    def _page(self, group: int, batch: int, limit: int) -> Page:
        groups, more = self._groups(group, limit)
        last = groups[-1].number if groups else group
        return Page(
            groups=groups,
            trajectories=self._trajectories(group, last),
            failures=[
                FailureEntry(*row)
                for row in self._db.execute(
                    f"SELECT grp, idx, attempt, actor, substr(coalesce(detail, ''), 1, {_DETAIL_CHARS}), ended_at "
                    "FROM attempts WHERE grp BETWEEN ? AND ? AND ended = 'failed'",
                    (group, last),
                )
            ],
            batches=self._batches(batch),
            branches=[
                BranchEntry(*row)
                for row in self._db.execute("SELECT branch, parent, fork_batch FROM branches ORDER BY branch")
            ],
            next=last + 1 if more else None,
        )

    def _groups(self, first: int, limit: int) -> tuple[list[GroupEntry], bool]:
        """The groups of the page, and whether there are more behind them."""
        rows = self._db.execute(
            "SELECT number, branch, task_id, size, state, reason, weight, payload, ended_at IS NOT NULL FROM groups "
            "WHERE number >= ? ORDER BY number LIMIT ?",
            (first, limit + 1),
        ).fetchall()
        taken, trajectories = 0, 0
        for row in rows[:limit]:
            trajectories += row[3]
            if taken and trajectories > MOST_TRAJECTORIES:
                break
            taken += 1
        groups = [(*row[:7], bool(row[7]), bool(row[8])) for row in rows[:taken]]
        return [GroupEntry(*group) for group in groups], taken < len(rows)

    def _trajectories(self, first: int, last: int) -> list[TrajectoryEntry]:
        rows = self._db.execute(
            "SELECT t.grp, t.idx, t.attempt, t.actor, digest, tokens, policy_tokens, turns, reward, env, stop_reason, "
            "received_at, a.issued_at, versions FROM trajectories t LEFT JOIN attempts a ON a.grp = t.grp AND "
            "a.idx = t.idx AND a.attempt = t.attempt WHERE t.grp BETWEEN ? AND ? ORDER BY t.grp, t.idx",
            (first, last),
        )
        return [TrajectoryEntry(*entry) for entry in ((*row[:-1], _pairs(row[-1])) for row in rows)]

    def _batches(self, first: int) -> list[BatchEntry]:
        rows: list[Any] = self._db.execute(
            "SELECT serial, b, branch, version, outcome, released, fixed_at, finished_at FROM batches "
            "WHERE serial >= ? ORDER BY serial LIMIT ?",
            (first, MOST_BATCHES),
        ).fetchall()
        if not rows:
            return []
        uses: defaultdict[int, list[int]] = defaultdict(list)
        for serial, group in self._db.execute(
            "SELECT serial, grp FROM uses WHERE serial BETWEEN ? AND ? ORDER BY serial, place",
            (rows[0][0], rows[-1][0]),
        ):
            uses[serial].append(group)
        return [BatchEntry(*entry) for entry in ((*row[:5], bool(row[5]), *row[6:], uses[row[0]]) for row in rows)]

    def _unreadable(self, error: Exception) -> RunError:
        return RunError(
            f"{self._path} cannot be read: {error}. A damaged ledger is restored from the newest checkpoint's buffer/; "
            "if its folder is read-only, give a copy of the run folder."
        )


def _pairs(packed: bytes) -> list[tuple[int, int]]:
    numbers = iter(struct.unpack(f"<{len(packed) // 8}q", packed))
    return list(zip(numbers, numbers, strict=True))
