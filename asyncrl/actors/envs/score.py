"""Scores: from a task and the policy's final text to a number. The signature is verl's: its reward files load as is."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from asyncrl.data.base import Task

Score = Callable[..., Any]
"""`(data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping) -> float`, or a dict with `score` (its
other numbers become metrics); sync (run in a thread) or async."""


async def run_score(score: Score, task: Task, solution: str) -> tuple[float, dict[str, float]]:
    """(the score, further numbers by name) of `solution`. Raises what the score raises; TypeError on a non-number."""
    truth = task["reward_model"].get("ground_truth") if "reward_model" in task else task.get("ground_truth")
    columns = {
        "data_source": task.get("data_source", ""),
        "solution_str": solution,
        "ground_truth": truth,
        "extra_info": task.get("extra_info", {}),
    }
    if inspect.iscoroutinefunction(score):
        result = await score(**columns)
    else:
        result = await asyncio.to_thread(score, **columns)
        if inspect.isawaitable(result):
            result = await result
    name = getattr(score, "__name__", type(score).__name__)
    if isinstance(result, Mapping):
        if "score" not in result:
            raise TypeError(f"score {name} returned a dict without `score`: {sorted(map(str, result))}")
        numbers = {key: float(value) for key, value in result.items() if isinstance(value, bool | int | float)}
        return numbers.pop("score"), numbers
    if not isinstance(result, bool | int | float):
        raise TypeError(f"score {name} returned {type(result).__name__}; expected a number or a dict with `score`")
    return float(result), {}
