"""Changes of an automatic bound on staleness, each told once: for events, `asyncrl why` and the report."""

from __future__ import annotations

from collections.abc import Iterator

from asyncrl.buffer.ledger.ledger import Ledger


class Changes:
    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._told = max((batch.serial for batch in ledger.history.line), default=0)
        """The serial of the last batch whose decision is told, or was before this process began."""

    def news(self) -> Iterator[tuple[int, int, str]]:
        """(version, bound, why) of each change since the last call: the version that the learner had then, and the
        bound under which groups are admitted from there on."""
        line = self._ledger.history.line
        new = [batch for batch in line if batch.serial > self._told and batch.decision is not None]
        self._told = max((batch.serial for batch in new), default=self._told)
        for batch in new:
            if batch.decision is not None and batch.decision.why:
                yield batch.version_after, batch.decision.target, batch.decision.why
