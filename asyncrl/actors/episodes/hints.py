"""What a teacher that is the policy itself is shown of an episode, and the policy is not (`learner.teacher.shown`)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Literal

from asyncrl.actors.episodes.environment_calls import EpisodeFailed
from asyncrl.config import Config
from asyncrl.trajectory import MAX_HINT, Ticket


@dataclass(frozen=True, slots=True)
class Hints:
    shown: Literal["answer", "feedback", "nothing"]
    field: str
    """Of the task's record, under `answer`."""

    @classmethod
    def named(cls, config: Config) -> Hints | None:
        """None for a run without such a teacher."""
        given = config.learner.teacher
        return cls(given.shown, given.answer_field) if given.hints else None

    def of(self, ticket: Ticket, feedback: str) -> str:
        """The text, of which a trajectory keeps the first MAX_HINT characters; empty for an evaluation, and where the
        environment said nothing. Raises EpisodeFailed for a task without the field."""
        if ticket.kind == "eval":
            return ""
        if self.shown == "feedback":
            return feedback[:MAX_HINT]
        answer = ticket.task.get(self.field)
        if answer is None:
            has = ", ".join(map(str, ticket.task))
            raise EpisodeFailed(
                "env_error",
                f"task {ticket.task['id']} has no {self.field}, which learner.teacher.shown needs; its keys are {has}: "
                "name another in learner.teacher.answer_field",
            )
        return (answer if isinstance(answer, str) else json.dumps(answer, sort_keys=True))[:MAX_HINT]
