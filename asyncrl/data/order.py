"""The order in which a finite source repeats its tasks."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence

from asyncrl.data.base import Task
from asyncrl.errors import ConfigError


class EpochOrder:
    """A new order in each epoch, the same in every process for the same name and seed."""

    def __init__(self, name: str, seed: int, size: int) -> None:
        self._name, self._seed, self._size = name, seed, size
        self._epoch = -1
        self._order: list[int] = []

    def position(self, index: int) -> int:
        """The task, of `size`, at `index` >= 0."""
        epoch, position = divmod(index, self._size)
        if self._epoch != epoch:
            order = list(range(self._size))
            random.Random(f"{self._name}/{self._seed}/{epoch}").shuffle(order)
            self._epoch, self._order = epoch, order
        return self._order[position]


class DrawnTasks(ABC):
    """An unlimited TaskSource: a task follows from its side and its index."""

    train_size: int | None = None

    def __init__(self, held_out_size: int) -> None:
        self.held_out_size = held_out_size

    def task(self, index: int) -> Task:
        return self.draw("train", index)

    def held_out(self, index: int) -> Task:
        if not 0 <= index < self.held_out_size:
            raise IndexError(f"held-out task {index}: expected 0 <= index < {self.held_out_size}")
        return self.draw("held_out", index)

    @abstractmethod
    def draw(self, side: str, index: int) -> Task:
        """The task at `index` of the side `train` or `held_out`; no task is on both."""


class ListedTasks:
    """A TaskSource of two lists, with the training tasks in a new order in each epoch."""

    def __init__(self, name: str, train: Sequence[Task], held_out: Sequence[Task], seed: int) -> None:
        self._train, self._held_out = train, held_out
        self._order = EpochOrder(name, seed, len(train))
        self.train_size: int | None = len(train)
        self.held_out_size = len(held_out)

    def task(self, index: int) -> Task:
        return self._train[self._order.position(index)]

    def held_out(self, index: int) -> Task:
        if not 0 <= index < self.held_out_size:
            raise IndexError(f"held-out task {index}: expected 0 <= index < {self.held_out_size}")
        return self._held_out[index]


def training_size(size: int, held_out_size: int, what: str) -> int:
    """How many of `size` tasks are left for training. `what` they are, e.g. "rows of FILE". Raises ConfigError."""
    if not 0 <= held_out_size < size:
        raise ConfigError(
            f"data.options.held_out_size is {held_out_size}; expected at least 0 and less than the {size} {what}, so "
            "that some are left for training."
        )
    return size - held_out_size
