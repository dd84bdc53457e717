"""Recorded episodes, from which those of a play are drawn. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from random import Random
from typing import get_args

from asyncrl.audit.ledger import LedgerRows, TrajectoryRow
from asyncrl.plan.fitting.record import Place, Record
from asyncrl.plan.times import Episode, Group, Turn
from asyncrl.trajectory import StopReason, TurnRecord


def recorded_groups(record: Record, begin: int) -> list[Group]:
    """The groups from number `begin` on whose payloads are kept, in issue order, each with all its episodes.

    An episode that was given up because its group was dropped, or that is still played, lasted at least until then: in
    its place stands one that lasted longer, drawn from the known ones. Leaving such groups out would make long episodes
    too rare (Efron, 1967: redistribution to the right).
    """
    ledger, rng = record.ledger, Random(0)
    known = {place: _episode(ledger, place, turns) for place, turns in record.turns.items()}
    by_seconds = sorted(known, key=lambda place: (_seconds(ledger, place), place))
    seconds = [_seconds(ledger, place) for place in by_seconds]
    last = max(row.received_at for row in ledger.trajectories.values())

    def member(place: Place) -> Episode:
        if place in known:
            return known[place]
        first = min(bisect_right(seconds, _lasted(ledger, place, last)), len(seconds) - 1)
        return known[by_seconds[rng.randrange(first, len(seconds))]]

    numbers = [n for n, group in ledger.groups.items() if n >= begin and group.payload]
    return [tuple(member((n, i)) for i in range(ledger.groups[n].size)) for n in numbers]


def stop_reason_of(row: TrajectoryRow) -> StopReason:
    """What the ledger has as text."""
    return next(reason for reason in get_args(StopReason) if reason == row.stop_reason)


def _lasted(ledger: LedgerRows, place: Place, now: float) -> float:
    """Seconds that the last attempt at a ticket lasted without giving a known trajectory; 0 without any."""
    attempts = ledger.attempts.get(place)
    if not attempts:
        return 0.0
    ended = attempts[-1].ended_at
    return max(0.0, (now if ended is None else ended) - attempts[-1].issued_at)


def _episode(ledger: LedgerRows, place: Place, records: Sequence[TurnRecord]) -> Episode:
    row = ledger.trajectories[place]
    inside = sum(r.generate + (r.environment or 0.0) for r in records)
    turns = tuple(Turn(r.prefilled, r.sampled, r.environment or 0.0) for r in records)
    outside = max(0.0, _seconds(ledger, place) - inside)
    return Episode(row.env, turns, outside, row.tokens, row.bytes, row.reward, stop_reason_of(row))


def _seconds(ledger: LedgerRows, place: Place) -> float:
    """From the issue of the attempt that was stored to its receipt."""
    row = ledger.trajectories[place]
    attempt = next(a for a in ledger.attempts[place] if a.attempt == row.attempt)
    return max(0.0, row.received_at - attempt.issued_at)
