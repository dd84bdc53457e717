"""The turns that attempts recorded: each is of an attempt, in the order of an episode, and what became of it is so."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl.audit.ledger import LedgerRows
from asyncrl.audit.payloads import PayloadDiffers, ReadPayload, decoded
from asyncrl.audit.table import Check, apply
from asyncrl.buffer.ledger.storage.payloads import checksum
from asyncrl.buffer.tickets.carried import GIVEN_UP
from asyncrl.trajectory import Trajectory
from asyncrl.trajectory.sampled_turns import turn_digest
from asyncrl.trajectory.turns import DIVERGED, RecordedSample, successors
from asyncrl.wire import WireError
from asyncrl.wire.turns import decode_carried


@dataclass(frozen=True, slots=True)
class TurnRow:
    serial: int
    grp: int
    idx: int
    attempt: int
    number: int
    """Number of the turn; -1: the reset."""
    form: str
    sampled: int
    oldest: int | None
    newest: int | None
    tokens: str | None
    """Digest of the sampled tokens; None: an answer."""
    segment: int
    start: int
    bytes: int
    checksum: int
    at: float
    ended: str | None

    @property
    def key(self) -> tuple[int, int]:
        return self.grp, self.idx

    @property
    def place(self) -> tuple[int, bool]:
        return self.number, self.form in ("reset", "answer")


_ENDS = ("continued", "longer", "stale", "anew", "failed", "diverged", "lost", "discarded_branch", "dropped")
_FORMS = ("reset", "partial", "sample", "summary", "answer")


def turns(ledger: LedgerRows, read: ReadPayload) -> Iterator[str]:
    return apply(TURNS, ledger, read)


def turns_are_numbered(ledger: LedgerRows, _: ReadPayload) -> Iterator[str]:
    """Recorded turns are numbered without gaps, and what became of each is one of the known ends."""
    for expected, row in enumerate(_rows(ledger)):
        if row.serial != expected:
            yield f"recorded turn {expected} is missing from the ledger: they are numbered without gaps"
            return
        if row.form not in _FORMS or row.ended not in (None, *_ENDS):
            yield f"{_name(ledger, row)} is a {row.form} and ended as {row.ended}: there is no such thing"


def turns_have_attempts(ledger: LedgerRows, _: ReadPayload) -> Iterator[str]:
    """Every recorded turn is of an attempt at a ticket whose turns are recorded, with versions that its actor held."""
    for row in _rows(ledger):
        group = ledger.groups.get(row.grp)
        attempt = next((a for a in ledger.attempts.get(row.key, ()) if a.attempt == row.attempt), None)
        if attempt is None or group is None or not group.durable:
            yield f"{_name(ledger, row)} is recorded, and no such attempt was to record turns"
        elif row.oldest is not None and row.oldest < attempt.min_version:
            yield f"{_name(ledger, row)} has a token of version {row.oldest}, its attempt held {attempt.min_version}"


def turns_are_whole(ledger: LedgerRows, _: ReadPayload) -> Iterator[str]:
    """A recorded sample has tokens with their versions and a digest, an answer has none."""
    for row in _rows(ledger):
        none = row.sampled == 0 and row.oldest is None and row.newest is None
        some = row.sampled > 0 and row.oldest is not None and row.newest is not None and row.oldest <= row.newest
        fits = none and row.tokens is None if row.place[1] else row.tokens is not None and (some or none)
        if not fits or (row.form == "partial" and none) or (row.number == -1) != (row.form == "reset"):
            yield (
                f"{_name(ledger, row)}, a {row.form}, has {row.sampled} tokens of versions {row.oldest} to "
                f"{row.newest}, with the digest {row.tokens}"
            )


def turns_come_in_their_order(ledger: LedgerRows, _: ReadPayload) -> Iterator[str]:
    """The recorded turns of a ticket are in the order of one episode; what was ended may be recorded again."""
    for key, rows in _by_ticket(ledger).items():
        again = _lost(ledger, key)
        if [row.attempt for row in rows] != sorted(row.attempt for row in rows):
            yield f"turns of attempts at trajectory {ledger.name(*key)} are recorded behind those of later attempts"
        if len({(row.attempt, row.place, row.form) for row in rows}) < len(rows):
            yield f"an attempt at trajectory {ledger.name(*key)} recorded one turn twice"
        if (row := _out_of_place(rows, again)) is not None:
            yield f"{_name(ledger, row)}, a {row.form}, cannot come where it is recorded"


def _out_of_place(rows: Sequence[TurnRow], again: bool) -> TurnRow | None:
    """The first turn that cannot come behind those before it. `again`: what was stored was lost, and recorded again."""
    chain: list[TurnRow] = []
    for row in rows:
        while chain and row.place not in _next(chain[-1]) and (again or chain[-1].ended not in (None, "continued")):
            chain.pop()
        if row.place not in _next(chain[-1] if chain else None):
            return row
        chain.append(row)
    return None


def kept_turns_are_of_open_tickets(ledger: LedgerRows, _: ReadPayload) -> Iterator[str]:
    """A recorded turn that is kept is of a ticket that is still open."""
    for row in _rows(ledger):
        group = ledger.groups.get(row.grp)
        if row.ended is None and (group is None or group.state != "in_flight" or row.key in ledger.trajectories):
            yield f"{_name(ledger, row)} is kept, and its ticket is not open"


def kept_turns_are_as_recorded(ledger: LedgerRows, read: ReadPayload) -> Iterator[str]:
    """The bytes of a recorded turn that is kept are what the ledger's row describes."""
    for row in _rows(ledger):
        if row.ended is None and (problem := _unlike(row, read)):
            yield f"{_name(ledger, row)} {problem}"


