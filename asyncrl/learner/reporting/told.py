"""What the learner tells the buffer about a batch that ended, for `buffer.max_staleness: auto`."""

from __future__ import annotations

import math
import time

from asyncrl.buffer.client.messages import Told
from asyncrl.learner.batch import Batch
from asyncrl.learner.session import Session
from asyncrl.learner.step.diagnostics import sequence_effective_sample_size
from asyncrl.learner.step.train_step import StepResult

_MOST_LR, _MOST_S = 1e6, 1e9


def told(session: Session, batch: Batch, result: StepResult) -> Told | None:
    """Called once per batch, when its step is over. None: the bound is fixed, or the step was refused and its
    effective sample size is no number. A step that was refused for its small one counts."""
    seconds, waited = session.waited(time.perf_counter())
    if session.config.buffer.max_staleness != "auto":
        return None
    record = result.record
    ess = float(sequence_effective_sample_size(record.proximal, batch.behaviour, batch.mask, batch.lengths))
    if result.outcome != "applied" and not math.isfinite(ess):
        return None
    # A refused step has no learning rate; the largest one that could have been counts.
    lr = record.lr if result.outcome == "applied" else session.config.learner.lr
    lr = lr if math.isfinite(lr) else 0.0
    ess = min(max(ess, 0.0), 1.0) if math.isfinite(ess) else 0.0
    return Told(waited, ess, min(max(lr, 0.0), _MOST_LR), min(seconds, _MOST_S))
