"""Checks of a source's members, and of what it gives: a row that fails costs that row."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from asyncrl.data.base import Task
from asyncrl.errors import ConfigError
from asyncrl.user_errors import user_error

UNREADABLE = "asyncrl_unreadable"
"""Key of a task that the source could not give: its value says why. The actor fails every attempt at it."""
MEMBERS = {
    "task": "a method `task(index)`",
    "held_out": "a method `held_out(index)`",  # which a source without held-out tasks may lack
    "train_size": "an attribute `train_size`, a number or None",
    "held_out_size": "an attribute `held_out_size`, a number",
}


def check_members(source: Any, field: str, name: str) -> None:
    """Raises ConfigError unless `source`, which `field` names, has the members of a task source."""
    unused = {"held_out"} if getattr(source, "held_out_size", None) == 0 else set()
    missing = [what for member, what in MEMBERS.items() if member not in unused and not hasattr(source, member)]
    if missing:
        raise ConfigError(
            f"{field} is {name!r}, which made a {type(source).__name__} without {' and '.join(missing)}: add it "
            "(docs/how-to/data.md)."
        )
    coroutines = [method for method in ("task", "held_out") if inspect.iscoroutinefunction(getattr(source, method, 0))]
    if coroutines:
        raise ConfigError(
            f"{field} is {name!r}, which made a {type(source).__name__} that defines {' and '.join(coroutines)} with "
            "`async def`: write `def`; a source is asked by the buffer, which awaits nothing of it."
        )


def readable(ask: Callable[[], Task], place: str) -> Task:
    """The task that `ask` gives; one with the key UNREADABLE when it raises, or gives what is no task."""
    try:
        task = ask()
        problem = not_a_task(task)
    except Exception as error:  # a user's source may raise anything
        problem = user_error(error).text
    if not problem:
        return task
    return {"id": f"unreadable/{place}", "prompt": "", UNREADABLE: f"data.source gave no {place}: {problem}"}


def not_a_task(task: Any) -> str:
    """Why `task` is none; empty if it is one.

    >>> not_a_task({"id": "1", "prompt": "Hi"}), not_a_task({"id": "1"})
    ('', "a task without 'prompt': its keys are id")
    """
    if not isinstance(task, Mapping):
        return f"a {type(task).__name__}: expected a mapping with `id` and `prompt`"
    for key in ("id", "prompt"):
        if task.get(key) is None:
            return f"a task without {key!r}: its keys are {', '.join(map(str, task))}"
    prompt = task["prompt"]
    if isinstance(prompt, str):
        return ""
    if not isinstance(prompt, list | tuple) or not all(isinstance(m, Mapping) and "role" in m for m in prompt):
        return f"a task whose prompt is {prompt!r:.100}: expected a text or a list of messages"
    return ""
