"""Reads the ledger as plain rows, independently of the code that wrote it, without disturbing a writer.

It is one read transaction: later writes of a live buffer are not seen, and the buffer does not wait.
"""

from __future__ import annotations

import sqlite3
import struct
from collections import defaultdict
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from asyncrl.audit.chain import read_chain
from asyncrl.audit.ledger import (
    AddedRow,
    AttemptRow,
    BatchRow,
    BranchRow,
    CurriculumRow,
    DemonstrationRow,
    GroupRow,
    LedgerRows,
    TrajectoryRow,
)
from asyncrl.buffer.ledger.records import BOUND, SLOTS, Decision, Draw, Drawn, Measures, Tuned, of_bound, of_slots
from asyncrl.buffer.ledger.storage import schema
from asyncrl.data.added_tasks import ADDED
from asyncrl.errors import RunError

TABLES = (
    "attempts", "batches", "checkpoints", "eval_measures", "eval_results", "evals", "incarnations", "lengths",
    "logs", "published", "replays", "retired", "score_logs", "score_uses", "scores", "scorings", "stops",
    "turns", "uses",
)  # fmt: skip
"""Tables that are also read as they are."""

UNREADABLE = (sqlite3.Error, struct.error, ValueError, TypeError)
"""What reading a damaged ledger raises."""


def read_ledger(folder: Path) -> LedgerRows:
    """The ledger of a finished, a killed or a live run. Raises RunError if it is missing or cannot be read."""
    path = folder / "ledger.sqlite"
    if not path.is_file():
        raise RunError(f"{folder} holds no ledger (ledger.sqlite): give a run folder whose buffer has started.")
    # Without a write-ahead log there is no writer, and reading needs no write.
    immutable = "" if path.with_name("ledger.sqlite-wal").exists() else "&immutable=1"
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro{immutable}", uri=True)) as db:
            db.row_factory = sqlite3.Row
            db.execute("BEGIN")
            return rows_in(db)
    except UNREADABLE as error:
        raise RunError(
            f"{path} cannot be read: {error}. If its folder is read-only, audit a copy of the run folder; a damaged "
            "ledger is restored from the newest checkpoint's buffer/."
        ) from error


