"""Recorded episodes, from which those of a play are drawn. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import replace
from operator import itemgetter
from random import Random
from typing import get_args

from asyncrl.audit.ledger import AttemptRow, LedgerRows, TrajectoryRow
from asyncrl.plan.fitting.record import Place, Record
from asyncrl.plan.times import Episode, Group, Turn
from asyncrl.trajectory import StopReason, TurnRecord


def recorded_groups(record: Record, begin: int) -> list[Group]:
    """The groups from number `begin` on whose payloads are kept, in issue order, each with all its episodes.

    An episode that ended after its group was dropped is known by its seconds alone: in its place stands a stored one of
    that length. One that was given up, or that is still played, lasted at least until then: in its place stands one
    that lasted longer, drawn from the others. Leaving such groups out would make long episodes too rare (Efron, 1967:
    redistribution to the right).
    """
    ledger, rng = record.ledger, Random(0)
    stored = {place: _episode(ledger, place, turns) for place, turns in record.turns.items()}
    pool = _Pool((_seconds(ledger, place), place, episode) for place, episode in stored.items())
    late = {
        place: seconds
        for place, attempts in ledger.attempts.items()
        if place not in stored and attempts[-1].ended == "late" and (seconds := _lasted(attempts, 0.0))
    }
    known = stored | {place: pool.lasting(seconds) for place, seconds in late.items()}
    longer = _Pool((late.get(place) or _seconds(ledger, place), place, episode) for place, episode in known.items())
    last = max(row.received_at for row in ledger.trajectories.values())

    def member(place: Place) -> Episode:
        return known.get(place) or longer.drawn(rng, _lasted(ledger.attempts.get(place, ()), last))

    numbers = [n for n, group in ledger.groups.items() if n >= begin and group.payload]
    return [tuple(member((n, i)) for i in range(ledger.groups[n].size)) for n in numbers]


class _Pool:
    """Episodes by their seconds."""

    def __init__(self, episodes: Iterable[tuple[float, Place, Episode]]) -> None:
        ordered = sorted(episodes, key=itemgetter(0, 1))
        self._seconds = [seconds for seconds, _, _ in ordered]
        self._episodes = [episode for _, _, episode in ordered]

    def drawn(self, rng: Random, seconds: float) -> Episode:
        """One that lasted longer; the longest one where none did."""
        return self._episodes[rng.randrange(self._first(seconds), len(self._episodes))]

    def lasting(self, seconds: float) -> Episode:
        """The next longer one; where there is none the longest, with as much more time in its last turn."""
        first = self._first(seconds)
        episode, more = self._episodes[first], max(0.0, seconds - self._seconds[first])
        *turns, final = episode.turns
        return replace(episode, turns=(*turns, replace(final, environment=final.environment + more)))

    def _first(self, seconds: float) -> int:
        return min(bisect_right(self._seconds, seconds), len(self._seconds) - 1)


def stop_reason_of(row: TrajectoryRow) -> StopReason:
    """What the ledger has as text."""
    return next(reason for reason in get_args(StopReason) if reason == row.stop_reason)


def _lasted(attempts: Sequence[AttemptRow], now: float) -> float:
    """Seconds that the last attempt at a ticket lasted without giving a stored trajectory; 0 without any."""
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
