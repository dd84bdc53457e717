"""Recorded turns: what the attempts at a ticket have recorded, kept until the ticket ends (`buffer.turns`).

    recorded ──> kept ──> continued   a trajectory is stored that has this turn, token for token
                   ├──> longer      an interrupted sample: the whole one is recorded, and begins with it
                   ├──> stale       its ticket's oldest token is past the bound: the ticket is issued without any
                   ├──> anew        the episode was played otherwise: another trajectory, or another recording
                   ├──> failed      the episode that recorded it, or one that continued it, failed
                   ├──> diverged    an environment that is played again answered otherwise
                   ├──> lost        the disk lost it, or one before it
                   ├──> discarded_branch    a branch began before a version of its tokens, or of one before it
                   └──> dropped     its group was dropped

    recorded = kept + continued + longer + stale + anew + failed + diverged + lost + discarded_branch + dropped

The records lie in the segments of the payloads, so they count in `buffer.max_disk_gb`; a segment stays while a ticket
keeps a record in it. An attempt that goes on behind recorded turns may have tokens as old as they are: the ledger
records it with that version.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from asyncrl.buffer.ledger.storage.database import Database
from asyncrl.buffer.ledger.storage.payloads import Location, PayloadLost, checksum
from asyncrl.buffer.rules import Refused
from asyncrl.buffer.tickets.leases import TicketKey
from asyncrl.trajectory import Trajectory
from asyncrl.trajectory.sampled_turns import turn_digest
from asyncrl.trajectory.turns import (
    Form,
    Place,
    Recorded,
    RecordedAnswer,
    RecordedReset,
    RecordedSample,
    successors,
    tokens_digest,
)
from asyncrl.wire import WireError
from asyncrl.wire.turns import StoredTurn, decode_carried, kept_bytes, snapshot_bytes

End = Literal["continued", "longer", "stale", "anew", "failed", "diverged", "lost", "discarded_branch", "dropped"]
USED = ("continued", "longer")
_COLUMNS = "attempt, number, form, sampled, oldest, newest, tokens, segment, start, bytes, checksum, serial"


@dataclass(frozen=True, slots=True)
class _Kept:
    attempt: int
    """The attempt that recorded it."""
    number: int
    form: Form
    sampled: int
    """Number of sampled tokens."""
    oldest: int | None
    """Oldest version among them."""
    newest: int | None
    tokens: str | None
    """Digest of the sampled tokens; None: of an answer."""
    at: Location
    serial: int

    @property
    def place(self) -> Place:
        return self.number, self.form in ("reset", "answer")


class Turns:
    """Changes go through the ledger's open transaction."""

    def __init__(self, db: Database, most_bytes: float) -> None:
        """`most_bytes`: of all payloads, up to which turns are stored."""
        self._db, self.most_bytes = db, most_bytes
        self._kept: dict[TicketKey, list[_Kept]] = {}
        rows = db.read(f"SELECT grp, idx, {_COLUMNS} FROM turns WHERE ended IS NULL ORDER BY serial")
        for group, index, attempt, number, form, sampled, oldest, newest, tokens, *at, serial in rows:
            about = (attempt, number, form, sampled, oldest, newest, tokens, Location(*at), serial)
            self._kept.setdefault((group, index), []).append(_Kept(*about))
        self.counts: Counter[str] = Counter()
        """All records, by how they ended; `kept`: they have not."""
        self.wasted = 0
        """Sampled tokens that are in no trajectory."""
        self.resumed = 0
        """Tickets issued with recorded turns, since this process began."""
        self.carried_tokens = 0
        """Sampled tokens that these carried."""
        self.carried_bytes = 0
        """Bytes that these carried."""
        ended = db.read("SELECT ended, count(*), sum(sampled) FROM turns GROUP BY 1")
        for how, count, sampled in ended:
            self.counts[how or "kept"] = count
            self.wasted += 0 if how is None or how in USED else sampled
        self._serial = sum(self.counts.values())

    @property
    def recorded(self) -> int:
        return sum(self.counts.values())

    def record(self, key: TicketKey, attempt: int, turn: StoredTurn) -> bool:
        """Keeps a turn of the attempt that holds the ticket; False: the disk has no room for it, and nothing has
        changed. Nor does a repeat change anything. Raises Refused for one that cannot come behind what is kept."""
        chain, record = self._kept.get(key, []), turn.record
        frame = kept_bytes(turn)
        if any((k.attempt, k.place, k.at.checksum) == (attempt, record.place, checksum(frame)) for k in chain):
            return True
        begins = bool(chain) and chain[-1].attempt != attempt and isinstance(record, RecordedReset)
        last = None if begins or not chain else chain[-1]
        _check_place(record, key, attempt, last)
        if self._db.payloads.bytes + len(frame) > self.most_bytes:
            return False
        if begins:
            self.end(key, "anew")
        elif last is not None and last.form == "partial":
            self._end_from(key, len(chain) - 1, "longer" if self._begins(last, record) else "anew")
        self._keep(key, attempt, record, frame)
        return True

    def _keep(self, key: TicketKey, attempt: int, record: Recorded, frame: bytes) -> None:
        sampled, oldest, newest, tokens = 0, None, None, None
        if isinstance(record, RecordedSample):
            sampled, tokens, (oldest, newest) = len(record.token_ids), record.digest(), record.span
        at = self._db.payloads.append(frame)
        kept = _Kept(attempt, record.place[0], record.form, sampled, oldest, newest, tokens, at, self._serial)
        about = (attempt, kept.number, kept.form, sampled, oldest, newest, tokens)
        where = (at.segment, at.start, at.bytes, at.checksum, kept.serial)
        self._db.write(
            f"INSERT INTO turns(grp, idx, {_COLUMNS}, at) VALUES ({', '.join('?' * 15)})",
            (*key, *about, *where, self._db.wall_clock()),
        )
        self._serial += 1
        self._kept.setdefault(key, []).append(kept)
        self.counts["kept"] += 1

    def for_attempt(self, key: TicketKey, version: int, max_age: float) -> tuple[tuple[Recorded, ...], int | None]:
        """The turns of a ticket that is issued, and the oldest version among their tokens, unless that is older than
        `max_age` by now. Of the snapshots, only the last."""
        chain = self._kept.get(key, [])
        oldest = _oldest(chain)
        if oldest is not None and version - oldest > max_age:
            self.end(key, "stale")
            return (), None
        records: list[Recorded] = []
        for place, kept in enumerate(chain):
            try:
                records.append(decode_carried(self._db.payloads.read(kept.at)))
            except (PayloadLost, WireError):
                self._end_from(key, place, "lost")
                break
        if records:
            self.resumed += 1
            self.carried_tokens += sum(kept.sampled for kept in self._kept[key])
        carried = _with_one_snapshot(records)
        unsent = (record for record, sent in zip(records, carried, strict=True) if record is not sent)
        snapshots = sum(snapshot_bytes(r.snapshot) for r in unsent if isinstance(r, RecordedReset | RecordedAnswer))
        self.carried_bytes += sum(kept.at.bytes for kept in self._kept.get(key, ())) - snapshots
        return carried, _oldest(self._kept.get(key, []))

    def oldest(self, key: TicketKey) -> int | None:
        """The oldest version among the tokens of a ticket's turns."""
        return _oldest(self._kept.get(key, ()))

    def received(self, trajectory: Trajectory) -> None:
        """A trajectory is stored: the turns of its ticket end, each as continued if the trajectory has it."""
        key = trajectory.id.group, trajectory.id.index
        chain = self._kept.get(key, [])
        other = next((place for place, kept in enumerate(chain) if not _has(trajectory, kept)), len(chain))
        if other < len(chain):
            self._end_from(key, other, "anew")
        self.end(key, "continued")

    def end(self, key: TicketKey, how: End) -> None:
        """Ends all turns of a ticket. Does nothing if it has none."""
        if key in self._kept:
            self._end_from(key, 0, how)

    def drop(self, group: int, size: int) -> None:
        """Ends the turns of a group."""
        if self._kept:
            for index in range(size):
                self.end((group, index), "dropped")

    def forked(self, version: int) -> None:
        """A branch has begun at `version`: the first turn with a later token ends, and all after it."""
        for key, chain in list(self._kept.items()):
            later = (place for place, kept in enumerate(chain) if kept.newest is not None and kept.newest > version)
            if (first := next(later, None)) is not None:
                self._end_from(key, first, "discarded_branch")

    def groups(self) -> set[int]:
        """Numbers of the groups that have recorded turns."""
        return {group for group, _ in self._kept}

    def _end_from(self, key: TicketKey, place: int, how: End) -> None:
        """Ends the records from a place in the ticket's chain on."""
        chain = self._kept[key]
        ended, self._kept[key] = chain[place:], chain[:place]
        if not self._kept[key]:
            del self._kept[key]
        self._db.write(
            "UPDATE turns SET ended = ? WHERE grp = ? AND idx = ? AND ended IS NULL AND serial >= ?",
            (how, *key, ended[0].serial),
        )
        self.counts["kept"] -= len(ended)
        self.counts[how] += len(ended)
        self.wasted += 0 if how in USED else sum(kept.sampled for kept in ended)

    def _begins(self, partial: _Kept, record: Recorded) -> bool:
        """Whether a whole sample begins with the interrupted one."""
        if not isinstance(record, RecordedSample) or len(record.token_ids) < partial.sampled:
            return False
        n = partial.sampled
        kept = None if record.kept is None else record.kept.first(n)
        first = (record.token_ids[:n], record.logprobs[:n], record.versions[:n], kept)
        return tokens_digest([first]) == partial.tokens


