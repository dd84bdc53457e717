"""Fits times to a record: engine speed, episodes, training steps, publication. Pure.

Engine: the seconds of a turn are regressed, without a negative coefficient, on the tokens that it sampled, on these times
the mean number of requests in flight meanwhile, and on the tokens that its engine prefilled meanwhile. Turns are laid
end to end so that the last one ends when the trajectory was stored, as in `asyncrl trace`.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from statistics import fmean, median

import numpy as np
import numpy.typing as npt

from asyncrl.audit.ledger import BatchRow, LedgerRows
from asyncrl.plan.record import Place, Record
from asyncrl.plan.times import EngineTimes, Episode, Group, LearnerTimes, Measured, Times, Turn
from asyncrl.tracking.spans import Span
from asyncrl.trajectory import TurnRecord

Float64 = npt.NDArray[np.float64]
SETTLE = 4
"""Training steps at the start of a run that are left out: processes warm up, and the buffer fills."""


@dataclass(frozen=True, slots=True)
class Fit:
    times: Times
    measured: Measured
    engine_error: float
    """Standard deviation of what the engine's model leaves of a turn's seconds, over their mean."""


@dataclass(frozen=True, slots=True)
class _Generated:
    """One turn's generation, placed in time."""

    begin: float
    end: float
    sampled: int
    prefilled: int


def fit(record: Record) -> Fit:
    """The times of a run. `read` has refused a record that says too little."""
    episodes = _episodes(record)
    generated = _generated(record.ledger, record.turns)
    rows = np.concatenate([_features(turns) for turns in generated.values() if turns])
    coefficients, left = nonnegative(rows[:, 1:], rows[:, 0])
    engine = EngineTimes(*coefficients.tolist())
    batches = [b for b in record.ledger.line if b.finished_at is not None][SETTLE:]
    learner, compute_s = _learner(record, batches)
    load_s, pause_s = _loads(record)
    ended = [a.ended for attempts in record.ledger.attempts.values() for a in attempts]
    attempts = sum(how in ("stored", "failed") for how in ended)
    times = Times(
        groups=episodes,
        engine=engine,
        learner=learner,
        load_s=load_s,
        pause_s=pause_s,
        failed=ended.count("failed") / attempts,
        background=sum(record.mean(f"system/cpu/{role}") or 0.0 for role in ("buffer", "launcher")),
    )
    measured = Measured(
        step_s=_pace(batches), staleness=record.mean("staleness/mean"), dropped=_dropped(record.ledger),
        generate_s=float(rows[:, 0].mean()), compute_s=compute_s, episodes=sum(map(len, episodes)), steps=len(batches),
    )  # fmt: skip
    return Fit(times, measured, float(left.std() / rows[:, 0].mean()))


def resampled(times: Times, rng: Random) -> Times:
    """The times with the groups drawn again, with replacement: how far a plan depends on which were recorded."""
    return Times(
        groups=rng.choices(times.groups, k=len(times.groups)), engine=times.engine, learner=times.learner,
        load_s=times.load_s, pause_s=times.pause_s, failed=times.failed, background=times.background,
    )  # fmt: skip


def nonnegative(features: Float64, target: Float64) -> tuple[Float64, Float64]:
    """Least squares with coefficients >= 0: (coefficients [k], what they leave of the target [n]).

    features: [n, k] with a k of a few; every subset of the columns is tried.

    >>> nonnegative(np.array([[1.0, 1.0], [2.0, 1.0], [3.0, 1.0]]), np.array([1.0, 2.0, 3.0]))[0].round(6).tolist()
    [1.0, 0.0]
    """
    count = features.shape[1]
    best, best_left = np.zeros(count), target
    for size in range(1, count + 1):
        for columns in itertools.combinations(range(count), size):
            found, *_ = np.linalg.lstsq(features[:, columns], target, rcond=None)
            left = target - features[:, columns] @ found
            if (found >= 0).all() and (left**2).sum() < (best_left**2).sum():
                best, best_left = np.zeros(count), left
                best[list(columns)] = found
    return best, best_left


# Actors


