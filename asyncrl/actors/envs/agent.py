"""Agents, which take the place of an environment: functions that play a whole episode over an OpenAI client.

    async def agent(task, client) -> float: ...

An agent calls the policy through `client` as often as it likes and returns the reward: a number, or numbers by name,
whose sum is the reward. A plain function runs in a thread.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Mapping
from typing import Any


def is_agent(named: Any) -> bool:
    """Whether what `env.name` names is an agent: a coroutine function, or a function of `task` and `client`.

    >>> def agent(task, client): ...
    >>> is_agent(agent), is_agent(dict)
    (True, False)
    """
    if inspect.isclass(named) or not callable(named):
        return False
    return inspect.iscoroutinefunction(named) or _first_two(named) == ("task", "client")


def provided_by_actor(named: Any) -> tuple[str, ...]:
    """The parameters that the actor passes itself; the rest come from `env.options`."""
    return _first_two(named) if is_agent(named) else ()


def is_async(agent: Any) -> bool:
    """Whether an agent, possibly with its options bound, is a coroutine function."""
    return inspect.iscoroutinefunction(_unbound(agent))


def is_replayable(agent: Any) -> bool:
    """Whether an agent, possibly with its options bound, declares that it can be called again from its start: it has
    `replayable = True`. Raises ValueError for what is no answer.

    >>> async def agent(task, client): ...
    >>> agent.replayable = True
    >>> is_replayable(agent)
    True
    """
    declared = getattr(_unbound(agent), "replayable", False)
    if not isinstance(declared, bool):
        raise ValueError(f"its replayable is {declared!r}, expected True or False")
    return declared


def rewards_of(result: Any) -> tuple[float, dict[str, float]]:
    """(the reward, its parts by name). Raises TypeError for anything but finite numbers.

    >>> rewards_of({"right": 1.0, "short": 0.5})
    (1.5, {'right': 1.0, 'short': 0.5})
    """
    parts = dict(result) if isinstance(result, Mapping) else {}
    numbers = list(parts.values()) if isinstance(result, Mapping) else [result]
    if not numbers or not all(isinstance(n, bool | int | float) and math.isfinite(n) for n in numbers):
        raise TypeError(f"it returned {result!r}; expected the reward: a finite number, or a dict of them by name")
    return float(sum(numbers)), {str(name): float(value) for name, value in parts.items()}


def _unbound(agent: Any) -> Any:
    return agent.func if isinstance(agent, functools.partial) else agent


def _first_two(function: Any) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(function).parameters)[:2]
    except (TypeError, ValueError):  # a callable written in C has no signature
        return ()
