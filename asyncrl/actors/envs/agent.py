"""An agent in the place of an environment: a function that plays a whole episode over an OpenAI client.

    async def agent(task, client) -> float: ...

It asks the policy through `client` as often as it likes and returns the reward: a number, or numbers by name, whose
sum is trained on. A plain function runs in a thread.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Mapping
from typing import Any


def is_agent(found: Any) -> bool:
    """Whether what `env.name` names is an agent: a coroutine function, or a function of `task` and `client`.

    >>> def agent(task, client): ...
    >>> is_agent(agent), is_agent(dict)
    (True, False)
    """
    if inspect.isclass(found) or not callable(found):
        return False
    return inspect.iscoroutinefunction(found) or _first_two(found) == ("task", "client")


def provided_by_actor(found: Any) -> tuple[str, ...]:
    """The parameters that the actor passes itself; the rest come from `env.options`."""
    return _first_two(found) if is_agent(found) else ()


def is_async(agent: Any) -> bool:
    """Whether an agent, possibly with its options bound, is a coroutine function."""
    return inspect.iscoroutinefunction(agent.func if isinstance(agent, functools.partial) else agent)


def rewards_of(result: Any) -> tuple[float, dict[str, float]]:
    """(what is trained on, its parts by name). Raises TypeError on anything but finite numbers.

    >>> rewards_of({"right": 1.0, "short": 0.5})
    (1.5, {'right': 1.0, 'short': 0.5})
    """
    parts = dict(result) if isinstance(result, Mapping) else {}
    numbers = list(parts.values()) if isinstance(result, Mapping) else [result]
    if not numbers or not all(isinstance(n, bool | int | float) and math.isfinite(n) for n in numbers):
        raise TypeError(f"it returned {result!r}; expected the reward: a finite number, or a dict of them by name")
    return float(sum(numbers)), {str(name): float(value) for name, value in parts.items()}


def _first_two(found: Any) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(found).parameters)[:2]
    except (TypeError, ValueError):  # a callable of C has no signature
        return ()
