"""Fits the learner's times: of a step, of a publication, of what comes between; and the actors' loads. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from statistics import fmean, median

import numpy as np

from asyncrl.audit.ledger import BatchRow
from asyncrl.plan.fitting.record import Record
from asyncrl.plan.times import LearnerTimes
from asyncrl.tracking.spans import Span


def learner_times(record: Record, batches: Sequence[BatchRow]) -> tuple[LearnerTimes, float]:
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


def load_times(record: Record) -> tuple[float, float]:
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
