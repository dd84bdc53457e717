"""The chain of commits: every row of the ledger is what the recorded changes make of an empty one, in their order."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import cache
from itertools import groupby
from operator import itemgetter
from typing import Any

import msgspec

from asyncrl.audit.chain import ChainRows, rows_of
from asyncrl.audit.ledger import LedgerRows
from asyncrl.audit.table import Check, apply
from asyncrl.audit.witnesses import SnapshotHead
from asyncrl.buffer.ledger.storage import schema
from asyncrl.buffer.ledger.storage.chain import BEGIN, DEFINITION, Change, head_after, shortened

_SHOWN = 5
"""Rows of one table that are named."""
_ALLOWED = {
    sqlite3.SQLITE_INSERT, sqlite3.SQLITE_UPDATE, sqlite3.SQLITE_DELETE, sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ,
    sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_TRANSACTION,
}  # fmt: skip
"""What a recorded statement may do."""
_changes = msgspec.msgpack.Decoder(list[Change])


def chain(ledger: LedgerRows, snapshots: Sequence[SnapshotHead]) -> Iterator[str]:
    return apply(CHAIN, ledger, snapshots)


def heads_follow(ledger: LedgerRows, _: Sequence[SnapshotHead]) -> Iterator[str]:
    """Commits are numbered without gaps, and the head of each follows from the one before and its changes."""
    head = BEGIN
    for place, commit in enumerate(ledger.chain.commits if ledger.chain else (), 1):
        if commit.seq != place:
            yield f"commit {place} is missing from the ledger: commits are numbered without gaps"
            return
        head = head_after(head, commit.changes)
        if commit.head != head:
            yield f"commit {place} has head {commit.head}; the commits up to it make {head}"
            return  # every later one differs as well


def rows_are_what_was_committed(ledger: LedgerRows, _: Sequence[SnapshotHead]) -> Iterator[str]:
    """Applied to an empty ledger, the recorded changes give every row of every table."""
    if ledger.chain is None:
        return
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as db:
        db.deserialize(_empty())
        db.set_authorizer(lambda action, *_: sqlite3.SQLITE_OK if action in _ALLOWED else sqlite3.SQLITE_DENY)
        db.execute("BEGIN")  # one transaction, not one for each statement
        if problem := _apply(db, ledger.chain):
            yield problem
            return
        known = {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        for table, rows in ledger.chain.rows.items():
            if table in known:
                yield from _differences(db, table, rows)
            else:
                yield f"the ledger has a table {table}, which no version of asyncrl makes"


def snapshots_are_of_this_chain(ledger: LedgerRows, snapshots: Sequence[SnapshotHead]) -> Iterator[str]:
    """The ledger in each checkpoint ends with a commit of this ledger, unless the host was lost behind it."""
    heads = {commit.seq: commit.head for commit in (ledger.chain.commits if ledger.chain else ())}
    for s in snapshots:
        at = ledger.restored_at(s.branch)
        if heads.get(s.seq) != s.head and (at is None or s.batch <= at[0]):
            yield f"{s.checkpoint}/buffer ends with commit {s.seq}, {s.head}; the ledger has {heads.get(s.seq)} there"
        if s.batches < s.batch:
            yield f"{s.checkpoint}/buffer has {s.batches} finished batches; the learner had done {s.batch}"


def _apply(db: sqlite3.Connection, chain: ChainRows) -> str | None:
    """Why the changes cannot be applied."""
    statements: list[str] = []
    for commit in chain.commits:
        try:
            for number, changes in groupby(_changes.decode(commit.changes), itemgetter(0)):
                if number == DEFINITION:
                    _define(statements, changes)
                else:
                    db.executemany(statements[number - 1], (values for _, values in changes))
        except (msgspec.MsgspecError, sqlite3.Error, LookupError, TypeError) as error:
            return f"commit {commit.seq} cannot be applied again: {error!r}"
    return None


def _define(statements: list[str], changes: Iterator[tuple[int, Any]]) -> None:
    """Adds the statements that these changes define; one without a statement forgets all before it."""
    for _, values in changes:
        if values:
            statements.append(*values)
        else:
            statements.clear()


def _differences(db: sqlite3.Connection, table: str, rows: list[tuple[Any, ...]]) -> Iterator[str]:
    expected = rows_of(db, table)
    if expected == rows:
        return
    about = _columns(table)
    names = [row[1] for row in about]
    keys = [place for place, row in enumerate(about) if row[5]]
    by_key, found = _by_key(expected, keys), _by_key(rows, keys)
    differing = [key for key in by_key | found if not _same(by_key.get(key), found.get(key))]
    for key in differing[:_SHOWN]:
        where = ", ".join(f"{names[place]} {value}" for place, value in zip(keys, key, strict=True))
        yield f"{table} ({where}) {_how(names, by_key.get(key), found.get(key))}"
    if len(differing) > _SHOWN:
        yield f"{len(differing) - _SHOWN} more rows of {table} are not what was committed"


@cache
def _empty() -> bytes:
    """A ledger without rows, as SQLite keeps it: to define every table takes six times as long as to read this."""
    with closing(sqlite3.connect(":memory:")) as db:
        db.executescript(schema.TABLES)
        return db.serialize()


@cache
def _columns(table: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(":memory:")) as db:
        db.deserialize(_empty())
        return db.execute(f"PRAGMA table_info({table})").fetchall()


def _by_key(rows: list[tuple[Any, ...]], keys: list[int]) -> dict[tuple[Any, ...], tuple[Any, ...]]:
    return {tuple(row[place] for place in keys): row for row in rows}


def _same(expected: tuple[Any, ...] | None, row: tuple[Any, ...] | None) -> bool:
    if expected is None or row is None:
        return expected is row
    return all(b in (a, shortened(a)) for a, b in zip(row, expected, strict=True))


def _how(names: list[str], expected: tuple[Any, ...] | None, row: tuple[Any, ...] | None) -> str:
    if expected is None or row is None:
        return "was never committed" if expected is None else "is missing, and was committed"
    changed = [place for place, value in enumerate(row) if expected[place] not in (value, shortened(value))]
    return "; ".join(f"has {names[p]} {_brief(row[p])}, {_brief(expected[p])} was committed" for p in changed)


def _brief(value: Any) -> str:
    return repr(value)[:80]


CHAIN: tuple[Check, ...] = (heads_follow, rows_are_what_was_committed, snapshots_are_of_this_chain)
