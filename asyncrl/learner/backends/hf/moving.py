"""A teacher that moves: the policy itself, or an average of it, which is shown more than the policy (hints.py).

    update_rate    one update a step            several updates a step
    1              the policy's own weights     a copy, renewed after each step
    between        a copy, which after each applied step is (1 - rate) copy + rate policy
    0              a copy of the run's first model

So within a training step the teacher is the same for all updates: that of the step's version.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from asyncrl.config.learner import POLICY, LearnerConfig
from asyncrl.errors import RunError
from asyncrl.learner.backends.comparison import TeacherStates
from asyncrl.learner.backends.hf.scorer import Scorer
from asyncrl.learner.backends.hf.teacher import states_of
from asyncrl.learner.backends.hinted import with_hints
from asyncrl.learner.backends.protocol import Packed

FILE = "teacher.pt"
"""Of a checkpoint: the average's weights."""


class MovingTeacher:
    def __init__(self, policy: Scorer, copy: Scorer | None, rate: float) -> None:
        """`copy`: of the policy as it begins; None: the policy itself is the teacher."""
        self._policy, self._rate = policy, rate
        self._copy = None if copy is None else copy.requires_grad_(False)
        self.digest = rule_of(rate)
        self.averages = copy is not None and 0 < rate < 1
        """Whether its weights follow from nothing else than all steps so far, so that checkpoints hold them."""

    def states(self, part: Packed) -> TeacherStates:
        """Of the part's sampled tokens, behind the prompts with their hints. On several ranks all call it."""
        return states_of(self._copy or self._policy, with_hints(part))

    def move(self) -> None:
        """Moves towards the policy, after an applied training step."""
        if self._copy is None or not self._rate:
            return
        mine, theirs = self.state_dict(), self._policy.state_dict()
        with torch.no_grad():
            for name, weight in mine.items():
                weight.lerp_(theirs[name], self._rate)

    def state_dict(self) -> dict[str, Tensor]:
        """The average's weights, tied ones once; sharded where they are. `load` fills them."""
        assert self._copy is not None
        state = self._copy.state_dict()  # of a sharded model the parameters themselves may be gathered now
        return {name: state[name] for name, _ in self._copy.named_parameters()}

    def load(self, state: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for name, mine in self.state_dict().items():
                mine.copy_(state[name])

    def follow(self) -> None:
        """After a checkpoint was loaded: a copy that is renewed after each step is the loaded policy."""
        if self._rate == 1:
            self.move()


def moving_of(learner: LearnerConfig, policy: Scorer, build: Callable[[], Scorer]) -> MovingTeacher | None:
    """The teacher of `learner.teacher.path: policy`; None for another. `build` makes the run's first model again."""
    given = learner.teacher
    if not given.moves:
        return None
    copy = build() if given.copied(learner.minibatches) else None
    return MovingTeacher(policy, copy, given.update_rate)


def rule_of(rate: float) -> str:
    """What identifies a teacher that moves."""
    return f"{POLICY}, update_rate {rate:g}"


def refuse_without_average(folder: Path) -> None:
    """Raises RunError for a checkpoint without the average's weights."""
    if not (folder / FILE).is_file():
        refuse_missing_average(folder, FILE)


def refuse_missing_average(folder: Path, missing: str) -> NoReturn:
    """Raises RunError."""
    raise RunError(
        f"checkpoint {folder} has no {missing}, from which the teacher's average (learner.teacher.update_rate) would "
        "continue: resume with the learner.teacher that the run was started with, or move the checkpoint away if it is "
        "damaged."
    )
