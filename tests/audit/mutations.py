"""Every change of one row of a ledger, generated from the tables: of each column, and of whole rows."""

from __future__ import annotations

import math
import random
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from asyncrl.buffer.ledger.storage import schema
from asyncrl.buffer.ledger.storage.chain import Chain

PER_COLUMN = 3
"""Rows of which a column is changed."""
WORDS: dict[str, tuple[Any, ...]] = {
    "groups.state": ("in_flight", "waiting", "assigned", "trained", "dropped"),
    "groups.reason": (None, "stale", "filtered", "env_error", "wait_deadline", "guard", "poison", "discarded_branch"),
    "attempts.ended": (None, "stored", "late", "lapsed", "released", "failed", "revoked", "lost"),
    "turns.form": ("reset", "partial", "sample", "summary", "answer"),
    "turns.ended": (
        None,
        "continued",
        "longer",
        "stale",
        "anew",
        "failed",
        "diverged",
        "lost",
        "discarded_branch",
        "dropped",
    ),
    "retired.why": ("stale", "yielded", "no_payload"),
    "scorings.ended": (None, "scored", "late", "lapsed", "returned", "revoked", "lost"),
    "batches.outcome": (None, "applied", "guard", "poison"),
    "evals.state": ("open", "done", "restarted", "failed"),
    "counters.name": ("duplicate", "late", "lost"),
}
"""Values of a column, where they are not just any."""
FAR = {"turns.serial": 1000, "lengths.serial": 1000, "retired.serial": 1000, "scores.grp": 1000}
"""What is added to a number whose neighbours are taken."""


EVERY_ROW = (
    "attempts", "attempts.idx", "batches.measures", "batches.since", "checkpoints.batch", "eval_results", "retired.grp",
    "retired.why", "scores.bytes", "scores.checksum", "scorings", "scorings.grp",
    "scorings.scorer",
)  # fmt: skip
"""Columns that are changed in every row, and swapped between neighbours, and the tables of which every row is left out
once: few of their rows bear it, and the list in audit.md must not depend on which ones a sample holds."""


CHAIN = "commits"
"""The table of the chain over the others."""


@dataclass(frozen=True, slots=True)
class Column:
    table: str
    name: str
    kind: str
    key: bool

    def __str__(self) -> str:
        return f"{self.table}.{self.name}"


@dataclass(frozen=True, slots=True)
class Mutation:
    what: str
    """`table.column` or `table`, and how it is changed."""
    where: str
    statements: tuple[tuple[str, tuple[Any, ...]], ...]


@cache
def columns() -> list[Column]:
    """Every column of every table, from the schema."""
    with closing(sqlite3.connect(":memory:")) as db:
        db.executescript(schema.TABLES)
        tables = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        return [
            Column(table, name, kind, bool(key))
            for table in tables
            for _, name, kind, _, _, key in db.execute(f"PRAGMA table_info({table})")
        ]


def mutations(db: sqlite3.Connection) -> Iterator[Mutation]:
    """Those of the rows in this ledger; rows are chosen at random, the same at every call."""
    rng = random.Random(0)
    by_table: dict[str, list[Column]] = {}
    for column in columns():
        by_table.setdefault(column.table, []).append(column)
    for table, of_it in by_table.items():
        rows = [dict(row) for row in db.execute(f"SELECT * FROM {table}")]
        for column in of_it:
            for row in rng.sample(rows, min(PER_COLUMN, len(rows))):
                yield from _changed(column, row, rows, of_it, rng)
            if not column.key:
                yield from _swapped(column, rows, of_it, rng)
        for row in rng.sample(rows, min(PER_COLUMN, len(rows))):
            yield _left_out(table, row, of_it)
            yield _again(table, row, rows, of_it)
        yield from _of_every_row(table, rows, of_it)


def _of_every_row(table: str, rows: list[dict[str, Any]], of_it: list[Column]) -> Iterator[Mutation]:
    for column in of_it:
        rng = random.Random(str(column))
        for row in rows if str(column) in EVERY_ROW else ():
            yield from _changed(column, row, rows, of_it, rng)
        for a, b in pairwise(rows) if str(column) in EVERY_ROW and not column.key else ():
            if a[column.name] != b[column.name]:
                yield _swap(column, a, b, of_it)
    for row in rows if table in EVERY_ROW else ():
        yield _left_out(table, row, of_it)


def _left_out(table: str, row: dict[str, Any], of_it: list[Column]) -> Mutation:
    where, key = _place(row, of_it)
    return Mutation(f"{table}: a row less", _named(row, of_it), ((f"DELETE FROM {table} {where}", key),))


def copied(ledger: Path) -> sqlite3.Connection:
    """A copy in memory, to be changed."""
    copy = sqlite3.connect(":memory:", isolation_level=None)
    copy.row_factory = sqlite3.Row
    with closing(sqlite3.connect(f"{ledger.absolute().as_uri()}?mode=ro", uri=True)) as db:
        db.backup(copy)
    return copy


