"""Which attempts at tickets the ledger has: those that are lent, and to whom any was."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from asyncrl.buffer.ledger.group import Group
from asyncrl.buffer.ledger.storage.database import Database
from asyncrl.trajectory import TicketId

FILTERED = (
    "SELECT count(*) FROM groups g WHERE filling = ? AND (SELECT max(a.branch) FROM trajectories t JOIN attempts a "
    "USING (grp, idx, attempt) WHERE t.grp = g.number) = ?"
)
"""Groups that were filtered while a batch was filled on a branch: that on which their last trajectory was lent."""


def leased(db: Database, id: TicketId, attempt: int) -> tuple[str, int] | None:
    """The actor of an attempt, ended or not, and the oldest version that its tokens may have. None: no attempt of this
    number was lent on the branch of the ticket."""
    values = (id.group, id.index, attempt, id.branch)
    where = "WHERE grp = ? AND idx = ? AND attempt = ? AND branch = ?"
    rows = db.read(f"SELECT actor, min_version FROM attempts {where}", values)
    return next(((str(actor), int(oldest)) for actor, oldest in rows), None)


def outstanding(db: Database, live: Mapping[int, Group]) -> Iterator[tuple[TicketId, int, str, int]]:
    """(ticket, attempt, actor, min_version) of every attempt at an open ticket that has not ended."""
    columns = "branch, grp, idx, attempt, actor, min_version"
    for branch, number, index, attempt, actor, min_version in list(
        db.read(f"SELECT {columns} FROM attempts WHERE ended IS NULL")
    ):
        group = live.get(number)
        if group is not None and group.state == "in_flight" and group.stored[index] is None:
            yield TicketId(branch, number, index), attempt, actor, min_version
