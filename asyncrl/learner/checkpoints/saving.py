"""Saves the run: begins checkpoints while training continues, and reports those that are complete."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from asyncrl.buffer.client import BatchReply
from asyncrl.learner.advantages.episodes import trajectory_weights
from asyncrl.learner.batch import Batch
from asyncrl.learner.checkpoints.checkpoints import Checkpoints, Done, State, group_digests, read
from asyncrl.learner.checkpoints.exports import Exports
from asyncrl.learner.distillation.identity import refuse_another
from asyncrl.learner.ranks import Order
from asyncrl.learner.session import Session
from asyncrl.learner.step.train_step import StepResult
from asyncrl.learner.trainer import Trainer

log = logging.getLogger(__name__)


class Saving:
    """The checkpoints of one session, and the list of its batches."""

    def __init__(
        self,
        session: Session,
        trainer: Trainer,
        checkpoints: Checkpoints,
        save_tokenizer: Callable[[Path], None],
    ) -> None:
        self._session, self._trainer = session, trainer
        self._checkpoints, self._save_tokenizer = checkpoints, save_tokenizer
        folder = checkpoints.folder.with_name("exports")
        self.exports = Exports(session, trainer.backend, folder, save_tokenizer)
        self.done: list[Done] = []
        """Every batch so far"""
        self._saved = 0
        """The batch that the newest checkpoint wants next"""

    @property
    def folder(self) -> Path:
        return self._checkpoints.folder

    @property
    def due(self) -> bool:
        return self._session.batch - self._saved >= self._session.config.learner.checkpoint_every

    def load(self, checkpoint: Path) -> None:
        """Puts the session and every rank where the checkpoint was."""
        session = self._session
        state, self.done = read(checkpoint)
        had = next((d.teacher for d in reversed(self.done) if d.teacher), "")
        refuse_another(had, self._trainer.teacher, session.config.learner.teacher.path, f"by checkpoint {checkpoint}")
        session.ranks.order(Order("load", str(checkpoint)))
        self._trainer.load(checkpoint)
        session.version, session.batch, self._saved = state.version, state.batch, state.batch

    def record(self, b: int, reply: BatchReply, batch: Batch, result: StepResult) -> None:
        """Adds batch `b` to the list that the next checkpoint holds."""
        members = [*(t.id.group for t in reply.trajectories), *(scores.group for scores in reply.scores)]
        groups = group_digests(members, (*reply.digests, *(scores.digest() for scores in reply.scores)))
        weights = trajectory_weights(result.record.weights, batch, reply.groups) if groups else {}
        teacher = reply.scores[0].teacher if reply.scores else self._trainer.teacher
        shown = [each.digest for each in reply.demonstrations]
        self.done.append(Done(b, result.outcome, groups, weights, teacher, shown))

    def save(self, *, wait: bool = False) -> None:
        """Begins a checkpoint, unless the newest is of this batch; `wait`: until it is complete."""
        session = self._session
        self.exports.settle()
        if session.batch == self._saved:
            self._checkpoints.settle()
            self.report()
            return
        session.reporter.waiting("checkpoint")
        learner = session.config.learner
        state = State(session.version, session.batch, session.branch, learner.threads, learner.ranks)
        self._checkpoints.begin(state, self.done, self._snapshot, self._announce)
        self._saved = session.batch
        if wait:
            self._checkpoints.settle()
        session.reporter.waiting(None)
        self.report()

    def report(self) -> None:
        """Reports the checkpoints that were completed since the last call."""
        for version, path in self._checkpoints.completed():
            self._session.reporter.event("checkpoint", step=version, path=str(path))
            log.info("checkpoint %s", path)

    def _snapshot(self, folder: Path) -> Callable[[], None]:
        self._session.ranks.order(Order("save", str(folder)))
        write_trained = self._trainer.snapshot(folder)

        def write() -> None:
            write_trained()
            self._save_tokenizer(folder / "hf")

        return write

    def _announce(self, folder: Path) -> None:
        session = self._session
        arguments = (session.incarnation, session.version, session.batch, str(folder))
        session.ask(lambda: session.buffer.checkpointed(*arguments))
