"""Fits the times of a plan to a record, and says what the record itself measured. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from statistics import fmean

from asyncrl.audit.ledger import BatchRow, LedgerRows
from asyncrl.plan.fitting.engine_speed import engine_fit
from asyncrl.plan.fitting.episodes import recorded_groups
from asyncrl.plan.fitting.learner_times import learner_times, load_times
from asyncrl.plan.fitting.record import Record
from asyncrl.plan.times import Measured, Times

SETTLE = 4
"""Training steps at the start of a run that are left out: processes warm up, and the buffer fills."""


@dataclass(frozen=True, slots=True)
class Fit:
    times: Times
    measured: Measured
    engine_error: float
    """Standard deviation of the engine model's residuals, over the mean seconds of a turn."""


def fit(record: Record) -> Fit:
    """The times of the part of a run whose payloads are kept. `read` has refused a record that says too little."""
    ledger = record.ledger
    begin, batches = _window(record)
    groups = recorded_groups(record, begin)
    engine = engine_fit(ledger, {place: turns for place, turns in record.turns.items() if place[0] >= begin})
    learner, compute_s = learner_times(record, batches)
    load_s, pause_s = load_times(record)
    ended = [a.ended for attempts in ledger.attempts.values() for a in attempts]
    attempts = sum(how in ("stored", "failed") for how in ended)
    times = Times(
        groups=groups,
        engine=engine.times,
        learner=learner,
        load_s=load_s,
        pause_s=pause_s,
        failed=ended.count("failed") / attempts,
        background=sum(record.mean(f"system/cpu/{role}") or 0.0 for role in ("buffer", "launcher")),
    )
    measured = Measured(
        step_s=_pace(batches), staleness=_staleness(ledger, batches), dropped=_dropped(ledger, begin),
        generate_s=engine.generate_s, compute_s=compute_s, episodes=len(record.turns), steps=len(batches),
        actors=_actors(ledger, begin),
    )  # fmt: skip
    return Fit(times, measured, engine.error)


def resampled(times: Times, rng: Random) -> Times:
    """The times with the groups drawn again, with replacement: how far a plan depends on which were recorded."""
    return replace(times, groups=rng.choices(times.groups, k=len(times.groups)))


def _window(record: Record) -> tuple[int, list[BatchRow]]:
    """The first group with recorded turns, after the start is left out, and the finished batches from then on."""
    ledger = record.ledger
    finished = [b for b in ledger.line if b.finished_at is not None]
    settled = finished[min(SETTLE, len(finished) - 1)].fixed_at
    issued = {n: ledger.attempts[n, 0][0].issued_at for n in ledger.groups if (n, 0) in ledger.attempts}
    kept = sorted({number for number, _ in record.turns if number in issued})
    begin = next((n for n in kept if issued[n] >= settled), kept[0])
    within = [b for b in finished if b.fixed_at >= issued[begin]]
    return begin, within if len(within) > SETTLE else finished[SETTLE:]


def _pace(batches: Sequence[BatchRow]) -> float | None:
    """Seconds per training step."""
    gaps = [b.fixed_at - a.fixed_at for a, b in itertools.pairwise(batches)]
    return fmean(gaps) if gaps and sum(gaps) > 0 else None


def _staleness(ledger: LedgerRows, batches: Sequence[BatchRow]) -> float | None:
    """Mean over the policy tokens of the batches."""
    tokens = aged = 0
    for batch in batches:
        for number in batch.groups:
            for row in ledger.members.get(number, ()):
                tokens += row.policy_tokens
                aged += sum(count * (batch.version - version) for version, count in row.versions)
    return aged / tokens if tokens else None


def _actors(ledger: LedgerRows, begin: int) -> int:
    return len({a.actor for (number, _), attempts in ledger.attempts.items() if number >= begin for a in attempts})


def _dropped(ledger: LedgerRows, begin: int) -> float:
    states = [g.state for n, g in ledger.groups.items() if n >= begin and g.state in ("trained", "dropped")]
    return states.count("dropped") / max(1, len(states))
