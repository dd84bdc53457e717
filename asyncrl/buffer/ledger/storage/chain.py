"""The chain of commits: what each commit changed, and a digest of it over the digest of the commit before.

    commits     seq 1: changes, head      head(n) = XXH3, 128 bits, of head(n - 1) and the changes of commit n
                seq 2: changes, head      a change = (number of the statement, its values)
                ...                       (0, (sql, ...)): the next number is this statement's; each opening begins anew

A commit adds one row in its own transaction, so the head is as durable as what it covers, and a copy of the ledger (a
checkpoint's, a fork's) has the chain up to its commit. The tables are what the changes make of an empty ledger: the
audit applies them again and compares every row. A long value stands there as its digest.

It tells what was changed by accident or by an edit, not what somebody forged who writes a whole new chain.
"""

from __future__ import annotations

import sqlite3
from typing import Any

import msgspec
import xxhash

BEGIN = ""
"""The head before the first commit."""
LONGEST = 1024
"""Bytes of a blob, or characters of a text, that are kept as they are in any case."""
_PER_CHANGE = 512
"""Bytes; a commit whose changes have more on average has its longer values replaced by their digests."""
DEFINITION = 0
"""Number of the change that gives a statement its number."""

_encode = msgspec.msgpack.Encoder().encode

Change = tuple[int, tuple[Any, ...]]
"""Number of the statement, and its values."""


class Chain:
    """Changes since the last commit, in memory; the commits before, in the ledger."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        last = db.execute("SELECT seq, head FROM commits ORDER BY seq DESC LIMIT 1").fetchone()
        self.seq: int = last[0] if last else 0
        self.head: str = last[1] if last else BEGIN
        self._numbers: dict[str, int] = {}
        self._changes: list[Change] = [(DEFINITION, ())]

    def note(self, sql: str, values: tuple[Any, ...]) -> None:
        """A statement was executed in the open transaction."""
        number = self._numbers.get(sql)
        if number is None:
            number = self._numbers[sql] = len(self._numbers) + 1
            self._changes.append((DEFINITION, (sql,)))
        self._changes.append((number, values))

    def seal(self) -> None:
        """Adds the commit of the open transaction, which ends with it."""
        changes = _encode(self._changes)
        if len(changes) > _PER_CHANGE * (1 + len(self._changes)):
            changes = _encode([(number, tuple(map(shortened, values))) for number, values in self._changes])
        self.seq, self.head = self.seq + 1, head_after(self.head, changes)
        self._changes = []
        self._db.execute("INSERT INTO commits VALUES (?, ?, ?)", (self.seq, changes, self.head))


def shortened(value: Any) -> Any:
    """The value as the chain keeps it."""
    if isinstance(value, str | bytes) and len(value) > LONGEST:
        content = value.encode() if isinstance(value, str) else value
        return f"xxh3:{xxhash.xxh3_128_hexdigest(content)}"
    return value


def head_after(head: str, changes: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(head.encode() + changes)
