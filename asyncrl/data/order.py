"""The order in which a finite source goes round its tasks."""

from __future__ import annotations

import random


class EpochOrder:
    """A new order in each round, the same for the same name and seed in every process."""

    def __init__(self, name: str, seed: int, size: int) -> None:
        self._name, self._seed, self._size = name, seed, size
        self._epoch = -1
        self._order: list[int] = []

    def position(self, index: int) -> int:
        """Which of the `size` tasks is the one at `index` >= 0."""
        epoch, position = divmod(index, self._size)
        if self._epoch != epoch:
            order = list(range(self._size))
            random.Random(f"{self._name}/{self._seed}/{epoch}").shuffle(order)
            self._epoch, self._order = epoch, order
        return self._order[position]
