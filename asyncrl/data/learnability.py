"""A curriculum that draws each task in proportion to what can be learned from it: p (1 - p), p its success.

p is not known, but counted: of each task the ledger gives successes s and failures f. With a uniform prior the mean of
p (1 - p) is ab / ((a + b) (a + b + 1)) for a = s + 1, b = f + 1: 1/6 for a task that was never played, almost 1/4 for
one that is solved half of the time, little for one that is always or never solved.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from asyncrl.data.base import GroupResult
from asyncrl.data.order import EpochOrder
from asyncrl.data.per_task import PerTask
from asyncrl.errors import ConfigError

_UNIT = 8
"""Counts are kept in eighths, one byte for the successes of a task and one for its failures."""
_MOST = 255
_PROPOSALS = 256
"""Tasks that one draw tries. A proposal is taken with 4 p (1 - p), so that hardly a draw needs them all."""


def learnability(successes: float, failures: float) -> float:
    """Mean of p (1 - p) under the counts, 0 to 1/4.

    >>> learnability(0, 0), learnability(99, 99) > 0.248, learnability(8, 0) < 0.09
    (0.16666666666666666, True, True)
    """
    a, b = successes + 1, failures + 1
    return a * b / ((a + b) * (a + b + 1))


class Learnability:
    """Draws tasks in proportion to their learnability^power; a share of the draws goes through all tasks in order."""

    def __init__(
        self,
        *,
        power: float = 1.0,
        explore: float = 0.1,
        decay: float = 0.5,
        success: float = 1.0,
        seed: int = 0,
        train_size: int | None = None,
    ) -> None:
        """
        Args:
            power: how much more often the more learnable are drawn; 0: all alike.
            explore: the share of draws that takes the tasks once per epoch, whatever was counted.
            decay: how much of a task's counts stays when a group of it is complete.
            success: reward from which on an episode is one.
        Raises ConfigError for an unlimited source, and for impossible numbers.
        """
        self._counts = PerTask("learnability", train_size, width=2)
        if not (0 <= power <= 10 and 0 <= explore <= 1 and 0 <= decay < 1):
            raise ConfigError(
                f"data.curriculum_options: power {power}, explore {explore}, decay {decay}: expected "
                "0 <= power <= 10, 0 <= explore <= 1 and 0 <= decay < 1."
            )
        self._power, self._explore, self._decay, self._success = power, explore, decay, success
        self._seed, self._size = seed, self._counts.size
        self._order = EpochOrder("learnability", seed, self._size)

    def draw(self, number: int) -> int:
        """Return the index of a task; the order of each epoch is made here, not by the source."""
        rng = random.Random(f"learnability/{self._seed}/{number}")
        if rng.random() < self._explore:
            return self._order.position(number)
        index = rng.randrange(self._size)
        for _ in range(_PROPOSALS):
            if rng.random() < (4 * learnability(*self.counts(index))) ** self._power:
                break
            index = rng.randrange(self._size)
        return index

    def counts(self, index: int) -> tuple[float, float]:
        """Successes and failures of a task, the older ones decayed."""
        solved, failed = self._counts.bytes[2 * index : 2 * index + 2]
        return solved / _UNIT, failed / _UNIT

    def update(self, version: int, results: Sequence[GroupResult]) -> None:
        for result in results:
            solved = sum(reward >= self._success for reward in result.rewards)
            before = self.counts(result.index)
            now = [self._decay * before[0] + solved, self._decay * before[1] + len(result.rewards) - solved]
            scale = min(_UNIT, _MOST / max(*now, 1.0))  # a group of more than 31 counts as less, its share stays
            counts = bytes(int(scale * count + 0.5) for count in now)
            self._counts.bytes[2 * result.index : 2 * result.index + 2] = counts

    def state(self) -> Any:
        return self._counts.state()

    def restore(self, state: Any) -> None:
        """Raises ConfigError if the number of tasks has changed."""
        self._counts.restore(state)
