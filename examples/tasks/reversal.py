"""Reversal over lengths: the policy reads 2 to 8 letters and answers with them in reverse. One turn.

The demonstrations copy a text as it is instead of reversing it, the more often the longer it is: a start model reverses
short texts and copies long ones, so that tasks of every difficulty are there.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from typing import Any

import asyncrl
from asyncrl.data.order import DrawnTasks

LETTERS = "abcdefghijklmnop"
LENGTHS = (2, 8)

PIECES = ("user\n", "assistant\n")
STEPS = 600


class Tasks(DrawnTasks):
    """A text belongs, by a hash, to training or to the held-out tasks, whatever the seed."""

    def __init__(self, seed: int = 0, held_out_size: int = 200) -> None:
        super().__init__(held_out_size)
        self._seed = seed

    def draw(self, side: str, index: int) -> dict[str, Any]:
        rng = random.Random(f"reversal/{self._seed}/{side}/{index}")
        while True:
            text = "".join(rng.sample(LETTERS, rng.randint(*LENGTHS)))
            if (zlib.crc32(text.encode()) % 5 == 0) == (side == "held_out"):
                return {"id": f"reversal-{self._seed}-{side}-{index}", "prompt": text}


class Game(asyncrl.Environment):
    """Reward 1 for the reversed text, else 0. `letters` is the share of letters in their place."""

    async def reset(self, task: Any) -> list[dict[str, Any]]:
        self._expected = task["prompt"][::-1]
        return [{"role": "user", "content": task["prompt"]}]

    async def step(self, message: Any) -> asyncrl.Turn:
        answer = message["content"].strip()
        right = sum(a == b for a, b in zip(answer, self._expected, strict=False)) / len(self._expected)
        success = float(answer == self._expected)
        return asyncrl.Turn(reward=success, done=True, metrics={"success": success, "letters": right})


def oracle(messages: Sequence[Any]) -> str:
    return str(messages[0]["content"])[::-1]


def flawed(messages: Sequence[Any], rng: random.Random) -> str:
    """Copies n letters instead of reversing them in 25 + 8 n of 100 cases; one letter in fifty is another one."""
    text = oracle(messages)
    if rng.random() < 0.25 + 0.08 * len(text):
        text = text[::-1]
    return "".join(rng.choice(LETTERS) if rng.random() < 0.02 else letter for letter in text)