@contextmanager
def applied(mutation: Mutation, db: sqlite3.Connection) -> Iterator[bool]:
    """Within it the ledger is changed, and behind it as it was. False: the tables do not allow the change."""
    db.execute("BEGIN")
    try:
        for statement, values in mutation.statements:
            assert db.execute(statement, values).rowcount == 1, mutation
        allowed = True
    except sqlite3.IntegrityError:
        allowed = False
    try:
        yield allowed
    finally:
        db.execute("ROLLBACK")


def mend(folder: Path) -> None:
    """Writes the chain of commits anew, so that it gives the tables as they are now."""
    with closing(sqlite3.connect(folder / "ledger.sqlite")) as db, db:
        db.execute("PRAGMA synchronous = OFF")
        mend_in(db)


def mend_in(db: sqlite3.Connection) -> None:
    db.execute("DELETE FROM commits")
    chain = Chain(db)
    for table in dict.fromkeys(column.table for column in columns()):
        for row in db.execute(f"SELECT * FROM {table}").fetchall() if table != CHAIN else ():
            chain.note(f"INSERT INTO {table} VALUES ({', '.join('?' * len(row))})", tuple(row))
    chain.seal()


def _changed(
    column: Column, row: dict[str, Any], rows: list[dict[str, Any]], of_it: list[Column], rng: random.Random
) -> Iterator[Mutation]:
    was = row[column.name]
    for value in _others(column, was, rng):
        yield _set(column, row, value, of_it, "another value")


def _others(column: Column, was: Any, rng: random.Random) -> list[Any]:
    if str(column) in WORDS:
        return rng.sample([word for word in WORDS[str(column)] if word != was], 2)
    if isinstance(was, bytes):
        return [bytes([was[0] ^ 1]) + was[1:], was[:-1] + bytes([was[-1] ^ 1])]
    if isinstance(was, str):
        return [str(int(was) + 1)] if was.isdigit() else [f"{was[:-1]}{'0' if was[-1:] != '0' else '1'}"]
    if was is None:
        return [1 if column.kind == "INTEGER" else "x"]
    if str(column) in FAR:
        return [was + FAR[str(column)]]
    if column.kind == "INTEGER":
        return [was + 1, was - 1] if was else [1]
    return [was + 0.5, was - 0.25]


def _swapped(column: Column, rows: list[dict[str, Any]], of_it: list[Column], rng: random.Random) -> Iterator[Mutation]:
    pairs = [(a, b) for i, a in enumerate(rows) for b in rows[i + 1 :] if a[column.name] != b[column.name]]
    for a, b in rng.sample(pairs, min(2, len(pairs))):
        if column.kind == "REAL" and math.isclose(a[column.name] or 0.0, b[column.name] or 0.0):
            continue  # equal but for rounding
        yield _swap(column, a, b, of_it)


def _swap(column: Column, a: dict[str, Any], b: dict[str, Any], of_it: list[Column]) -> Mutation:
    there, back = _set(column, a, b[column.name], of_it, ""), _set(column, b, a[column.name], of_it, "")
    return Mutation(f"{column}: swapped", f"{there.where} and {back.where}", there.statements + back.statements)


def _set(column: Column, row: dict[str, Any], value: Any, of_it: list[Column], how: str) -> Mutation:
    where, key = _place(row, of_it)
    statement = f"UPDATE {column.table} SET {column.name} = ? {where}"
    shown = "bytes" if isinstance(value, bytes) else repr(value)
    return Mutation(f"{column}: {how}", f"{_named(row, of_it)} -> {shown}", ((statement, (value, *key)),))


def _again(table: str, row: dict[str, Any], rows: list[dict[str, Any]], of_it: list[Column]) -> Mutation:
    """The row once more, under the next key."""
    last = [column for column in of_it if column.key][-1]
    copy = dict(row)
    if last.kind == "INTEGER":
        copy[last.name] = max(r[last.name] for r in rows) + 1
    else:
        copy[last.name] = f"{row[last.name]}2"
    statement = f"INSERT INTO {table}({', '.join(copy)}) VALUES ({', '.join('?' * len(copy))})"
    return Mutation(f"{table}: a row twice", _named(row, of_it), ((statement, tuple(copy.values())),))


def _place(row: dict[str, Any], of_it: list[Column]) -> tuple[str, tuple[Any, ...]]:
    keys = [column.name for column in of_it if column.key]
    return f"WHERE {' AND '.join(f'{key} = ?' for key in keys)}", tuple(row[key] for key in keys)


def _named(row: dict[str, Any], of_it: list[Column]) -> str:
    return " ".join(f"{column.name} {row[column.name]}" for column in of_it if column.key)
