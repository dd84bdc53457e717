"""What each rank of the learner gets of a batch: stored trajectories, and a teacher's scores of their groups."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from asyncrl.buffer.batches.batches import BatchAnswer
from asyncrl.buffer.ledger.group import Group
from asyncrl.buffer.ledger.ledger import Ledger
from asyncrl.buffer.ledger.storage.payloads import PayloadLost
from asyncrl.buffer.scoring.scoring import Scoring
from asyncrl.buffer.selection import share
from asyncrl.wire import Frame


class Shares:
    def __init__(self, ledger: Ledger, scoring: Scoring) -> None:
        self._ledger = ledger
        self._payloads = ledger.db.payloads
        self._scoring = scoring

    def trajectories(self, answer: BatchAnswer, rank: int, ranks: int) -> list[tuple[Frame, str, float]]:
        """(record, digest, weight) of each trajectory in one rank's share, group by group. Raises PayloadLost."""
        mine = self._groups(answer, rank, ranks)
        with _handed_out_again(answer):
            return [(self._payloads.read(r.location), r.digest, g.weight) for g in mine for r in g.trajectories]

    def scores(self, answer: BatchAnswer, rank: int, ranks: int) -> list[tuple[Frame, str]]:
        """(record, digest) of the scores of each group in one rank's share. Raises PayloadLost."""
        scored = [self._scoring.of(group.number) for group in self._groups(answer, rank, ranks)]
        with _handed_out_again(answer):
            return [(self._payloads.read(each.location), each.digest) for each in scored if each is not None]

    def _groups(self, answer: BatchAnswer, rank: int, ranks: int) -> list[Group]:
        if answer.batch is None or answer.state != "ready":
            return []
        groups = [group for group in map(self._ledger.load, answer.batch.groups) if group is not None]
        return [groups[place] for place in share([group.tokens for group in groups], rank, ranks)]


@contextmanager
def _handed_out_again(answer: BatchAnswer) -> Iterator[None]:
    try:
        yield
    except PayloadLost as error:
        b = "?" if answer.batch is None else answer.batch.b
        raise PayloadLost(f"batch {b} cannot be handed out again: {error}") from error
