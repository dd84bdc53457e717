"""Plays a record's own seconds, and compares what the buffer decides with what it decided then. Pure.

Groups of batches, numbers of groups and attempts are decided by the play; only how long things last is taken from the
record. A play of a run on one clock, of which every time is known, decides the same batch for batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from asyncrl.audit.ledger import AttemptRow, LedgerRows, TrajectoryRow
from asyncrl.buffer.rules import Rules
from asyncrl.plan.fitting.episodes import stop_reason_of
from asyncrl.plan.playing.outcome import Outcome
from asyncrl.plan.playing.simulate import Length, Play
from asyncrl.plan.playing.world import Played, Recorded, RecordedTimes
from asyncrl.plan.setting import Setting
from asyncrl.tracking.spans import Span


@dataclass(frozen=True, slots=True)
class Followed:
    recorded: Sequence[tuple[int, ...]]
    """Groups of each finished batch."""
    played: Sequence[tuple[int, ...]]
    outcome: Outcome

    @property
    def equal(self) -> int:
        """Batches that hold the same groups, up to the first that does not."""
        pairs = zip(self.recorded, self.played, strict=False)
        return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(self.recorded), len(self.played)))


def recorded_times(ledger: LedgerRows, loads: dict[str, Sequence[Span]], after_s: float = 0.0) -> RecordedTimes:
    """`loads`: the spans of that name, by actor."""
    published = {row["version"]: row["at"] for row in ledger.tables["published"]}
    took = {
        (actor, span.mark): max(0.0, span.end - published[span.mark])
        for actor, spans in loads.items()
        for span in spans
        if span.mark is not None and span.mark in published
    }
    return RecordedTimes(
        episodes={
            (a.group, a.index, a.attempt): (a.ended_at - a.issued_at, _played(ledger, a))
            for attempts in ledger.attempts.values()
            for a in attempts
            if a.ended in ("stored", "late", "failed") and a.ended_at is not None
        },
        steps={b.b: b.finished_at - b.fixed_at for b in ledger.line if b.finished_at is not None},
        publish={
            b.version_after: max(0.0, published[b.version_after] - b.finished_at)
            for b in ledger.line
            if b.finished_at is not None and b.version_after in published
        },
        loads=took,
        load_s=median(took.values()) if took else 0.0,
        after_s=after_s,
    )


def _played(ledger: LedgerRows, attempt: AttemptRow) -> Played | None:
    row = ledger.trajectories.get((attempt.group, attempt.index))
    if attempt.ended == "failed":
        return None
    if row is None or row.attempt != attempt.attempt:  # late: nobody knows what it held
        return Played("", ((attempt.min_version, 1),), 1, 1, 0.0, "done")
    return _of_row(row)


def _of_row(row: TrajectoryRow) -> Played:
    return Played(row.env, row.versions, row.tokens, row.turns, row.reward, stop_reason_of(row), row.bytes)


def follow(ledger: LedgerRows, times: RecordedTimes, rules: Rules, setting: Setting, renew_s: float = 10.0) -> Followed:
    """Plays as many batches as the record has finished. `setting`: that of the record."""
    recorded = [batch.groups for batch in ledger.line if batch.finished_at is not None]
    length = Length(0, len(recorded) - 1)
    outcome = Play(rules, setting, lambda clock: Recorded(clock, times), length, renew_s=renew_s).run()
    return Followed(recorded, outcome.batches, outcome)
