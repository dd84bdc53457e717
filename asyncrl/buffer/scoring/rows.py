"""Scores and the leases of groups to scorers as rows of the ledger's tables `scores`, `scorings` and `score_uses`."""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.buffer.ledger.storage.database import Database
from asyncrl.buffer.ledger.storage.payloads import Location
from asyncrl.wire.teacher_scores import GroupScores

_SCORES = "grp, attempt, scorer, teacher, digest, segment, start, bytes, checksum"
TEACHER = "teacher"
"""Key of the digest of the teacher whose scores the ledger holds."""


@dataclass(frozen=True, slots=True)
class Scored:
    """The stored scores of one group."""

    group: int
    attempt: int
    scorer: str
    teacher: str
    digest: str
    location: Location


def insert(db: Database, scores: GroupScores, digest: str, at: Location) -> Scored:
    logged = (None, None) if scores.logged is None else (scores.logged.line, scores.logged.digest)
    named = (scores.group, scores.attempt, scores.scorer, scores.teacher, digest)
    db.write(
        f"INSERT INTO scores({_SCORES}, line, head, received_at) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (*named, at.segment, at.start, at.bytes, at.checksum, *logged, db.wall_clock()),
    )
    return Scored(*named, at)


def read(db: Database, where: str, values: tuple[int, ...] = ()) -> dict[int, Scored]:
    """By group; `where` is a condition on `groups g`."""
    rows = db.read(f"SELECT {_SCORES} FROM groups g JOIN scores ON grp = g.number WHERE {where}", values)
    found = {}
    for number, attempt, scorer, teacher, digest, *at in rows:
        found[number] = Scored(number, attempt, scorer, teacher, digest, Location(*at))
    return found


def lose(db: Database, number: int) -> None:
    """The scores of a group, or what they are of, are gone: it is scored again."""
    db.write("DELETE FROM scores WHERE grp = ?", (number,))
    db.write("UPDATE scorings SET ended = 'lost' WHERE grp = ? AND ended = 'scored'", (number,))


def issued(db: Database) -> int:
    """How many leases of groups were ever issued."""
    ((count,),) = db.read("SELECT count(*) FROM scorings")
    return int(count)


def begin(db: Database, number: int, scorer: str, serial: int) -> int:
    """Records a new lease of a group, `serial` in the order of issue; returns its attempt."""
    ((attempt,),) = db.read("SELECT count(*) FROM scorings WHERE grp = ?", (number,))
    db.write(
        "INSERT INTO scorings(grp, attempt, scorer, serial, issued_at) VALUES (?, ?, ?, ?, ?)",
        (number, attempt, scorer, serial, db.wall_clock()),
    )
    return int(attempt)


def end(db: Database, number: int, attempt: int, how: str) -> None:
    """How: scored, late, lapsed, returned, revoked. The first ending stays unless a put comes after it."""
    put = how in ("scored", "late")
    db.write(
        "UPDATE scorings SET ended = ?, ended_at = ? WHERE grp = ? AND attempt = ?"
        + (" AND ended IS NOT 'lost'" if put else " AND ended IS NULL"),
        (how, db.wall_clock(), number, attempt),
    )


def scorer_of(db: Database, number: int, attempt: int) -> str | None:
    """Whose lease an attempt was; None: it was never issued."""
    rows = db.read("SELECT scorer FROM scorings WHERE grp = ? AND attempt = ?", (number, attempt))
    return next((str(scorer) for (scorer,) in rows), None)


def is_lost(db: Database, number: int, attempt: int) -> bool:
    """Whether what this attempt had brought was lost: the group is scored under another one."""
    query = "SELECT 1 FROM scorings WHERE grp = ? AND attempt = ? AND ended = 'lost'"
    return bool(list(db.read(query, (number, attempt))))


def outstanding(db: Database) -> list[tuple[int, int, str]]:
    """(group, attempt, scorer) of the leases that have not ended."""
    return list(db.read("SELECT grp, attempt, scorer FROM scorings WHERE ended IS NULL ORDER BY serial"))


def use(db: Database, serial: int, group: int, digest: str) -> None:
    """A batch takes a group with these scores."""
    db.write("INSERT INTO score_uses VALUES (?, ?, ?)", (serial, group, digest))
