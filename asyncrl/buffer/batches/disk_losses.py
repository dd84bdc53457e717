"""What the disk lost: found when the buffer opens, recorded by the first start of a learner that can go on without it.

A power cut may take what `buffer.fsync` had not flushed: the end of the payloads, nothing that a checkpoint covers, and
nothing at all under `commit`. Until a learner starts nothing is issued, and nothing is changed: a start that is refused
leaves the ledger, and so the audit, as they were.
"""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.buffer.ledger.ledger import Ledger
from asyncrl.buffer.ledger.records import lose_payload
from asyncrl.buffer.ledger.replays import retire
from asyncrl.buffer.ledger.storage.payloads import Location, PayloadLost
from asyncrl.buffer.rules import Refused
from asyncrl.buffer.scoring import rows as score_rows
from asyncrl.buffer.tickets.leases import TicketKey

SCORES = -1


@dataclass(frozen=True, slots=True)
class Lost:
    group: int
    index: int
    """`SCORES`: the scores of the group."""
    segment: int


_STORED = (
    "SELECT t.grp, t.idx, t.segment, t.start, t.bytes, t.checksum FROM groups g JOIN trajectories t "
    "ON t.grp = g.number WHERE g.payload = 1 UNION ALL "
    f"SELECT s.grp, {SCORES}, s.segment, s.start, s.bytes, s.checksum FROM groups g JOIN scores s "
    "ON s.grp = g.number WHERE g.payload = 1"
)
"""Every record that is to be there: trajectories, and scores."""


class DiskLosses:
    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._db = ledger.db
        self.pending = self._find()
        """Found missing, and not recorded."""

    @property
    def again(self) -> int:
        """How many will be generated again."""
        return sum(lost.index != SCORES and self._comes_again(lost.group) for lost in self.pending)

    def _find(self) -> list[Lost]:
        """Only the end can be missing: sizes are checked everywhere, contents in the last two segments."""
        ends = self._db.read(f"SELECT segment, max(start + bytes) FROM ({_STORED}) GROUP BY segment")
        written = dict(ends)
        cut = {segment for segment, end in written.items() if self._db.payloads.size(segment) < end}
        return [lost for segment in sorted(cut | set(sorted(written)[-2:])) for lost in self._missing(segment)]

    def _missing(self, segment: int) -> list[Lost]:
        missing = []
        columns = "grp, idx, start, bytes, checksum"
        rows = self._db.read(f"SELECT {columns} FROM ({_STORED}) WHERE segment = ?", (segment,))
        for number, index, start, size, checksum in list(rows):
            try:
                self._db.payloads.read(Location(segment, start, size, checksum))
            except PayloadLost:
                missing.append(Lost(number, index, segment))
        return missing

    def check(self, b: int, fresh: bool) -> None:
        """Raises Refused if a learner that wants batch b next cannot go on without what is lost, or if the loss is one
        that `buffer.fsync` does not allow. `fresh`: the batches from b on are not redone."""
        if not self.pending:
            return
        remedy = (
            f"Nothing was changed. Put the files of {self._db.payloads.folder} back; or move {self._db.path.parent} "
            "away and resume: the newest checkpoint's copy is used, as a new branch"
        )
        first = self.pending[0]
        what = f"{len(self.pending)} stored trajectories are missing, the first of group {first.group}"
        if self._db.fsync == "commit":
            raise Refused("payload_lost", f"{what}; under buffer.fsync commit no power cut takes any. {remedy}")
        redone = {number: batch.b for batch in self._ledger.history.line[b:] for number in batch.groups}
        for lost in self.pending:
            if lost.segment <= self._covered and (lost.group in redone or lost.group in self._ledger.live):
                raise Refused(
                    "payload_lost",
                    f"{what}; group {lost.group} is still needed, and a checkpoint covered its segment {lost.segment}, "
                    f"so no power cut took it. {remedy}",
                )
        needed = sorted(redone[lost.group] for lost in self.pending if lost.group in redone)
        if needed and not fresh:
            raise Refused(
                "payload_lost",
                f"batch {needed[0]} cannot be handed out again: {what}. {remedy}; or resume with --fresh, which does "
                "not redo it",
            )

    def record(self, b: int) -> list[TicketKey]:
        """Records what the mode allows to be lost; returns the tickets to issue again. A group that has ended, and that
        a checkpoint covered, stays as it is: its missing payload is a violation, and no learner needs it."""
        redone = {number for batch in self._ledger.history.line[b:] for number in batch.groups}
        again = []
        for lost in self.pending:
            if self._comes_again(lost.group):
                score_rows.lose(self._db, lost.group)  # of other trajectories than those that come
                if lost.index == SCORES:
                    continue
                self._ledger.lose(self._ledger.live[lost.group], lost.index)
                again.append((lost.group, lost.index))
            elif lost.segment > self._covered or lost.group in redone:
                group = self._ledger.live.get(lost.group)
                if group is not None and group.state == "waiting":
                    retire(self._ledger, group, "no_payload")
                lose_payload(self._ledger.db, lost.group, lost.index)
        self.pending = []
        return again

    def _comes_again(self, number: int) -> bool:
        """In flight or waiting, and in no batch before. One that was trained on before ends as trained."""
        group = self._ledger.live.get(number)
        return group is not None and group.state != "assigned" and not group.uses

    @property
    def _covered(self) -> int:
        """The last segment that the newest checkpoint covers: everything up to it was flushed."""
        return int(self._db.get(COVERED) or -1)


COVERED = "covered_segment"
"""Key of the last segment that the newest checkpoint covers."""
