"""Countdown with three numbers: write a sum or difference that uses each number once and gives the target. One turn.

The demonstrations mostly add the three numbers as they stand, whatever the target: a start model does the same.
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Iterator, Sequence
from itertools import permutations, product
from typing import Any

import asyncrl
from asyncrl.data.order import DrawnTasks

MOST = 9
"""The largest number."""

PIECES = ("user\n", "assistant\n", " = ", *(str(number) for number in range(10, 3 * MOST + 1)))
STEPS = 700

_ANSWER = re.compile(r"(\d{1,2})([+-])(\d{1,2})([+-])(\d{1,2})")


def value(answer: str) -> tuple[list[int], int] | None:
    """The numbers of an answer, and what it gives; None for one of another form.

    >>> value("7-3+5"), value("7-3")
    (([7, 3, 5], 9), None)
    """
    found = _ANSWER.fullmatch(answer)
    if found is None:
        return None
    a, b, c = int(found[1]), int(found[3]), int(found[5])
    return [a, b, c], a + (b if found[2] == "+" else -b) + (c if found[4] == "+" else -c)


class Tasks(DrawnTasks):
    """Three numbers, the largest first, and a target: by a hash they belong to training or to the held-out tasks,
    whatever the seed."""

    def __init__(self, seed: int = 0, held_out_size: int = 200) -> None:
        super().__init__(held_out_size)
        self._seed = seed

    def draw(self, side: str, index: int) -> dict[str, Any]:
        rng = random.Random(f"countdown/{self._seed}/{side}/{index}")
        while True:
            numbers = sorted((rng.randint(1, MOST) for _ in range(3)), reverse=True)
            target = sum(number * rng.choice((1, -1)) for number in numbers)
            key = f"{numbers} {target}"
            if target > 0 and (zlib.crc32(key.encode()) % 5 == 0) == (side == "held_out"):
                prompt = f"{numbers[0]} {numbers[1]} {numbers[2]} = {target}"
                return {"id": f"countdown-{self._seed}-{side}-{index}", "prompt": prompt}


class Game(asyncrl.Environment):
    """Reward 1 for an answer that uses the three numbers and gives the target, else 0. `form`: it uses the numbers."""

    async def reset(self, task: Any) -> list[dict[str, Any]]:
        self._numbers, self._target = _read(task["prompt"])
        return [{"role": "user", "content": task["prompt"]}]

    async def step(self, message: Any) -> asyncrl.Turn:
        found = value(message["content"].strip())
        form = found is not None and sorted(found[0]) == sorted(self._numbers)
        success = float(form and found is not None and found[1] == self._target)
        return asyncrl.Turn(reward=success, done=True, metrics={"success": success, "form": float(form)})


def oracle(messages: Sequence[Any]) -> str:
    """The first solution, with the numbers as they stand if there is one."""
    numbers, target = _read(messages[0]["content"])
    return next(answer for answer in _answers(numbers) if (value(answer) or ([], 0))[1] == target)


def flawed(messages: Sequence[Any], rng: random.Random) -> str:
    """Adds the numbers in 55 of 100 cases."""
    numbers, _ = _read(messages[0]["content"])
    return "+".join(map(str, numbers)) if rng.random() < 0.55 else oracle(messages)


def _answers(numbers: Sequence[int]) -> Iterator[str]:
    for a, b, c in permutations(numbers):
        for first, second in product("+-", repeat=2):
            yield f"{a}{first}{b}{second}{c}"


def _read(prompt: str) -> tuple[list[int], int]:
    numbers, _, target = prompt.partition(" = ")
    return [int(number) for number in numbers.split(" ")], int(target)
