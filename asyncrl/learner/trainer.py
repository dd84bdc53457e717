"""The work that all ranks of the learner do alike: the training step of a batch, and a part of each checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from asyncrl.buffer.client import BatchReply
from asyncrl.buffer.client.messages import Demonstration
from asyncrl.config import Config
from asyncrl.config.teacher import words_scored
from asyncrl.learner.backends.protocol import Backend
from asyncrl.learner.batch import Batch, flatten, hinted
from asyncrl.learner.batch.hints import HintsOf
from asyncrl.learner.demonstrations import Rendered
from asyncrl.learner.objective.objective import Objective
from asyncrl.learner.step.companions import companions
from asyncrl.learner.step.train_step import StepResult, train_step


class Trainer:
    """Its methods are collective: every rank calls them in the same order, with the same arguments."""

    def __init__(
        self,
        config: Config,
        backend: Backend,
        objective: Objective,
        another: Callable[[Config], Backend] | None = None,
        demonstrations: Rendered | None = None,
        hints_of: HintsOf | None = None,
    ) -> None:
        """`another` builds a second backend of the same kind, for a separate critic. `demonstrations` renders those of
        a batch, `hints_of` what a teacher is shown of a trajectory. Raises ConfigError."""
        self.backend, self.objective = backend, objective
        self._learner, self._demonstrations = config.learner, demonstrations
        self._words, self.hints_of = words_scored(config), hints_of
        self._companions = companions(config, backend, another)
        self.teacher = backend.teacher_digest if self._learner.teacher.path else ""
        """Digest of the teacher in this process, or the rule of one that moves; empty without one."""

    def step(self, reply: BatchReply, version: int) -> tuple[Batch, StepResult]:
        """`reply` holds the whole batch."""
        batch = self.batch(reply)
        return batch, self.train(batch, version)

    def batch(self, reply: BatchReply) -> Batch:
        """The rows that the step trains on. Raises RunError for a demonstration that cannot be rendered."""

        def groups() -> Batch:
            flat = flatten(
                reply.trajectories,
                reply.groups,
                reply.mask_before,
                reply.weights,
                greedy_baseline=self._learner.greedy_baseline,
                loss_weights=dict(reply.replayed),
                scores=reply.scores,
                words=self._words,
            )
            return hinted(flat, reply.trajectories, reply.groups, self.hints_of)

        return self.combined(groups, reply.demonstrations)

    def combined(self, groups: Callable[[], Batch], demonstrations: Sequence[Demonstration]) -> Batch:
        """The rows of demonstrations alone under `loss: sft`; otherwise those of the groups, with them beside."""
        if not demonstrations or self._demonstrations is None:
            return groups()
        shown = self._demonstrations.batch(demonstrations)
        return shown if self.objective.supervised else replace(groups(), demonstrations=shown)

    def train(self, batch: Batch, version: int) -> StepResult:
        return train_step(
            self.backend, self.objective, batch, self._learner, version=version, companions=self._companions
        )

    def load(self, folder: Path) -> None:
        self.backend.load(folder)
        self._companions.load(folder)

    def save(self, folder: Path) -> None:
        self.snapshot(folder)()

    def snapshot(self, folder: Path) -> Callable[[], None]:
        """Copies what is saved; the function returned writes the copy into `folder`, in any thread."""
        writes = self.backend.snapshot(), self._companions.snapshot()

        def write() -> None:
            for part in writes:
                part(folder)

        return write
