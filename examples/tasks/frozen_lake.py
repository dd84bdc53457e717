"""FrozenLake 4x4 in text: from a1 to d4 (row and column) around the holes. Many turns, with rewards in each.

The demonstrations mostly go right to the edge and then down, whatever lies there: a start model does the same.
"""

from __future__ import annotations

import random
import zlib
from collections import deque
from collections.abc import Collection, Sequence
from itertools import product
from typing import Any

import asyncrl
from asyncrl.data.order import DrawnTasks

CELLS = tuple(f"{row}{column}" for row, column in product("abcd", "1234"))
START, GOAL = "a1", "d4"
MOVES = {"right": (0, 1), "down": (1, 0), "left": (0, -1), "up": (-1, 0)}
MOST_MOVES = 12

PIECES = ("user\n", "assistant\n", "holes", ". at", "at", "not a move", *(f" {cell}" for cell in CELLS), *MOVES)
STEPS = 500


def moved(cell: str, move: str) -> str:
    """The cell behind a move; the same one at the edge.

    >>> moved("a1", "down"), moved("a1", "up")
    ('b1', 'a1')
    """
    row, column = ord(cell[0]) + MOVES[move][0], ord(cell[1]) + MOVES[move][1]
    return f"{chr(row)}{chr(column)}" if f"{chr(row)}{chr(column)}" in CELLS else cell


def path(start: str, holes: Collection[str]) -> list[str] | None:
    """The moves of a shortest way to the goal; None if there is none."""
    ways: dict[str, list[str]] = {start: []}
    open_cells = deque([start])
    while open_cells:
        cell = open_cells.popleft()
        if cell == GOAL:
            return ways[cell]
        for move in MOVES:
            after = moved(cell, move)
            if after not in ways and after not in holes:
                ways[after] = [*ways[cell], move]
                open_cells.append(after)
    return None


class Tasks(DrawnTasks):
    """A set of holes belongs, by a hash, to training or to the held-out tasks, whatever the seed; the goal can be
    reached."""

    def __init__(self, seed: int = 0, held_out_size: int = 200) -> None:
        super().__init__(held_out_size)
        self._seed = seed

    def draw(self, side: str, index: int) -> dict[str, Any]:
        rng = random.Random(f"frozen-lake/{self._seed}/{side}/{index}")
        inner = [cell for cell in CELLS if cell not in (START, GOAL)]
        while True:
            holes = sorted(rng.sample(inner, rng.randint(3, 5)))
            if path(START, holes) and (zlib.crc32(" ".join(holes).encode()) % 5 == 0) == (side == "held_out"):
                prompt = f"holes {' '.join(holes)}. at {START}"
                return {"id": f"frozen-lake-{self._seed}-{side}-{index}", "prompt": prompt, "holes": holes}


class Game(asyncrl.Environment):
    """Reward 1 at the goal, -0.5 in a hole, where the episode ends, and -0.1 for a move that does not move. The reward
    `success` is 1 at the goal. The cell is the state: `learner.advantage: gigpo` compares siblings that stood on it."""

    reset_state = START
    replayable = True

    async def reset(self, task: Any) -> list[dict[str, Any]]:
        self._cell, self._holes, self._left = START, task["holes"], MOST_MOVES
        return [{"role": "user", "content": task["prompt"]}]

    async def step(self, message: Any) -> asyncrl.Turn:
        move = message["content"].strip()
        before, self._left = self._cell, self._left - 1
        self._cell = moved(before, move) if move in MOVES else before
        goal, fell = float(self._cell == GOAL), float(self._cell in self._holes)
        reward = goal - 0.5 * fell - 0.1 * (self._cell == before)
        if goal or fell or self._left == 0:
            return asyncrl.Turn(
                reward=reward, done=True, rewards={"success": goal}, metrics={"success": goal, "fell": fell}
            )
        answer = f"at {self._cell}" if move in MOVES else "not a move"
        return asyncrl.Turn(messages=[{"role": "user", "content": answer}], reward=reward, state=self._cell)


def oracle(messages: Sequence[Any]) -> str:
    """The first move of a shortest way."""
    return _best(*_read(messages))


def flawed(messages: Sequence[Any], rng: random.Random) -> str:
    """Goes right or, at the edge, down in 58 of 100 cases, and anywhere in 4."""
    cell, holes = _read(messages)
    drawn = rng.random()
    if drawn < 0.58:
        return "right" if cell[1] != "4" else "down"
    return rng.choice(list(MOVES)) if drawn < 0.62 else _best(cell, holes)


def _best(cell: str, holes: Collection[str]) -> str:
    moves = path(cell, holes)
    if not moves:
        raise ValueError(f"no way from {cell} to {GOAL} around {holes}")
    return moves[0]


def _read(messages: Sequence[Any]) -> tuple[str, list[str]]:
    """The cell of the policy, and the holes."""
    told = [m["content"] for m in messages if m["role"] == "user" and m["content"] != "not a move"]
    return told[-1][-2:], told[0].removeprefix("holes ").partition(".")[0].split(" ")