def _has(trajectory: Trajectory, kept: _Kept) -> bool:
    """Whether the trajectory has a recorded sample as one of its turns. An answer is as the sample before it."""
    if kept.tokens is None:
        return kept.number < trajectory.turns
    return turn_digest(trajectory, kept.number, kept.sampled if kept.form == "partial" else None) == kept.tokens


def _oldest(chain: Sequence[_Kept]) -> int | None:
    return min((kept.oldest for kept in chain if kept.oldest is not None), default=None)


def _with_one_snapshot(records: Sequence[Recorded]) -> tuple[Recorded, ...]:
    """The records, of which only the last with a snapshot keeps it: an environment is restored from there."""
    answers = [(i, r) for i, r in enumerate(records) if isinstance(r, RecordedReset | RecordedAnswer)]
    last = max((i for i, r in answers if r.snapshot is not None), default=-1)
    bare = {i: replace(r, snapshot=None) for i, r in answers if i != last}
    return tuple(bare.get(i, r) for i, r in enumerate(records))


def _check_place(record: Recorded, key: TicketKey, attempt: int, last: _Kept | None) -> None:
    """Raises Refused for a record that cannot come behind `last`, what the ticket has."""
    expected = successors(None if last is None else (last.number, last.form))
    again = last is not None and last.attempt == attempt and last.form == "partial"
    if record.place in expected and not again:
        return
    wanted = " or ".join(f"{'answer' if answer else 'intent'} {n}" for n, answer in sorted(expected))
    raise Refused(
        "bad_turn",
        f"{record.named} of attempt {attempt} at ticket {key[0]}.{key[1]} came, expected {wanted}"
        + (" of another attempt" if again else ""),
    )
