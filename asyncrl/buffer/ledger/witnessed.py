"""What the ledger in a checkpoint holds of that which actors and scorers wrote down themselves."""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from asyncrl.buffer.ledger.storage import schema
from asyncrl.errors import RunError

_STORED = "SELECT a.branch, grp, idx, t.digest FROM trajectories t JOIN attempts a USING (grp, idx, attempt)"
_RESULTS = "SELECT serial, task, idx, digest FROM eval_results"
_TURNS = "SELECT a.branch, grp, idx, attempt, number, form, tokens FROM turns JOIN attempts a USING (grp, idx, attempt)"
_SCORES = "SELECT grp, attempt, digest FROM scores"
_LINES = (
    "SELECT actor, max(line) FROM (SELECT actor, line FROM logs UNION ALL SELECT actor, line FROM trajectories "
    "UNION ALL SELECT scorer, line FROM score_logs UNION ALL SELECT scorer, line FROM scores) "
    "WHERE line IS NOT NULL GROUP BY actor"
)


@dataclass(frozen=True, slots=True)
class Witnessed:
    trajectories: Collection[tuple[int, int, int, str]] = frozenset()
    """(branch on which it was lent, group, index, digest)."""
    results: Collection[tuple[int, int, int, str]] = frozenset()
    """(serial of the evaluation, task, index, digest)."""
    scores: Collection[tuple[int, int, str]] = frozenset()
    """(group, attempt, digest)."""
    turns: Collection[tuple[int, int, int, int, int, str, str | None]] = frozenset()
    """(branch on which it was lent, group, index, attempt, number, form, digest of the tokens) of recorded turns."""
    lines: Mapping[str, int] = field(default_factory=dict)
    """By actor or scorer: the number of the last line of its log that the ledger names, as the line of a trajectory or
    of scores, or as how far the log was."""


def read_witnessed(checkpoint: Path) -> Witnessed:
    """Empty if the checkpoint has no ledger. Raises RunError if it cannot be read."""
    path = checkpoint / "buffer" / "ledger.sqlite"
    if not path.exists():
        return Witnessed()
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro&immutable=1", uri=True)) as db:
            version = int(db.execute("PRAGMA user_version").fetchone()[0])
            if version != schema.VERSION:
                raise RunError(f"{path} cannot be read: {schema.refusal(version)}")
            return Witnessed(
                frozenset(db.execute(_STORED)),
                frozenset(db.execute(_RESULTS)),
                frozenset(db.execute(_SCORES)),
                frozenset(db.execute(_TURNS)),
                dict(db.execute(_LINES)),
            )
    except sqlite3.Error as error:
        raise RunError(f"{path} cannot be read: {error}. Take another checkpoint, or move this one away.") from error
