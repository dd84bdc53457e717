"""Changes of an automatic bound on staleness and of tuned slots, each told once: for events, `asyncrl why` and the
report."""

from __future__ import annotations

from collections.abc import Iterator

from asyncrl.buffer.bounds.automatic import changed
from asyncrl.buffer.ledger.ledger import Ledger
from asyncrl.buffer.ledger.records import Batch


class Changes:
    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._last = 0
        """The serial of the last batch that has ended and was looked at, now or before this process began."""
        self._told: dict[int, Batch] = {}
        """By its number, the batch with the change that was told last."""
        self._new()

    def news(self) -> Iterator[tuple[str, int, int, str]]:
        """(bound or slots, version, number, why) of each change since the last call: the version that the learner had
        then, and the bound under which groups are admitted, or the slots of each actor, from there on. What a branch
        takes over is not told again."""
        for batch in self._new():
            if batch.decision is not None and batch.decision.why:
                yield "bound", batch.version_after, batch.decision.target, batch.decision.why
            if batch.tuned is not None and batch.tuned.why:
                yield "slots", batch.version_after, batch.tuned.slots, batch.tuned.why

    def _new(self) -> list[Batch]:
        new = [batch for batch in self._ledger.history.line if batch.outcome and batch.serial > self._last]
        self._last = max((batch.serial for batch in new), default=self._last)
        found = [batch for batch in new if changed(batch) and not self._is_taken_over(batch)]
        self._told |= {batch.b: batch for batch in found}
        return found

    def _is_taken_over(self, batch: Batch) -> bool:
        told = self._told.get(batch.b)
        return told is not None and (told.groups, told.measures, told.decision) == (
            batch.groups,
            batch.measures,
            batch.decision,
        )
