"""Unlimited procedural tasks, made by a user's function from a random generator."""

from __future__ import annotations

import inspect
import json
import random
from collections.abc import Callable, Mapping
from typing import Any

from asyncrl.data.base import Task
from asyncrl.errors import ConfigError
from asyncrl.plugins import resolve

LEVEL = 2**32
"""A task's index is its level times this, and its number in the level (`data.curriculum: levels`)."""
_DRAWS = 100
"""Attempts to draw a training task whose prompt is not held out."""


class GeneratedSource:
    """Every task comes from a random generator seeded by `data.seed`, its side (training, held out) and its index."""

    train_size: int | None = None

    def __init__(
        self,
        function: str,
        *,
        options: dict[str, Any] | None = None,
        levels: int = 1,
        held_out_size: int = 100,
        seed: int = 0,
    ) -> None:
        """
        Args:
            function: import path of `make(rng: random.Random, **options) -> mapping` with at least `prompt`; all that
                is random in it must come from `rng`. A parameter `level`, if it has one, gets the level.
            options: its keyword arguments.
            levels: how many levels the held-out tasks are spread over.
            held_out_size: how many tasks are kept out of training; none of their prompts is trained on.
        Raises ConfigError if the function is not found, or does not make tasks.
        """
        try:
            self._make: Callable[..., Mapping[str, Any]] = resolve(function, {}, "data.options.function")
        except ValueError as error:
            raise ConfigError(str(error)) from error
        self._function, self._options, self._seed = function, options or {}, seed
        self._by_level = "level" in inspect.signature(self._make).parameters
        if levels > 1 and not self._by_level:
            raise ConfigError(f"data.options.levels is {levels}, and {function} has no parameter `level`: add one.")
        self.held_out_size = held_out_size
        held_out = (index % levels * LEVEL + index for index in range(held_out_size))
        self._held = [self._draw("held_out", index, 0) for index in held_out]
        self._held_prompts = {_text(task) for task in self._held}

    def task(self, index: int) -> Task:
        for draw in range(_DRAWS):
            task = self._draw("train", index, draw)
            if _text(task) not in self._held_prompts:
                return task
        raise ConfigError(
            f"data.options.function is {self._function!r}: {_DRAWS} tasks in a row had prompts that are held out. "
            "Let it make more kinds of tasks, or lower data.options.held_out_size."
        )

    def held_out(self, index: int) -> Task:
        if not 0 <= index < self.held_out_size:
            raise IndexError(f"held-out task {index}: expected 0 <= index < {self.held_out_size}")
        return self._held[index]

    def _draw(self, side: str, index: int, draw: int) -> Task:
        level = {"level": index // LEVEL} if self._by_level else {}
        made = self._make(random.Random(f"generated/{self._seed}/{side}/{index}/{draw}"), **self._options, **level)
        if not isinstance(made, Mapping) or not isinstance(made.get("prompt"), str | list):
            raise ConfigError(
                f"data.options.function is {self._function!r}, which made {made!r:.100}: expected a mapping with "
                "`prompt`, a string or a list of messages."
            )
        return {"id": f"{self._function.rpartition(':')[2]}-{self._seed}-{side}-{index}", **made}


def _text(task: Task) -> str:
    return json.dumps(task["prompt"], sort_keys=True)