def _episodes(record: Record) -> list[Group]:
    """The groups of the time of which payloads are kept, in issue order, each with all its episodes.

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

    begin = min(number for number, _ in known)
    numbers = [n for n, group in ledger.groups.items() if n >= begin and group.payload]
    return [tuple(member((n, i)) for i in range(ledger.groups[n].size)) for n in numbers]


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
    return Episode(row.env, turns, outside, row.tokens, row.bytes, row.reward, row.stop_reason)


def _seconds(ledger: LedgerRows, place: Place) -> float:
    """From the issue of the attempt that was stored to its receipt."""
    row = ledger.trajectories[place]
    attempt = next(a for a in ledger.attempts[place] if a.attempt == row.attempt)
    return max(0.0, row.received_at - attempt.issued_at)


def _generated(ledger: LedgerRows, turns: Mapping[Place, Sequence[TurnRecord]]) -> dict[str, list[_Generated]]:
    """The generation of every known turn, by actor."""
    found: defaultdict[str, list[_Generated]] = defaultdict(list)
    for place, records in turns.items():
        row = ledger.trajectories[place]
        at = row.received_at - sum(r.generate + (r.environment or 0.0) for r in records)
        for r in records:
            if r.sampled:
                found[row.actor].append(_Generated(at, at + r.generate, r.sampled, r.prefilled))
            at += r.generate + (r.environment or 0.0)
    return dict(found)


def _features(turns: Sequence[_Generated]) -> Float64:
    """[turns, 4]: seconds, tokens sampled, these times the requests in flight, tokens that the engine prefilled."""
    begin = np.array([t.begin for t in turns])
    end = np.array([t.end for t in turns])
    sampled = np.array([t.sampled for t in turns], np.float64)
    prefilled = np.array([t.prefilled for t in turns], np.float64)
    in_flight = _mean_in_flight(begin, end)
    order = np.argsort(begin, kind="stable")
    upto = np.concatenate([[0.0], np.cumsum(prefilled[order])])
    meanwhile = upto[np.searchsorted(begin[order], end, "left")] - upto[np.searchsorted(begin[order], begin, "left")]
    return np.stack([end - begin, sampled, sampled * in_flight, meanwhile], axis=1)


def _mean_in_flight(begin: Float64, end: Float64) -> Float64:
    """The mean number of intervals that are open during each interval, itself included.

    >>> _mean_in_flight(np.array([0.0, 1.0]), np.array([2.0, 2.0])).tolist()
    [1.5, 2.0]
    """
    times = np.concatenate([begin, end])
    change = np.concatenate([np.ones(len(begin)), -np.ones(len(end))])
    order = np.argsort(times, kind="stable")
    times, running = times[order], np.cumsum(change[order])
    area = np.concatenate([[0.0], np.cumsum(running[:-1] * np.diff(times))])
    seconds = np.maximum(end - begin, 1e-9)
    mean = (np.interp(end, times, area) - np.interp(begin, times, area)) / seconds
    result: Float64 = np.maximum(mean, 1.0)
    return result


def _loads(record: Record) -> tuple[float, float]:
    """Seconds from a publication until an actor holds it, and for how long its engine stands still meanwhile."""
    published = {row["version"]: row["at"] for row in record.ledger.tables["published"]}
    loads = [
        max(0.0, span.end - published[span.mark])
        for (_, name), spans in record.spans.items()
        if name == "load"
        for span in spans
        if span.mark in published
    ]
    if not loads:
        return 0.0, 0.0
    shares = [each["weights/paused_share"] for each in record.metrics if "weights/paused_share" in each]
    gaps = np.diff(sorted(published.values()))
    return median(loads), (fmean(shares) * float(gaps.mean()) if shares and len(gaps) else 0.0)


# The learner


def _learner(record: Record, batches: Sequence[BatchRow]) -> tuple[LearnerTimes, float]:
    """Its times, and the mean seconds of a step. Where the spans of a step are not kept, all from the fixed batch to
    the outcome counts as the step."""
    ledger, spans = record.ledger, record.spans
    steps = {s.mark: s.seconds for s in spans.get(("learner", "step"), ())}
    optimizer = {s.mark: s.seconds for s in spans.get(("learner", "optimizer"), ())}
    rows = []
    for batch in batches:
        assert batch.finished_at is not None
        took = batch.finished_at - batch.fixed_at
        step = min(steps.get(batch.b, took), took)
        tokens = sum(row.tokens for number in batch.groups for row in ledger.members.get(number, ()))
        rows.append((step, min(optimizer.get(batch.b, 0.0), step), tokens, took - step))
    fixed_s = fmean(r[1] for r in rows)
    per_token_s = sum(r[0] - r[1] for r in rows) / max(1, sum(r[2] for r in rows))
    times = LearnerTimes(fixed_s, per_token_s, fmean(r[3] for r in rows), *_after(record, batches))
    return times, fmean(r[0] for r in rows)


def _after(record: Record, batches: Sequence[BatchRow]) -> tuple[float, float, float]:
    """Seconds from the outcome to the publication, from there to the next request, and of a checkpoint."""
    published = {(r["branch"], r["version"]): r["at"] for r in record.ledger.tables["published"]}
    waits = {name: record.spans.get(("learner", f"wait: {name}"), ()) for name in ("batch", "checkpoint")}
    publish, after = [], []
    for batch, following in itertools.pairwise(batches):
        assert batch.finished_at is not None
        at = published.get((batch.branch, batch.version_after))
        if at is not None:
            publish.append(max(0.0, at - batch.finished_at))
        begin = max(batch.finished_at, at or 0.0)
        known = [_within(spans, begin, following.fixed_at) for spans in waits.values()]
        if any(spans and spans[0].begin <= begin for spans in waits.values()) and not known[1]:
            after.append(max(0.0, following.fixed_at - begin - known[0]))
    checkpoints = [s.seconds for s in waits["checkpoint"]]
    return (
        fmean(publish) if publish else 0.0, median(after) if after else 0.0, fmean(checkpoints) if checkpoints else 0.0
    )  # fmt: skip


def _within(spans: Sequence[Span], begin: float, end: float) -> float:
    """Seconds of the spans between two times."""
    return sum(max(0.0, min(s.end, end) - max(s.begin, begin)) for s in spans)


def _pace(batches: Sequence[BatchRow]) -> float | None:
    """Seconds per training step."""
    gaps = [b.fixed_at - a.fixed_at for a, b in itertools.pairwise(batches)]
    return fmean(gaps) if gaps and sum(gaps) > 0 else None


def _dropped(ledger: LedgerRows) -> float:
    states = [group.state for group in ledger.groups.values() if group.state in ("trained", "dropped")]
    return states.count("dropped") / max(1, len(states))
