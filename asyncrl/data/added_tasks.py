"""Tasks made during a run, from what its groups showed: `data.on_step_end`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from asyncrl.config import Config
from asyncrl.data.base import GroupResult, Task
from asyncrl.errors import ConfigError, RunError
from asyncrl.plugins import check_options, resolve

ADDED = 1 << 62
"""Index of the first task that was added; those of a source stay below."""

_GIVEN = ("version", "results", "tasks")


class OnStepEnd:
    """The user's function, and a check of what it gives."""

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        """`name`: import path of `more(version, results, tasks, **options) -> list of tasks`. Raises ConfigError."""
        self._name, self._options = name, options
        try:
            self._more: Callable[..., Any] = resolve(name, {}, "data.on_step_end")
            check_options(self._more, options, "data.on_step_end_options", _GIVEN)
        except ValueError as error:
            raise ConfigError(str(error)) from error

    def __call__(self, version: int, results: Sequence[GroupResult], tasks: Sequence[Task]) -> list[str]:
        """New tasks as JSON. `version`: of the policy now; `results`: of the groups completed since the last step, with
        their `tasks`. Raises RunError, which ends the run, when the function fails or gives what is no task."""
        try:
            made = self._more(version=version, results=results, tasks=tasks, **self._options)
            return [self._checked(task) for task in made or ()]
        except Exception as error:
            raise RunError(
                f"data.on_step_end is {self._name!r}, which failed at version {version}: {type(error).__name__}: "
                f"{error}. Mend it and go on with --resume."
            ) from error

    def _checked(self, task: Any) -> str:
        if not isinstance(task, Mapping) or not isinstance(task.get("prompt"), str | list):
            raise TypeError(f"it gave {task!r:.100}; expected mappings with `prompt`, a string or a list of messages")
        return json.dumps(dict(task))


def open_on_step_end(config: Config) -> OnStepEnd | None:
    """Raises ConfigError."""
    data = config.data
    return OnStepEnd(data.on_step_end, data.on_step_end_options) if data.on_step_end else None