def turns_are_of_their_branch(ledger: LedgerRows, _: ReadPayload) -> Iterator[str]:
    """No recorded turn that went on behind the beginning of a branch has a version that the branch did not have."""
    for key, rows in _by_ticket(ledger).items():
        for row in rows:
            until = _last_branch(ledger, row, rows)
            newest, lent = row.newest or 0, ledger.lent_on(*key, row.attempt)
            if lent is not None and until is not None and ledger.left_behind(newest, lent, until) is not None:
                yield f"{_name(ledger, row)} has a token of version {newest}, and went on on a branch without it"


def _last_branch(ledger: LedgerRows, row: TurnRow, rows: Sequence[TurnRow]) -> int | None:
    """The last branch on which a turn went on; None: on none, or nothing says on which. `rows`: its ticket's turns."""
    whole = next((r for r in rows if row.ended == "longer" and _is_longer(r, row)), None)
    if whole is not None:
        return ledger.lent_on(*row.key, whole.attempt)
    if row.ended is None:
        return max(ledger.branches, default=0)
    stored = None if _lost(ledger, row.key) else ledger.trajectories.get(row.key)
    return stored.branch if row.ended == "continued" and stored is not None else None


def _is_longer(r: TurnRow, row: TurnRow) -> bool:
    """Whether `r` is of the turn of which `row` is the beginning."""
    return r.serial > row.serial and r.place == row.place and r.sampled >= row.sampled and r.attempt > row.attempt


def _forks(ledger: LedgerRows, row: TurnRow) -> list[tuple[int, int]]:
    """Branch and first version of each branch that began after the attempt of a turn was lent."""
    lent = ledger.lent_on(*row.key, row.attempt)
    found = ((b.branch, b.fork_version) for b in ledger.branches.values())
    return [] if lent is None else [(branch, version) for branch, version in found if branch > lent]


def continued_turns_are_stored(ledger: LedgerRows, read: ReadPayload) -> Iterator[str]:
    """A trajectory that continued recorded turns has each of them, token for token."""
    for key, rows in _by_ticket(ledger).items():
        continued = [row for row in rows if row.ended == "continued"]
        if not continued or _lost(ledger, key):
            continue
        if key not in ledger.trajectories:
            yield f"{_name(ledger, continued[0])} was continued, and no trajectory of its ticket is stored"
        elif (trajectory := _stored(ledger, key, read)) is not None:
            missing = ((row, _missing(row, trajectory)) for row in continued)
            yield from (f"{_name(ledger, row)} was continued, and {problem}" for row, problem in missing if problem)


def _lost(ledger: LedgerRows, key: tuple[int, int]) -> bool:
    """Whether the disk lost a trajectory of a ticket, which may have continued turns."""
    return any(a.ended == "lost" for a in ledger.attempts.get(key, ()))


def _stored(ledger: LedgerRows, key: tuple[int, int], read: ReadPayload) -> Trajectory | None:
    """The trajectory of a ticket; None if its payload is not kept, or is damaged, which `payloads` reports."""
    group = ledger.groups.get(key[0])
    if group is None or not group.payload:
        return None
    try:
        return decoded(group, ledger.trajectories[key], read)
    except PayloadDiffers:
        return None


def ends_have_their_reasons(ledger: LedgerRows, _: ReadPayload) -> Iterator[str]:
    """What became of a recorded turn that no trajectory has follows from its ticket's attempts and its group."""
    for rows in _by_ticket(ledger).values():
        for row in rows:
            if row.ended in _REASONS and not _REASONS[row.ended](ledger, row, rows):
                yield f"{_name(ledger, row)} ended as {row.ended}, and nothing else in the ledger says so"