def rows_in(db: sqlite3.Connection) -> LedgerRows:
    """The ledger as the transaction of `db` sees it, which gives rows by name. Raises UNREADABLE, and RunError for
    tables of another version."""
    version = db.execute("PRAGMA user_version").fetchone()[0]
    if version != schema.VERSION:
        raise RunError(f"the ledger of this run cannot be read: {schema.refusal(version)}")

    def read(sql: str) -> list[sqlite3.Row]:
        return db.execute(sql).fetchall()

    shown: defaultdict[int, list[DemonstrationRow]] = defaultdict(list)
    for serial, *rest in read("SELECT serial, place, draw, line, digest FROM demonstrations ORDER BY serial, place"):
        shown[serial].append(DemonstrationRow(*rest))
    taught_by = read("SELECT value FROM kv WHERE key = 'teacher'")
    began_with = read("SELECT value FROM kv WHERE key = 'demonstrations'")
    attempts: defaultdict[tuple[int, int], list[AttemptRow]] = defaultdict(list)
    for row in read(
        'SELECT grp AS "group", idx AS "index", attempt, actor, branch, min_version, ended, issued_at, ended_at, '
        "serial, ended_serial FROM attempts ORDER BY 1, 2, 3"
    ):
        attempts[row["group"], row["index"]].append(AttemptRow(**dict(row)))
    next_draw = read("SELECT value FROM kv WHERE key = 'next_draw'")
    return LedgerRows(
        branches={
            row["branch"]: BranchRow(**dict(row))
            for row in read("SELECT branch, parent, fork_batch, fork_version, why FROM branches ORDER BY branch")
        },
        groups={
            row["number"]: GroupRow(**_with_bools(row, "put_back", "payload", "durable"))
            for row in read(
                "SELECT number, branch, draw, task, curriculum, measured, replaces, task_id, size, state, reason, "
                "weight, uses, ended_batch, ended_branch, filling, put_back, payload, durable, task_env, lengths "
                "FROM groups ORDER BY number"
            )
        },
        attempts=dict(attempts),
        trajectories={
            (row["group"], row["index"]): TrajectoryRow(**(dict(row) | {"versions": _pairs(row["versions"])}))
            for row in read(
                'SELECT grp AS "group", idx AS "index", attempt, t.actor, digest, segment, start, bytes, checksum, '
                "versions, tokens, policy_tokens, turns, reward, env, stop_reason, received_at, line, head, branch "
                "FROM trajectories t LEFT JOIN attempts USING (grp, idx, attempt)"
            )
        },
        batches=_batches(read),
        published={(b, v): digest for b, v, digest in read("SELECT branch, version, digest FROM published")},
        counters={(branch, name): value for branch, name, value in read("SELECT branch, name, value FROM counters")},
        next_draw=int(next_draw[0][0]) if next_draw else 0,
        added={
            ADDED + row["serial"]: AddedRow(row["batch"], row["task"], row["draw"], bool(row["released"]))
            for row in read("SELECT serial, batch, task, draw, released FROM added ORDER BY serial")
        },
        curriculum={
            row["serial"]: CurriculumRow(**_with_bools(row, "released"))
            for row in read("SELECT serial, batch, version, state, released FROM curriculum ORDER BY serial")
        },
        demonstrations=dict(shown),
        demonstrations_digest=str(began_with[0][0]) if began_with else None,
        teacher=str(taught_by[0][0]) if taught_by else "",
        restored=bool(read("SELECT 1 FROM kv WHERE key = 'restored'")),
        tables={name: [dict(row) for row in read(f"SELECT * FROM {name} ORDER BY 1, 2, 3")] for name in TABLES},
        chain=read_chain(db),
    )


def _batches(read: Callable[[str], list[sqlite3.Row]]) -> list[BatchRow]:
    uses: defaultdict[int, list[int]] = defaultdict(list)
    for serial, group in read("SELECT serial, grp FROM uses ORDER BY serial, place"):
        uses[serial].append(group)
    replays: defaultdict[int, list[Drawn]] = defaultdict(list)
    for serial, *drawn in read("SELECT serial, grp, chance, weight FROM replays ORDER BY serial, grp"):
        replays[serial].append(Drawn(*drawn))
    candidates = {serial: n for serial, n in read("SELECT serial, candidates FROM batches")}
    decided = {serial: _decided(*about) for serial, *about in read(f"SELECT serial, {BOUND}, {SLOTS} FROM batches")}
    rows = read("SELECT serial, b, branch, version, outcome, released, fixed_at, finished_at FROM batches ORDER BY 1")
    batches = []
    for row in rows:
        serial = row["serial"]
        bound, measures, decision, tuned, damaged = decided[serial]
        batches.append(
            BatchRow(
                **_with_bools(row, "released"),
                groups=tuple(uses[serial]),
                replay=Draw(candidates[serial], tuple(replays[serial])),
                bound=bound,
                measures=measures,
                decision=decision,
                tuned=tuned,
                damaged=damaged,
            )
        )
    return batches


def _decided(bound: int, *about: Any) -> tuple[int, Measures | None, Decision | None, Tuned | None, str]:
    *of_it, slots, lent, why = about
    try:
        return *of_bound(bound, *of_it), of_slots(slots, lent, why), ""
    except ValueError as error:
        return bound, None, None, None, str(error)


def _with_bools(row: sqlite3.Row, *names: str) -> dict[str, Any]:
    return dict(row) | {name: bool(row[name]) for name in names}


def _pairs(packed: bytes) -> tuple[tuple[int, int], ...]:
    numbers = iter(struct.unpack(f"<{len(packed) // 8}q", packed))
    return tuple(zip(numbers, numbers, strict=True))
