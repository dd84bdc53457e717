"""What this scorer put and was told is stored: evidence for the audit that only the scorer writes."""

from __future__ import annotations

from typing import Any

from asyncrl.process.numbered_log import NumberedLog
from asyncrl.wire.teacher_scores import GroupScores


class ScoreLog(NumberedLog):
    """`scores/<scorer>.jsonl`:

        {"n": 0, "put": {...}}      before scores are put: of which group and trajectories, their teacher and digest
        {"n": 1, "stored": {...}}   behind the acknowledgement that they are stored

    Scores carry the place of their line and a digest of the log up to it, and the ledger keeps both.
    """

    def announced(self, scores: GroupScores) -> GroupScores:
        """The scores with the place of their line, which the log keeps when this returns."""
        about = {"branch": scores.branch, "teacher": scores.teacher, "trajectories": list(scores.trajectories)}
        self._append({"put": _named(scores) | about})
        self.flush_now()
        return scores.with_line(self._last)

    def write(self, scores: GroupScores) -> None:
        """The buffer acknowledged that they are stored."""
        self._append({"stored": _named(scores)})


def _named(scores: GroupScores) -> dict[str, Any]:
    return {"group": scores.group, "attempt": scores.attempt, "digest": scores.digest()}
