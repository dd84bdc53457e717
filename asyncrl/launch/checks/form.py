"""Checks that what `env.name` names has the methods of an environment, or the parameters of an agent. Pure."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from asyncrl.actors.envs.agent import is_agent
from asyncrl.actors.envs.protocol import Environment
from asyncrl.actors.envs.tool_env import ToolEnvironment

_AGENT = ("task", "client")


def check_form(named: Any, name: str, options: Mapping[str, Any]) -> None:
    """Raises ValueError unless `named`, the value of `env.name`, can be an environment or an agent."""
    if not callable(named):
        raise ValueError(
            f"env.name is {name!r}, which is of type {type(named).__name__}: expected a subclass of "
            "asyncrl.Environment, or an agent, a function of task and client."
        )
    if inspect.isclass(named):
        _check_class(named, name)
        if named is ToolEnvironment and options.get("score") is None:
            raise ValueError(
                "env.name is 'tools' and env.options.score is not set: give the name or the import path of a score "
                "(`asyncrl rewards` lists them)."
            )
    elif is_agent(named) or _needs_more(named, options):
        _check_agent(named, name)


def _check_class(named: type, name: str) -> None:
    missing = [method for method in ("reset", "step") if not callable(getattr(named, method, None))]
    missing += sorted(getattr(named, "__abstractmethods__", ()))
    if not issubclass(named, Environment):
        missing += [member for member in ("close",) if not hasattr(named, member)]
    if missing:
        raise ValueError(
            f"env.name is {name!r}, a class without {' and '.join(dict.fromkeys(missing))}: an environment has `async "
            "def reset(self, task)` and `async def step(self, message)`; derive it from asyncrl.Environment "
            "(docs/how-to/environments.md)."
        )
    if plain := [method for method in ("reset", "step", "close") if _is_plain(getattr(named, method))]:
        raise ValueError(
            f"env.name is {name!r}, a class that defines {' and '.join(plain)} with `def`: write `async def`; "
            "env.workers is for what blocks inside (docs/how-to/environments.md)."
        )


def _is_plain(method: Any) -> bool:
    """Whether a method is a function that gives no awaitable. One that hands on another's says so by its annotation.

    >>> async def step(self, message): ...
    >>> def handed_on(self, message) -> "Awaitable[Turn]": return step(self, message)
    >>> _is_plain(step), _is_plain(handed_on), _is_plain(lambda self, message: None)
    (False, False, True)
    """
    method = inspect.unwrap(method)
    if not inspect.isfunction(method) or inspect.iscoroutinefunction(method):
        return False
    said = str(method.__annotations__.get("return", ""))
    return not any(word in said for word in ("Awaitable", "Coroutine", "Future", "Task["))


def _check_agent(named: Any, name: str) -> None:
    parameters = tuple(inspect.signature(named).parameters)
    if tuple(parameter.lstrip("_") for parameter in parameters[:2]) != _AGENT:
        raise ValueError(
            f"env.name is {name!r}, a function of ({', '.join(parameters)}): an agent's first two parameters are task "
            "and client, as in `async def agent(task, client, *, option=...)` (docs/how-to/agents.md)."
        )


def _needs_more(named: Any, options: Mapping[str, Any]) -> bool:
    """Whether a function needs parameters that the options lack, so that it is no factory of environments."""
    if not inspect.isfunction(named):
        return False
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(named).parameters.values()
    return any(p.default is p.empty and p.kind not in variadic and p.name not in options for p in parameters)
