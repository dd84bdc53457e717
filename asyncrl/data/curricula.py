"""Curricula choose the next task. `CURRICULA` names those that come with asyncrl.

Three of them follow the policy: `by_success` prefers tasks that it sometimes solves, `learnability` (learnability.py)
draws by how much that teaches, `levels` rises when it succeeds.

A group of equal rewards has no gradient under a group-relative estimator; all three avoid such groups.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from asyncrl.data.base import Curriculum, GroupResult
from asyncrl.data.learnability import Learnability
from asyncrl.data.order import EpochOrder
from asyncrl.data.per_task import PerTask
from asyncrl.data.sources.generated import LEVEL
from asyncrl.errors import ConfigError

_UNSEEN = 0
_STEPS = 254
"""Success is stored in a byte per task: 0 is never measured, 1 to 255 are 0.0 to 1.0."""
_DRAWS = 64


class BySuccess:
    """Draws every task once per epoch, but mostly replaces those found too easy or too hard by others."""

    def __init__(
        self,
        *,
        low: float = 0.05,
        high: float = 0.95,
        keep: float = 0.1,
        decay: float = 0.5,
        success: float = 1.0,
        seed: int = 0,
        train_size: int | None = None,
    ) -> None:
        """
        Args:
            low, high: a task whose measured success lies in between, or was never measured, is always taken.
            keep: the chance of another one, so that what was too hard is tried again and what was easy is not
                forgotten.
            decay: how much of the old measurement stays when a group of the task is complete; 0: the last one counts.
            success: reward from which on an episode is one.
        Raises ConfigError for an unlimited source, and for impossible bounds.
        """
        self._measured = PerTask("by_success", train_size)
        if not (0 <= low <= high <= 1 and 0 <= keep <= 1 and 0 <= decay < 1):
            raise ConfigError(
                f"data.curriculum_options: low {low}, high {high}, keep {keep}, decay {decay}: expected "
                "0 <= low <= high <= 1, 0 <= keep <= 1 and 0 <= decay < 1."
            )
        self._low, self._high, self._keep, self._decay, self._success = low, high, keep, decay, success
        self._seed, self._size = seed, self._measured.size
        self._order = EpochOrder("by_success", seed, self._size)

    def draw(self, number: int) -> int:
        """Return an index of the first epoch, where an index is a task: the order of epochs is made here."""
        rng = random.Random(f"by_success/{self._seed}/{number}")
        index = self._order.position(number)
        for _ in range(_DRAWS):
            if self._wanted(index) or rng.random() < self._keep:
                break
            index = rng.randrange(self._size)
        return index

    def success_of(self, index: int) -> float | None:
        """The success measured so far; None: never."""
        byte = self._measured.bytes[index]
        return None if byte == _UNSEEN else (byte - 1) / _STEPS

    def update(self, version: int, results: Sequence[GroupResult]) -> None:
        for result in results:
            share = sum(reward >= self._success for reward in result.rewards) / len(result.rewards)
            before = self.success_of(result.index)
            now = share if before is None else self._decay * before + (1 - self._decay) * share
            self._measured.bytes[result.index] = 1 + round(now * _STEPS)

    def state(self) -> Any:
        return self._measured.state()

    def restore(self, state: Any) -> None:
        """Raises ConfigError if the number of tasks has changed."""
        self._measured.restore(state)

    def _wanted(self, index: int) -> bool:
        success = self.success_of(index)
        return success is None or self._low <= success <= self._high


class Levels:
    """Draws new tasks at a level that rises with success, from a source with levels."""

    def __init__(
        self,
        *,
        levels: int,
        start: int = 0,
        raise_at: float = 0.8,
        lower_at: float = 0.1,
        window: int = 64,
        review: float = 0.2,
        success: float = 1.0,
        seed: int = 0,
    ) -> None:
        """
        Args:
            levels: how many there are; they are 0 to `levels` - 1.
            start: the first one.
            raise_at, lower_at: success in a window from which on the level is one more, or one less.
            window: groups of the present level that are judged together.
            review: the share of draws that goes to the levels below, evenly.
            success: reward from which on an episode is one.
        Raises ConfigError for impossible numbers.
        """
        if not (0 <= start < levels and 0 <= lower_at < raise_at <= 1 and window >= 1 and 0 <= review <= 1):
            raise ConfigError(
                f"data.curriculum_options: start {start}, levels {levels}, lower_at {lower_at}, raise_at {raise_at}, "
                f"window {window}, review {review}: expected 0 <= start < levels, 0 <= lower_at < raise_at <= 1, "
                "window >= 1, 0 <= review <= 1."
            )
        self._levels, self._raise_at, self._lower_at = levels, raise_at, lower_at
        self._window, self._review, self._success, self._seed = window, review, success, seed
        self.level, self._seen, self._sum = start, 0, 0.0

    def draw(self, number: int) -> int:
        rng = random.Random(f"levels/{self._seed}/{number}")
        below = self.level > 0 and rng.random() < self._review
        return (rng.randrange(self.level) if below else self.level) * LEVEL + number

    def update(self, version: int, results: Sequence[GroupResult]) -> None:
        for result in results:
            if result.index // LEVEL != self.level:
                continue
            self._seen += 1
            self._sum += sum(reward >= self._success for reward in result.rewards) / len(result.rewards)
            if self._seen == self._window:
                share = self._sum / self._window
                self._seen, self._sum = 0, 0.0
                step = int(share >= self._raise_at) - int(share <= self._lower_at)
                self.level = min(max(self.level + step, 0), self._levels - 1)

    def state(self) -> Any:
        return {"level": self.level, "seen": self._seen, "sum": self._sum}

    def restore(self, state: Any) -> None:
        self.level, self._seen, self._sum = state["level"], state["seen"], state["sum"]


class InOrder:
    """Draws every task once per epoch, in the source's order, whatever is measured."""

    def draw(self, number: int) -> int:
        return number

    def update(self, version: int, results: Sequence[GroupResult]) -> None:
        pass

    def state(self) -> Any:
        return None

    def restore(self, state: Any) -> None:
        pass


CURRICULA: dict[str, Callable[..., Curriculum]] = {
    "by_success": BySuccess,
    "in_order": InOrder,
    "learnability": Learnability,
    "levels": Levels,
}
"""A config names one of these, or gives an import path `package.module:Name`. Called with the options, and with `seed`
(`data.seed`) and `train_size` (of the source; None: unlimited) where it has these parameters."""
