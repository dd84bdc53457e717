"""The timeline of a run: slices on tracks, and arrows from each episode to the step that used it. Pure.

Times are seconds since the epoch. Attempts, batches and publications have them from the buffer's clock, the spans of
processes from their own: between hosts whose clocks differ, tracks are shifted by the difference.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from asyncrl.audit.ledger import AttemptRow, BatchRow, LedgerRows
from asyncrl.tracking.spans import Span
from asyncrl.trajectory import TurnRecord

Place = tuple[int, int]
"""Group and index of a trajectory."""


@dataclass(frozen=True, slots=True)
class Slice:
    process: str
    lane: str
    """Slices of one lane of a process lie side by side or within each other."""
    name: str
    begin: float
    end: float
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Arrow:
    """From the end of one slice to the beginning of another."""

    source: Slice
    target: Slice


@dataclass(frozen=True, slots=True)
class Instant:
    """A version published."""

    name: str
    at: float


@dataclass(frozen=True, slots=True)
class Timeline:
    slices: Sequence[Slice]
    arrows: Sequence[Arrow]
    instants: Sequence[Instant]


def build(
    ledger: LedgerRows,
    turns: Mapping[Place, Sequence[TurnRecord]],
    spans: Iterable[tuple[str, Span]],
    batches: Sequence[BatchRow],
) -> Timeline:
    """The timeline from the first ticket that `batches` needed until the last of them ended.

    `turns`: of the trajectories whose payloads are kept. `spans`: role and span, in any order.
    """
    begin, end = window(ledger, batches)
    ended = [(batch, _batch(batch)) for batch in batches if batch.finished_at is not None]
    slices = [one for _, one in ended]
    stored: defaultdict[int, list[Slice]] = defaultdict(list)
    for episode, inner, number in _episodes(ledger, turns, begin, end):
        slices += (episode, *inner)
        if episode.arguments["ended"] == "stored":
            stored[number].append(episode)
    arrows = [Arrow(episode, one) for batch, one in ended for number in batch.groups for episode in stored[number]]
    slices += evaluations(ledger.tables["evals"], begin, end)
    slices += nested(_of_process(role, span) for role, span in spans if span.end > begin and span.begin < end)
    published = [
        Instant(f"version {row['version']} published", row["at"])
        for row in ledger.tables["published"]
        if begin <= row["at"] <= end
    ]
    return Timeline(slices, arrows, published)


def window(ledger: LedgerRows, batches: Sequence[BatchRow]) -> tuple[float, float]:
    """When the first attempt began that `batches` used, and when the last of these ended."""
    ended = [batch.finished_at for batch in batches if batch.finished_at is not None]
    groups = {number for batch in batches for number in batch.groups}
    issued = [attempts[0].issued_at for (number, _), attempts in ledger.attempts.items() if number in groups]
    fixed = [batch.fixed_at for batch in batches]
    return min(issued + fixed, default=0.0), max(ended + fixed, default=0.0)


def _batch(batch: BatchRow) -> Slice:
    assert batch.finished_at is not None
    arguments = {
        "branch": batch.branch, "version": batch.version, "outcome": batch.outcome, "groups": len(batch.groups)
    }  # fmt: skip
    end = max(batch.finished_at, batch.fixed_at)
    return Slice("learner", "batches", f"batch {batch.b}", batch.fixed_at, end, arguments)


def evaluations(rows: Iterable[Mapping[str, Any]], begin: float, end: float) -> Iterator[Slice]:
    """Every held-out set that was open within the time, from its opening to its last result; `rows` of the ledger."""
    for row in rows:
        ended_at = end if row["ended_at"] is None else row["ended_at"]
        if row["state"] == "skipped" or row["opened_at"] >= end or ended_at <= begin:
            continue
        arguments = {"branch": row["on_branch"], "version": row["version"], "ended": row["state"]}
        name = f"{row['name']} at {row['due']}"
        yield Slice("evaluation", row["name"], name, row["opened_at"], max(ended_at, row["opened_at"]), arguments)


def _episodes(
    ledger: LedgerRows, turns: Mapping[Place, Sequence[TurnRecord]], begin: float, end: float
) -> Iterator[tuple[Slice, list[Slice], int]]:
    """Every attempt within the time, its turns where they are known, and its group; each in a slot of its actor."""
    found = [
        (attempt, _ended_at(ledger, attempt, end))
        for attempts in ledger.attempts.values()
        for attempt in attempts
        if attempt.issued_at < end and _ended_at(ledger, attempt, end) > begin
    ]
    found.sort(key=lambda pair: (pair[0].issued_at, pair[0].serial))
    slots = Slots()
    for attempt, ended_at in found:
        lane = f"slot {slots.take(attempt.actor, attempt.issued_at, ended_at)}"
        place = attempt.group, attempt.index
        arguments = {
            "attempt": attempt.attempt, "min_version": attempt.min_version, "ended": attempt.ended or "in flight"
        }  # fmt: skip
        row = ledger.trajectories.get(place)
        stored = row is not None and row.attempt == attempt.attempt and attempt.ended == "stored"
        if row is not None and stored:
            arguments |= {"reward": row.reward, "tokens": row.tokens, "stop_reason": row.stop_reason}
        name = f"episode {ledger.name(*place)}"
        episode = Slice(attempt.actor, lane, name, attempt.issued_at, ended_at, arguments)
        inner = list(turn_slices(episode, turns.get(place, ()))) if stored else []
        yield episode, inner, attempt.group


def _ended_at(ledger: LedgerRows, attempt: AttemptRow, end: float) -> float:
    ended = end if attempt.ended_at is None else attempt.ended_at
    return max(ended, attempt.issued_at)


def turn_slices(episode: Slice, turns: Sequence[TurnRecord]) -> Iterator[Slice]:
    """Generation and environment of each turn, the queue within the generation.

    The record has how long they took, in order, and not when: they are laid end to end so that the last one ends with
    the episode. What the record does not say (the wait for a slot, `reset`, the score) is then the time before them.
    """
    at = episode.end - sum(turn.generate + (turn.environment or 0.0) for turn in turns)
    for number, turn in enumerate(turns):
        for name, seconds in (("generate", turn.generate), ("environment", turn.environment or 0.0)):
            begin, end = max(at, episode.begin), min(max(at + seconds, episode.begin), episode.end)
            at += seconds
            if end <= begin:
                continue
            arguments = {"turn": number}
            if name == "generate":
                arguments |= {"prefilled": turn.prefilled, "sampled": turn.sampled}
            yield Slice(episode.process, episode.lane, name, begin, end, arguments)
            if name == "generate" and turn.queue:
                yield Slice(
                    episode.process, episode.lane, "queue", begin, min(begin + turn.queue, end), {"turn": number}
                )


class Slots:
    """Gives each attempt of an actor the lowest slot that is free when it is issued."""

    def __init__(self) -> None:
        self._free: dict[str, list[int]] = {}
        self._busy: dict[str, list[tuple[float, int]]] = {}

    def take(self, actor: str, begin: float, end: float) -> int:
        """The slot from `begin` to `end`. Attempts of an actor come in the order of `begin`.

        >>> slots = Slots()
        >>> [slots.take("actor-0", *times) for times in ((0, 4), (1, 2), (2, 3), (3, 5))]
        [0, 1, 1, 1]
        """
        free, busy = self._free.setdefault(actor, []), self._busy.setdefault(actor, [])
        while busy and busy[0][0] <= begin:
            heapq.heappush(free, heapq.heappop(busy)[1])
        slot = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (end, slot))
        return slot


def nested(slices: Iterable[Slice]) -> Iterator[Slice]:
    """The slices of every lane cut so that each lies beside or within the others, since the clock of a process may be
    set by a millisecond: one that ends behind the slice around it ends with it, or, if most of it lies behind, begins
    with its end."""
    ends: dict[tuple[str, str], list[float]] = {}
    over: dict[tuple[str, str], float] = {}
    for one in sorted(slices, key=lambda s: (s.process, s.lane, s.begin, -s.end)):
        lane = one.process, one.lane
        around, begin, end = ends.setdefault(lane, []), max(one.begin, over.get(lane, one.begin)), one.end
        while around and (around[-1] <= begin or around[-1] - begin < (end - begin) / 2 < end - around[-1]):
            begin = over[lane] = max(begin, around.pop())
        end = max(begin, min(end, around[-1]) if around else end)
        around.append(end)
        yield Slice(one.process, one.lane, one.name, begin, end, one.arguments)


def _of_process(role: str, span: Span) -> Slice:
    """Waits, loads and commits each have a lane; the parts of a step lie within it."""
    lane = "waits" if span.name.startswith("wait: ") else span.name if span.name in ("load", "commit") else "step"
    mark = {} if span.mark is None else {"version" if span.name == "load" else "batch": span.mark}
    return Slice(role, lane, span.name, span.begin, span.end, mark)
