"""Whether recorded training steps can be redone as they were. Pure.

A learner that resumes redoes the recorded batches from its checkpoint on, and its weights are to be those that were
recorded, and perhaps published. They are not if what decides a step has changed since: a branch begins instead.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from asyncrl.buffer.ledger.records import Batch, Incarnation
from asyncrl.config.resuming import differences


def changed_since(line: Sequence[Batch], incarnations: Sequence[Incarnation], b: int, settings: str) -> str:
    """Why batches of `line` from b on would give other weights under `settings`; empty: they would not, or none was
    applied."""
    for batch in line[b:]:
        if batch.outcome != "applied":
            continue
        former = _trained_by(batch, incarnations).settings
        if former != settings:
            changes = "; ".join(differences(json.loads(former), json.loads(settings)))
            return f"batch {batch.b} was trained with other settings: {changes}"
    return ""


def first_in_doubt(line: Sequence[Batch], published: Sequence[int], start: int, version: int) -> int:
    """The first batch from `start` on whose result is in doubt when `version`, which it or a later one made, was redone
    with another digest: the one after the latest version that was `published` before it."""
    sure = max((v for v in published if v < version), default=-1)
    return next(batch.b for batch in line[start:] if batch.version >= sure)


def _trained_by(batch: Batch, incarnations: Sequence[Incarnation]) -> Incarnation:
    """The start of the learner that finished the batch first."""
    return next(i for i in incarnations[batch.incarnation - 1 :] if i.next_batch > batch.b)
