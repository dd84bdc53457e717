"""The learner's loop: batches in, policy versions out.

      start(checkpoint or initial weights) ─> publish ─> held-out sets (before the first step)
         │
         ▼
    ┌─> batch b ──> train_step ──> finished(b) ──> publish? ──> checkpoint? ──┐
    └────────────────────────────── b + 1 ────────────────────────────────────┘
         │ ended: all steps done, or nothing left to learn; or SIGTERM
         ▼
      publish ─> checkpoint ─> held-out sets (after the last step)

    takes     batch b and its outcome so far, from the buffer: the same answer however often it is asked
    gives     the outcome of b to the buffer, weights to the actors (publication.py), checkpoints to the disk
              (saving.py), metrics and events to the launcher
    unblocked by   enough complete groups within the staleness bound; for the held-out set (evaluation.py), the actors'
              last episode

A learner that dies is started again, resumes from its last checkpoint and redoes the recorded batches: same data, same
outcomes, and no version is published twice.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from asyncrl.buffer.client import BatchReply, BufferClient
from asyncrl.config import Config
from asyncrl.errors import RunError
from asyncrl.learner.checkpoints.checkpoints import Checkpoints, Done
from asyncrl.learner.checkpoints.resume import start
from asyncrl.learner.checkpoints.saving import Saving
from asyncrl.learner.evaluation import Evaluations
from asyncrl.learner.publication import Publication
from asyncrl.learner.ranks import Order, Ranks
from asyncrl.learner.reporting.samples import Samples
from asyncrl.learner.reporting.step_report import StepReport
from asyncrl.learner.reporting.told import told
from asyncrl.learner.session import Session
from asyncrl.learner.trainer import Trainer
from asyncrl.tracking.reporter import Reporter
from asyncrl.weights.protocol import Publisher

log = logging.getLogger(__name__)


class Learner:
    """Rank 0, which leads the other ranks, if any (follower.py). `stop()` ends it after the current step."""

    def __init__(  # noqa: PLR0913 - the parts of one process
        self,
        config: Config,
        *,
        trainer: Trainer,
        buffer: BufferClient,
        publisher: Publisher,
        reporter: Reporter,
        checkpoints: Checkpoints,
        save_tokenizer: Callable[[Path], None],
        ranks: Ranks | None = None,
        samples: Samples | None = None,
    ) -> None:
        self._session = Session(config, buffer, reporter, ranks or Ranks())
        self._trainer = trainer
        self._publication = Publication(self._session, trainer.backend, publisher)
        self._saving = Saving(self._session, trainer, checkpoints, save_tokenizer)
        self._evaluations = Evaluations(self._session, publisher, self._saving.exports.take)
        self._report = StepReport(self._session, trainer.objective, samples)

    def stop(self) -> None:
        self._session.stopping = True

    def run(
        self, *, resume: bool, branch_from: Path | None = None, on_branch: Callable[[], None] = lambda: None
    ) -> bool:
        """Returns True at the end of the run, or False after a checkpoint when told to stop. `resume`: from the newest
        checkpoint. `branch_from`: the checkpoint at which a new branch begins; `on_branch` is called once the branch is
        recorded. Raises RunError."""
        session = self._session
        start(session, self._saving, self._publication, resume=resume, branch_from=branch_from, on_branch=on_branch)
        self._publication.ensure()
        session.reporter.ready()
        self._evaluations.begin()
        self._report.restart_clock()
        if (why := self._train()) is None:
            self._saving.save(wait=True)
            log.info("stopped at version %d, batch %d", session.version, session.batch)
        else:
            self._end(why)
        self._report.close()
        session.ranks.order(Order("end"))
        return session.over

    def _train(self) -> str | None:
        """Why the run is over, or None when told to stop."""
        session, why = self._session, ""
        while not session.stopping:
            self._saving.report()
            self._evaluations.look()
            session.reporter.waiting("batch", why or "buffer")
            reply = session.request_batch()
            why = reply.why
            if reply.branch != session.branch:
                self._publication.change_branch(reply.branch)
                self._evaluations.look()
            match reply.state:
                case "waiting":
                    session.ranks.order(Order("wait"))
                case "ended":
                    if reply.failed:
                        raise RunError(f"the run cannot go on: {reply.why}")
                    return reply.why
                case "skipped":
                    self._saving.done.append(Done(session.batch, "skipped", {}))
                    session.reporter.event("skipped", batch=session.batch, why=reply.why)
                    session.batch += 1
                case "ready":
                    session.reporter.waiting(None)
                    self._step(reply)
                    if reply.checkpoint or self._saving.due:
                        self._saving.save()
        return None

    def _step(self, reply: BatchReply) -> None:
        """Trains on the batch, and has the buffer record its outcome."""
        session = self._session
        session.ranks.order(
            Order("train", incarnation=session.incarnation, batch=session.batch, version=session.version)
        )
        reply = session.ranks.gather(reply)
        batch, result = self._trainer.step(reply, session.version)
        b, version = session.batch, session.version + (result.outcome == "applied")
        learned = told(session, batch, result)
        recorded = session.ask(lambda: session.buffer.finished(session.incarnation, b, result.outcome, learned))
        if recorded != version:
            remedy = "begin a new branch at a checkpoint: --resume RUN --fresh"
            raise RunError(f"after batch {b} the buffer is at version {recorded}, the learner at {version}; {remedy}")
        self._saving.record(b, reply, batch, result)
        session.version, session.batch = version, b + 1
        self._report.step(b, reply, batch, result)
        if result.outcome == "applied" and self._evaluations.publishes(version):
            self._publication.publish()

    def _end(self, why: str) -> None:
        session = self._session
        self._publication.publish()
        self._saving.save(wait=True)
        self._evaluations.play("end")
        self._saving.exports.close()
        if not session.stopping:
            session.reporter.event("ended", step=session.version, why=why)
            log.info("ended at version %d: %s", session.version, why)
            session.over = True
