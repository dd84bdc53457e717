"""Reports each training step: its metrics, and the run's counts of tokens and skipped batches."""

from __future__ import annotations

import logging
import time

from asyncrl.buffer.client import BatchReply
from asyncrl.learner.batch import Batch
from asyncrl.learner.objective.objective import Objective
from asyncrl.learner.session import Session
from asyncrl.learner.step.metrics import step_metrics
from asyncrl.learner.step.train_step import StepResult

log = logging.getLogger(__name__)


class StepReport:
    def __init__(self, session: Session, objective: Objective) -> None:
        self._session, self._objective = session, objective
        self._tokens_trained, self._skipped = 0, 0
        self.restart_clock()

    def restart_clock(self) -> None:
        """The duration of the next step counts from now."""
        self._last_applied = time.perf_counter()

    def metrics(self, reply: BatchReply, batch: Batch, result: StepResult) -> dict[str, float]:
        """Metrics of a step that the session's version has not counted yet."""
        version, success = self._session.version, self._session.config.eval.success
        return step_metrics(self._objective, batch, reply.trajectories, result, version=version, success=success)

    def applied(self, batch: Batch, metrics: dict[str, float]) -> None:
        """Counts an applied step, and completes its metrics."""
        now = time.perf_counter()
        self._tokens_trained += int(batch.mask.sum())
        metrics["throughput/tokens_trained"] = self._tokens_trained
        metrics["throughput/step_s"] = now - self._last_applied
        metrics["weights/skipped"] = self._skipped
        self._last_applied = now

    def guard(self, b: int, why: str) -> None:
        """Counts batch `b`, whose update was refused."""
        session = self._session
        self._skipped += 1
        log.warning("batch %d is skipped, version stays %d: %s", b, session.version, why)
        session.reporter.event("guard", batch=b, step=session.version, why=why)
        session.reporter.metrics({"weights/skipped": self._skipped})
