"""What the learner tells the buffer about a batch that ended, for `buffer.max_staleness: auto`."""

from __future__ import annotations

import math
import time

from asyncrl.buffer.client.messages import Told
from asyncrl.learner.batch import Batch
from asyncrl.learner.session import Session
from asyncrl.learner.step.diagnostics import sequence_effective_sample_size
from asyncrl.learner.step.train_step import StepResult

_MOST_LR = 1e6


def told(session: Session, batch: Batch, result: StepResult) -> Told | None:
    """Called once per batch, when its step is over. None: the step was refused, and its numbers mean nothing, or the
    bound is fixed."""
    waited = session.waited_share(time.perf_counter())
    if result.outcome != "applied" or session.config.buffer.max_staleness != "auto":
        return None
    record = result.record
    ess = float(sequence_effective_sample_size(record.proximal, batch.behaviour, batch.mask, batch.lengths))
    lr = record.lr if math.isfinite(record.lr) else 0.0
    return Told(waited, min(max(ess, 0.0), 1.0) if math.isfinite(ess) else 0.0, min(max(lr, 0.0), _MOST_LR))
