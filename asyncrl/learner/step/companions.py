"""State that is kept from step to step and saved with the policy: the critic, the coefficient of the KL term, how many
steps stand in no place of the learning rate's schedule."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from asyncrl.config import Config
from asyncrl.config.learner import LearnerConfig, TeacherConfig
from asyncrl.errors import ConfigError, RunError
from asyncrl.learner.backends.protocol import Backend, MovesTeacher
from asyncrl.learner.objective.kl import CONTROLLERS, Controller, FixedKL
from asyncrl.learner.step.critic import Critic, leads
from asyncrl.learner.step.record import Record
from asyncrl.plugins import check_options, resolve

_KL, _SCHEDULE = "kl.json", "schedule.json"


class Schedule:
    """The place of each training step in the learning rate's schedule, in which a step without a gradient has none."""

    def __init__(self) -> None:
        self.without_gradient = 0
        """Applied steps, so far, whose gradient was exactly 0."""

    def place(self, version: int) -> int:
        """The place of the step from `version` on."""
        return version - self.without_gradient

    def passed(self, record: Record) -> None:
        """Count an applied step."""
        self.without_gradient += not record.has_gradient
        record.steps_without_gradient = self.without_gradient


@dataclass(frozen=True, slots=True)
class Companions:
    """The KL term's controller, the critic if there is one, and the schedule."""

    kl: Controller
    critic: Critic | None = None
    schedule: Schedule = field(default_factory=Schedule)

    def snapshot(self) -> Callable[[Path], None]:
        """Copies and returns a writer, as `Backend.snapshot` does."""
        steered = not isinstance(self.kl, FixedKL) and leads()
        kl = json.dumps({"coefficient": self.kl.value})
        critic = None if self.critic is None else self.critic.snapshot()
        without = self.schedule.without_gradient if leads() else 0

        def write(folder: Path) -> None:
            if without:
                (folder / _SCHEDULE).write_text(json.dumps({"without_gradient": without}))
            if steered:
                (folder / _KL).write_text(kl)
            if critic is not None:
                critic(folder)

        return write

    def load(self, folder: Path) -> None:
        """The inverse of `snapshot`. Raises RunError for a checkpoint of a run without these companions."""
        kept = folder / _SCHEDULE
        self.schedule.without_gradient = int(json.loads(kept.read_text())["without_gradient"]) if kept.is_file() else 0
        if not isinstance(self.kl, FixedKL):
            if not (folder / _KL).is_file():
                raise RunError(
                    f"checkpoint {folder} has no {_KL}, from which learner.kl_controller would continue. Resume with "
                    "learner.kl_controller fixed, as the run was started."
                )
            self.kl.value = float(json.loads((folder / _KL).read_text())["coefficient"])
        if self.critic is not None:
            self.critic.load(folder)


def move_followers(backend: Backend, learner: LearnerConfig, version: int) -> None:
    """What follows the policy, after the training step that made `version`: the KL reference, and a teacher that is an
    average of it."""
    if learner.reference_every and version % learner.reference_every == 0:
        backend.refresh_reference()
    if learner.teacher.moves:
        cast(MovesTeacher, backend).move_teacher()


def stateless(learner: LearnerConfig) -> Companions:
    """Companions that keep no state. Raises ValueError if the config asks for others."""
    if learner.critic != "none" or learner.kl_controller != "fixed":
        raise ValueError(
            "learner.critic and learner.kl_controller keep state between steps, and companions are missing: pass them"
        )
    return Companions(FixedKL(learner.kl_coef))


def companions(config: Config, policy: Backend, another: Callable[[Config], Backend] | None = None) -> Companions:
    """The companions that the config names. `another` builds a second backend. Raises ConfigError, naming the field."""
    learner = config.learner
    try:
        controller = resolve(learner.kl_controller, CONTROLLERS, "learner.kl_controller")
        check_options(controller, learner.kl_controller_options, "learner.kl_controller_options", ("value",))
        kl = controller(learner.kl_coef, **learner.kl_controller_options)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if learner.critic == "none":
        return Companions(kl)
    if learner.critic == "shared":
        return Companions(kl, Critic(learner, policy))
    if another is None:
        raise ValueError("learner.critic is separate, and nothing was given that builds its model")
    # The second backend scores for the critic only, so it keeps neither a reference model nor a teacher.
    of_critic = learner.model_copy(update={"kl_coef": 0.0, "teacher": TeacherConfig()})
    return Companions(kl, Critic(learner, policy, another(config.model_copy(update={"learner": of_critic}))))
