"""Fits the speed of engines to recorded turns. Pure.

The seconds of a turn are regressed, without a negative coefficient, on the tokens that it sampled, on these times the
mean number of requests in flight meanwhile, and on the tokens that its engine prefilled meanwhile. Turns are laid end
to end so that the last one ends when the trajectory was stored, as in `asyncrl trace`.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from asyncrl.audit.ledger import LedgerRows
from asyncrl.plan.fitting.record import Place
from asyncrl.plan.times import EngineTimes
from asyncrl.trajectory import TurnRecord

Float64 = npt.NDArray[np.float64]
_FEWEST = 32
"""Turns below which those of which much is unknown are used too."""
_KNOWN = 0.8
"""Share of the open attempts whose turns must be known for a turn to count."""


@dataclass(frozen=True, slots=True)
class EngineFit:
    times: EngineTimes
    generate_s: float
    """Mean of a turn."""
    error: float
    """Standard deviation of the model's residuals, over the mean seconds of a turn."""


@dataclass(frozen=True, slots=True)
class _Generated:
    """The generation of one turn, placed in time."""

    begin: float
    end: float
    sampled: int
    prefilled: int


def engine_fit(ledger: LedgerRows, turns: Mapping[Place, Sequence[TurnRecord]]) -> EngineFit:
    """The model of one engine from the turns of all actors."""
    rows = []
    for actor, generated in _generated(ledger, turns).items():
        features, known = _features(generated), _known(ledger, turns, actor, generated)
        features[:, 2] /= np.maximum(known, 0.1)  # requests of unknown turns were in flight as well
        rows.append(np.column_stack([features, known]))
    every = np.concatenate(rows)
    sure = every[every[:, 4] >= _KNOWN]
    used = sure if len(sure) >= _FEWEST else every
    coefficients, left = nonnegative(used[:, 1:4], used[:, 0])
    mean = float(every[:, 0].mean())
    return EngineFit(EngineTimes(*coefficients.tolist()), mean, float(left.std() / used[:, 0].mean()))


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
    in_flight = np.maximum(1.0, _open(list(zip(begin, end, strict=True)), begin, end))
    order = np.argsort(begin, kind="stable")
    upto = np.concatenate([[0.0], np.cumsum(prefilled[order])])
    meanwhile = upto[np.searchsorted(begin[order], end, "left")] - upto[np.searchsorted(begin[order], begin, "left")]
    return np.stack([end - begin, sampled, sampled * in_flight, meanwhile], axis=1)


def _known(
    ledger: LedgerRows, turns: Mapping[Place, Sequence[TurnRecord]], actor: str, generated: Sequence[_Generated]
) -> Float64:
    """During each turn, the share of the actor's open attempts whose turns are known."""
    last = max(row.received_at for row in ledger.trajectories.values())
    spans: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for place, attempts in ledger.attempts.items():
        for a in attempts:
            if a.actor == actor:
                known = place in turns and ledger.trajectories[place].attempt == a.attempt
                spans[known].append((a.issued_at, max(a.issued_at, last if a.ended_at is None else a.ended_at)))
    begin, end = np.array([t.begin for t in generated]), np.array([t.end for t in generated])
    of_known, of_others = (_open(spans[known], begin, end) for known in (True, False))
    share: Float64 = of_known / np.maximum(of_known + of_others, 1e-9)
    return share


def _open(spans: Sequence[tuple[float, float]], begin: Float64, end: Float64) -> Float64:
    """The mean number of `spans` that are open during each interval."""
    if not spans:
        return np.zeros(len(begin))
    starts, ends = np.array(spans).T
    times = np.concatenate([starts, ends])
    change = np.concatenate([np.ones(len(starts)), -np.ones(len(ends))])
    order = np.argsort(times, kind="stable")
    times, running = times[order], np.cumsum(change[order])
    area = np.concatenate([[0.0], np.cumsum(running[:-1] * np.diff(times))])
    mean: Float64 = (np.interp(end, times, area) - np.interp(begin, times, area)) / np.maximum(end - begin, 1e-9)
    return mean
