"""A walk over a lake, an environment that rewards turns and names its states: what `learner.advantage: gigpo` needs.

asyncrl launch --config configs/gigpo.yaml
"""

from __future__ import annotations

import random
from typing import Any

import asyncrl

MOVES = {"u": (-1, 0), "d": (1, 0), "l": (0, -1), "r": (0, 1)}


class Walk(asyncrl.Environment):
    """From one corner of a square of ice to the other: the first of the letters u, d, l, r in a message is a step."""

    replayable = True

    def __init__(self, size: int = 4, holes: int = 2) -> None:
        self._size, self._holes = size, holes

    async def reset(self, task: dict[str, Any]) -> list[dict[str, Any]]:
        cells = [(row, column) for row in range(self._size) for column in range(self._size)]
        self._ice = set(random.Random(task["seed"]).sample(cells[1:-1], self._holes))
        self._at, self._goal = cells[0], cells[-1]
        self.reset_state = repr(self._at)  # siblings that come back to the start are in the state of the first turn
        return [{"role": "user", "content": f"{task['prompt']}\n{self._shown()}"}]

    async def step(self, message: dict[str, Any]) -> asyncrl.Turn:
        letter = next((c for c in message["content"] or "" if c in MOVES), None)
        there = self._at if letter is None else tuple(a + b for a, b in zip(self._at, MOVES[letter], strict=True))
        if letter is None or not all(0 <= x < self._size for x in there):
            return self._goes_on(-0.1)  # this turn wasted a step, whatever the others do
        self._at = there
        if self._at == self._goal:
            return asyncrl.Turn(reward=1.0, done=True, rewards={"arrived": 1.0})
        if self._at in self._ice:
            return asyncrl.Turn(reward=-0.5, done=True, rewards={"arrived": 0.0})
        return self._goes_on(0.0)

    def _goes_on(self, reward: float) -> asyncrl.Turn:
        messages = [{"role": "user", "content": self._shown()}]
        return asyncrl.Turn(messages=messages, reward=reward, state=repr(self._at))

    def _shown(self) -> str:
        marks = {self._at: "x", self._goal: "G"} | {cell: "o" for cell in self._ice}
        rows = range(self._size)
        return "\n".join("".join(marks.get((row, column), ".") for column in rows) for row in rows)
