"""Scores: from a task and the policy's final text to a number. The signature is verl's: its reward files load as is."""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from asyncrl.data.base import Task

Score = Callable[..., Any]
"""`(data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping) -> float`, or a dict with `score` (its
other numbers become metrics), or `Scored`; sync (run in a thread) or async. It may leave parameters out.

A score that names a parameter `task` is given the whole task, one that names `tokens` how many tokens the policy
sampled for the text (None if it was not counted)."""

_EXTRA = ("task", "tokens")


@dataclass(frozen=True, slots=True)
class Scored:
    value: float
    """The reward."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Further numbers, reported as metrics."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """The named scores that `value` is the weighted sum of, before weights."""


async def run_score(score: Score, task: Task, solution: str, tokens: int | None = None) -> Scored:
    """The score of `solution`. Raises what the score raises; TypeError or ValueError if it is not a finite number."""
    truth = task["reward_model"].get("ground_truth") if task.get("reward_model") else task.get("ground_truth")
    columns = {
        "data_source": task.get("data_source") or "",
        "solution_str": solution,
        "ground_truth": truth,
        "extra_info": task.get("extra_info") or {},
        "task": task,
        "tokens": tokens,
    }
    return scored(await call(score, columns), name_of(score))


async def call(score: Score, columns: Mapping[str, Any]) -> Any:
    """The result of `score` for those `columns` that it has parameters for."""
    wanted = {name: value for name, value in columns.items() if asks(score, name)}
    if _is_async(score):
        return await score(**wanted)
    result = await asyncio.to_thread(score, **wanted)
    return await result if inspect.isawaitable(result) else result


def scored(result: Any, name: str) -> Scored:
    """The checked result of the score called `name`."""
    if isinstance(result, Mapping):
        if "score" not in result:
            raise TypeError(f"score {name} returned a dict without `score`: {sorted(map(str, result))}")
        numbers = {str(key): float(value) for key, value in result.items() if isinstance(value, Real)}
        if "score" not in numbers:
            raise TypeError(f"score {name} returned {result['score']!r} as `score`; expected a number")
        result = Scored(numbers.pop("score"), numbers)
    elif isinstance(result, Real):
        result = Scored(float(result))
    if not isinstance(result, Scored):
        raise TypeError(f"score {name} returned {type(result).__name__}; expected a number or a dict with `score`")
    if not math.isfinite(result.value):
        raise ValueError(f"score {name} returned {result.value}; expected a finite number")
    return result


def name_of(score: Score) -> str:
    inner = score.func if isinstance(score, functools.partial) else score
    return str(getattr(inner, "__name__", type(inner).__name__))


def _is_async(score: Score) -> bool:
    inner = score.func if isinstance(score, functools.partial) else score
    return inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(getattr(inner, "__call__", None))  # noqa: B004


def asks(score: Score, name: str) -> bool:
    """Whether `score` is given the column `name`, because it has a parameter for it.

    verl's functions may pass `**kwargs` on: these get verl's own columns, not `task` and `tokens`. asyncrl's wrappers
    have `takes_all`.
    """
    if getattr(score, "takes_all", False):
        return True
    parameters = inspect.signature(score).parameters
    return name in parameters or (name not in _EXTRA and any(p.kind is p.VAR_KEYWORD for p in parameters.values()))
