"""Mini-Wordle: find the secret among 30 words of three letters in four guesses; a first guess is given. Several turns.

After each guess a mark stands for each letter: `+` in its place, `~` in another place, `.` not in the word. The
demonstrations mostly guess the next word of the list, whatever the marks say: a start model does the same.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from itertools import product
from typing import Any

import asyncrl
from asyncrl.data.order import DrawnTasks

# fmt: off
WORDS = (
    "ape", "bat", "bed", "bog", "bus", "cap", "cub", "cup", "den", "fan", "fog", "gap", "hen", "hot", "hut",
    "mat", "net", "oil", "pen", "pet", "pin", "rob", "sad", "sub", "tea", "tin", "tub", "tug", "vat", "web",
)
# fmt: on
TRIES = 4

PIECES = ("user\n", "assistant\n", "not a word", *WORDS, *(" " + "".join(marks) for marks in product("+~.", repeat=3)))
STEPS = 600


def marks(guess: str, secret: str) -> str:
    """The marks of a guess; words have no letter twice.

    >>> marks("tea", "eat")
    '~~~'
    """
    return "".join("+" if a == b else "~" if a in secret else "." for a, b in zip(guess, secret, strict=True))


class Tasks(DrawnTasks):
    """A pair of secret and first guess belongs, by a hash, to training or to the held-out tasks, whatever the seed."""

    def __init__(self, seed: int = 0, held_out_size: int = 200) -> None:
        super().__init__(held_out_size)
        self._seed = seed

    def draw(self, side: str, index: int) -> dict[str, Any]:
        rng = random.Random(f"wordle/{self._seed}/{side}/{index}")
        while True:
            secret, first = rng.sample(WORDS, 2)
            if (zlib.crc32(f"{secret} {first}".encode()) % 5 == 0) == (side == "held_out"):
                prompt = f"{first} {marks(first, secret)}"
                return {"id": f"wordle-{self._seed}-{side}-{index}", "prompt": prompt, "secret": secret, "first": first}


class Game(asyncrl.Environment):
    """Reward 1 for the secret within four guesses, else 0. What is not in the list costs a guess."""

    replayable = True

    async def reset(self, task: Any) -> list[dict[str, Any]]:
        self._secret, self._left = task["secret"], TRIES
        return [{"role": "user", "content": task["prompt"]}]

    async def step(self, message: Any) -> asyncrl.Turn:
        guess = message["content"].strip()
        self._left -= 1
        found = float(guess == self._secret)
        if found or self._left == 0:
            return asyncrl.Turn(reward=found, done=True, metrics={"success": found, "guesses": TRIES - self._left})
        answer = f"{guess} {marks(guess, self._secret)}" if guess in WORDS else "not a word"
        return asyncrl.Turn(messages=[{"role": "user", "content": answer}])


def oracle(messages: Sequence[Any]) -> str:
    """Of the words that fit all marks, the one that divides them best."""
    known = [tuple(m["content"].split(" ")) for m in messages if m["role"] == "user" and m["content"] != "not a word"]
    fitting = [word for word in WORDS if all(marks(guess, word) == seen for guess, seen in known)]
    return max(fitting, key=lambda guess: len({marks(guess, word) for word in fitting}))


def flawed(messages: Sequence[Any], rng: random.Random) -> str:
    """Guesses the word behind the last one in the list in three of four cases."""
    if rng.random() < 0.75:
        last = messages[-1]["content"].split(" ")[0]
        return WORDS[(WORDS.index(last) + 1) % len(WORDS)]
    return oracle(messages)
