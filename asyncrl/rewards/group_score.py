"""Scores that see all episodes of a group at once, to compare them: `env.group_score`."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from asyncrl.config import Config
from asyncrl.data.base import Message, Task
from asyncrl.errors import ConfigError
from asyncrl.plugins import choose
from asyncrl.redaction import resolved
from asyncrl.rewards.score import call, name_of
from asyncrl.rewards.table import GROUP_SCORES

GroupScore = Callable[..., Any]
"""`(task: Mapping, answers: Sequence[GroupAnswer], **options) -> a number for each answer, in their order`; a coroutine
function, or a plain one, which runs in a thread. A class is made once per actor, with its options."""


@dataclass(frozen=True, slots=True)
class GroupAnswer:
    """One episode, as a group score receives it."""

    messages: Sequence[Message]
    """The whole conversation, with the task's messages first; with `env.compact`, what came before a summary too."""
    reward: float
    """The reward of the environment."""
    rewards: Mapping[str, float]

    @property
    def text(self) -> str:
        """The text of the last assistant message."""
        return next((str(m.get("content") or "") for m in reversed(self.messages) if m["role"] == "assistant"), "")


def open_group_score(config: Config) -> GroupScore | None:
    """The score that `env.group_score` names, with its options; None without. Raises ConfigError."""
    env = config.env
    if not env.group_score:
        return None
    options = env.group_score_options
    score = choose(env.group_score, GROUP_SCORES, "env.group_score", options, provided=("task", "answers"))
    try:
        return _Optioned(score, resolved(options))
    except ValueError as error:
        raise ConfigError(str(error)) from error


class _Optioned:
    def __init__(self, score: GroupScore, options: Mapping[str, Any]) -> None:
        """`score`: a function, or a class whose objects are called."""
        made: Any = score(**options) if inspect.isclass(score) else functools.partial(score, **options)
        self._score: GroupScore = made
        self.__name__ = name_of(self._score)

    async def __call__(self, task: Task, answers: Sequence[GroupAnswer]) -> Any:
        return await call(self._score, {"task": task, "answers": answers})


def checked(values: Any, answers: int, name: str) -> list[float]:
    """The numbers that a group score returned, one per answer. Raises TypeError or ValueError if they are not."""
    numbers = list(values)
    if len(numbers) != answers:
        raise ValueError(f"group score {name} returned {len(numbers)} numbers for {answers} answers")
    if not all(isinstance(v, Real) and math.isfinite(v) for v in numbers):
        raise ValueError(f"group score {name} returned {numbers!r:.200}; expected finite numbers")
    return [float(v) for v in numbers]