def _later(ledger: LedgerRows, row: TurnRow) -> bool:
    """Whether the ticket was issued again."""
    return any(a.attempt > row.attempt for a in ledger.attempts.get(row.key, ()))


def _failed(ledger: LedgerRows, row: TurnRow, diverged: bool) -> bool:
    """Whether an attempt has failed for that reason. One that was put all the same tells no reason any more."""
    attempts = [a for a in ledger.tables["attempts"] if (a["grp"], a["idx"]) == row.key and a["attempt"] >= row.attempt]
    reasons = [str(a["detail"]).partition(":")[0] for a in attempts if a["ended"] == "failed"]
    failed = [reason == DIVERGED for reason in reasons if reason not in GIVEN_UP]
    return diverged in failed or any(a["ended"] in ("late", "stored") for a in attempts)


_REASONS: dict[str | None, Any] = {
    "longer": lambda ledger, row, rows: any(_is_longer(r, row) for r in rows),
    "stale": lambda ledger, row, _: _later(ledger, row),
    "lost": lambda ledger, row, _: _later(ledger, row),
    "anew": lambda ledger, row, rows: row.key in ledger.trajectories or _later(ledger, row),
    "failed": lambda ledger, row, _: _failed(ledger, row, False),
    "diverged": lambda ledger, row, _: _failed(ledger, row, True),
    "discarded_branch": lambda ledger, row, rows: any(
        r.newest is not None and r.place <= row.place and any(r.newest > version for _, version in _forks(ledger, r))
        for r in rows
    ),
    "dropped": lambda ledger, row, _: row.grp in ledger.groups and ledger.groups[row.grp].state == "dropped",
}


def _rows(ledger: LedgerRows) -> Iterator[TurnRow]:
    """In the order in which they came."""
    for row in ledger.tables.get("turns", ()):
        yield TurnRow(**row)


def _by_ticket(ledger: LedgerRows) -> dict[tuple[int, int], list[TurnRow]]:
    found: defaultdict[tuple[int, int], list[TurnRow]] = defaultdict(list)
    for row in _rows(ledger):
        found[row.key].append(row)
    return found


def _next(row: TurnRow | None) -> set[tuple[int, bool]]:
    return successors(None if row is None else (row.number, row.form))  # type: ignore[arg-type]


def _unlike(row: TurnRow, read: ReadPayload) -> str:
    """How the bytes of a record differ from its row; empty: not at all."""
    try:
        frame = read(row)
    except FileNotFoundError:
        return f"is missing: there is no segment {row.segment}"
    if len(frame) != row.bytes or checksum(frame) != row.checksum:
        return f"was changed: the bytes in segment {row.segment} have another length or checksum"
    try:
        record = decode_carried(frame)
    except WireError as error:
        return f"cannot be decoded: {error}"
    about: tuple[Any, ...] = (*record.place, record.form, 0, None, None, None)
    if isinstance(record, RecordedSample):
        about = (*record.place, record.form, len(record.versions), *record.span, record.digest())
    said = (*row.place, row.form, row.sampled, row.oldest, row.newest, row.tokens)
    return f"is {about}, the ledger says {said}" if about != said else ""


def _missing(row: TurnRow, trajectory: Trajectory) -> str:
    """What the trajectory lacks of a record; empty: nothing."""
    if row.number >= trajectory.turns:
        return f"what is stored has {trajectory.turns} turns"
    if row.tokens is None:
        return ""
    if turn_digest(trajectory, row.number, row.sampled if row.form == "partial" else None) != row.tokens:
        return "what is stored has other tokens in that turn"
    spans = trajectory.turn_rewards[row.number].spans if trajectory.turn_rewards else ()
    rows = trajectory.rows
    versions = [v for s in spans for v in rows[s.row].versions[s.start : s.start + s.tokens].tolist()]
    if spans and row.form != "partial":
        about = len(versions), min(versions), max(versions)
        said = row.sampled, row.oldest, row.newest
        if about != said:
            return f"what is stored has there (tokens, oldest, newest) {about}, the ledger says {said}"
    return ""


def _name(ledger: LedgerRows, row: TurnRow) -> str:
    return f"recorded turn {row.number} of attempt {row.attempt} at trajectory {ledger.name(row.grp, row.idx)}"


TURNS: tuple[Check, ...] = (
    turns_are_numbered,
    turns_have_attempts,
    turns_are_whole,
    turns_come_in_their_order,
    kept_turns_are_of_open_tickets,
    kept_turns_are_as_recorded,
    turns_are_of_their_branch,
    continued_turns_are_stored,
    ends_have_their_reasons,
)
