"""Reports each training step: its metrics, samples, and the run's counts of tokens and skipped batches."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence

from asyncrl.buffer.client import BatchReply
from asyncrl.config.rules.teacher import learns_from_teacher
from asyncrl.learner.batch import Batch
from asyncrl.learner.objective.objective import Objective
from asyncrl.learner.reporting.beyond_kept import BeyondKept
from asyncrl.learner.reporting.demonstration_metrics import metrics_beside, supervised_metrics
from asyncrl.learner.reporting.metrics import step_metrics
from asyncrl.learner.reporting.no_signal import NoSignal
from asyncrl.learner.reporting.samples import Samples
from asyncrl.learner.session import Session
from asyncrl.learner.step.replayed import new_trajectories, replay_metrics
from asyncrl.learner.step.train_step import StepResult
from asyncrl.trajectory import Trajectory

log = logging.getLogger(__name__)

_MARGIN_S = 1e-5


class StepReport:
    def __init__(self, session: Session, objective: Objective, samples: Samples | None = None) -> None:
        self._session, self._objective, self._samples = session, objective, samples
        self._tokens_trained, self._skipped = 0, 0
        self._no_signal = NoSignal(session.config.learner.steps)
        self._beyond_kept = BeyondKept(session.config.actors.max_kept)
        self._taught = learns_from_teacher(session.config)
        self.restart_clock()

    def restart_clock(self) -> None:
        """The duration of the next step counts from now."""
        self._last_applied = time.perf_counter()

    def step(self, b: int, reply: BatchReply, batch: Batch, result: StepResult) -> None:
        """Reports the step on batch `b`, whose outcome the session counts already; takes samples of it."""
        self._spans(b, result)
        if self._samples is not None:
            self._samples.take(b, reply, batch, result)
        if result.outcome == "guard":
            self._guard(b, result.why)
            return
        session, now = self._session, time.perf_counter()
        success = session.config.eval.success
        played = new_trajectories(reply)
        if self._objective.supervised:
            metrics = supervised_metrics(batch, result)
        else:
            metrics = metrics_beside(batch, result) | step_metrics(
                self._objective, batch, played, result, version=reply.version, success=success
            )
        if session.config.buffer.max_staleness == "auto":
            metrics["staleness/bound"] = reply.bound
        if session.config.buffer.replay:
            metrics |= replay_metrics(reply)
        self._tokens_trained += int(batch.mask.sum())
        metrics["throughput/tokens_trained"] = self._tokens_trained
        metrics["throughput/step_s"] = now - self._last_applied
        metrics["weights/skipped"] = self._skipped
        self._last_applied = now
        session.reporter.metrics(metrics, step=session.version)
        self.judge(played, metrics)

    def judge(self, played: Sequence[Trajectory], metrics: Mapping[str, float]) -> None:
        """Says what is wrong with what was trained on: each of these once in a process."""
        signal = self._no_signal.note(played) if played and not self._taught else ""
        said = {"no_signal": signal, "beyond_max_kept": self._beyond_kept.note(metrics, played)}
        for event, why in said.items():
            if why:
                log.warning("%s", why)
                self._session.reporter.event(event, step=self._session.version, why=why)

    def close(self) -> None:
        """Waits for the last samples, for a bounded time."""
        if self._samples is not None:
            self._samples.close()

    def _spans(self, b: int, result: StepResult) -> None:
        """Reports when the step on batch `b` was computed, and each part of it."""
        reporter, phases = self._session.reporter, result.record.phases
        ago = time.time() - time.perf_counter()
        for phase in phases:
            reporter.span(phase.name, phase.end - phase.begin, b, phase.end + ago)
        # Seconds since the epoch are exact to 0.2 us: the step must not seem to begin within its first part.
        reporter.span("step", result.compute_s + _MARGIN_S, b, phases[0].begin + result.compute_s + ago)

    def _guard(self, b: int, why: str) -> None:
        """Counts batch `b`, whose update was refused."""
        session = self._session
        self._skipped += 1
        log.warning("batch %d is skipped, version stays %d: %s", b, session.version, why)
        session.reporter.event("guard", batch=b, step=session.version, why=why)
        session.reporter.metrics({"weights/skipped": self._skipped})
