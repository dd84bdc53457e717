"""The ledger's chain of commits, and every row of the tables that it must give."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.buffer.ledger.storage.chain import BEGIN
from asyncrl.errors import RunError


@dataclass(frozen=True, slots=True)
class Commit:
    seq: int
    changes: bytes
    head: str


@dataclass(frozen=True, slots=True)
class ChainRows:
    commits: list[Commit]
    rows: dict[str, list[tuple[Any, ...]]]
    """Every row of the other tables, by table."""


def read_chain(db: sqlite3.Connection) -> ChainRows:
    # ANALYZE and PRAGMA optimize, which anybody may run, leave SQLite's own statistics (sqlite_stat1, ...).
    tables = db.execute(
        "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT GLOB 'sqlite_stat*' ORDER BY name"
    ).fetchall()
    return ChainRows(
        [Commit(*row) for row in db.execute("SELECT seq, changes, head FROM commits ORDER BY seq")],
        {name: rows_of(db, name) for (name,) in tables if name != "commits"},
    )


def rows_of(db: sqlite3.Connection, table: str) -> list[tuple[Any, ...]]:
    return [tuple(row) for row in db.execute(f"SELECT * FROM {table}")]


def read_head(path: Path) -> tuple[int, str, int]:
    """Number and head of the last commit in a copy of a ledger, and how many batches are done. Raises RunError."""
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro&immutable=1", uri=True)) as db:
            row = db.execute("SELECT seq, head FROM commits ORDER BY seq DESC LIMIT 1").fetchone()
            done = db.execute("SELECT count(*) FROM batches WHERE released = 0 AND outcome IS NOT NULL").fetchone()
    except sqlite3.Error as error:
        raise RunError(f"{path} cannot be read: {error}. Move that checkpoint away.") from error
    return *(row or (0, BEGIN)), done[0]
