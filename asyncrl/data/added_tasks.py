"""Tasks added during a run, made from the results of its groups: `data.on_step_end`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from asyncrl.config import Config
from asyncrl.data.base import GroupResult, Task
from asyncrl.errors import RunError
from asyncrl.plugins import choose

ADDED = 1 << 62
"""Index of the first added task; indices of a source stay below."""

_PROVIDED = ("version", "results", "tasks")


class OnStepEnd:
    """The user's function; checks what it returns."""

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        """`name`: import path of `more(version, results, tasks, **options) -> list of tasks`. Raises ConfigError."""
        self._name, self._options = name, options
        self._more: Callable[..., Any] = choose(name, None, "data.on_step_end", options, provided=_PROVIDED)

    def __call__(self, version: int, results: Sequence[GroupResult], tasks: Sequence[Task]) -> list[str]:
        """New tasks as JSON. `version` is the current policy version; `results` and `tasks` are those of the groups
        completed since the last step. Raises RunError, which ends the run, if the function fails or returns something
        other than tasks."""
        try:
            made = self._more(version=version, results=results, tasks=tasks, **self._options)
            return [self._checked(task) for task in made or ()]
        except Exception as error:
            raise RunError(
                f"data.on_step_end is {self._name!r}, which failed at version {version}: {type(error).__name__}: "
                f"{error}. Fix it and continue with --resume."
            ) from error

    def _checked(self, task: Any) -> str:
        if not isinstance(task, Mapping) or not isinstance(task.get("prompt"), str | list):
            raise TypeError(
                f"it returned {task!r:.100}; expected mappings with `prompt`, a string or a list of messages"
            )
        return json.dumps(dict(task))


def open_on_step_end(config: Config) -> OnStepEnd | None:
    """The function that `data.on_step_end` names, or None. Raises ConfigError."""
    data = config.data
    return OnStepEnd(data.on_step_end, data.on_step_end_options) if data.on_step_end else None
