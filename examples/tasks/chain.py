"""A lookup chain of log-normal length: follow words through a store until it gives a number. Few turns, or very many.

Each turn shows two words and which of them leads on; whoever takes the other one ends at a wrong number, after as many
turns. The demonstrations mostly take the first word, whatever is said: a start model does the same.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from typing import Any

import asyncrl
from asyncrl.data.order import DrawnTasks

# fmt: off
WORDS = (
    "ant", "bat", "bee", "cat", "cow", "crab", "deer", "dog", "duck", "eel", "elk", "fox",
    "frog", "goat", "hare", "hen", "lion", "mole", "moth", "newt", "owl", "seal", "toad", "wolf",
)
# fmt: on
PLACES = ("first", "second")
MEDIAN, SIGMA, LONGEST = 3.0, 0.8, 24
"""Of the number of words to follow: exp(N(ln MEDIAN, SIGMA)), rounded, from 1 to LONGEST."""

PIECES = (
    "user\n", "assistant\n", " or ", "answer ", *(f", {place}" for place in PLACES), *WORDS,
    *(str(number) for number in range(10, 100)),
)  # fmt: skip
STEPS = 400


class Tasks(DrawnTasks):
    """A first pair of words belongs, by a hash, to training or to the held-out tasks, whatever the seed."""

    def __init__(self, seed: int = 0, held_out_size: int = 200) -> None:
        super().__init__(held_out_size)
        self._seed = seed

    def draw(self, side: str, index: int) -> dict[str, Any]:
        rng = random.Random(f"chain/{self._seed}/{side}/{index}")
        length = min(LONGEST, max(1, round(rng.lognormvariate(0.0, SIGMA) * MEDIAN)))
        pairs = [rng.sample(WORDS, 2) for _ in range(length)]
        while (zlib.crc32(" ".join(pairs[0]).encode()) % 5 == 0) != (side == "held_out"):
            pairs[0] = rng.sample(WORDS, 2)
        places = [rng.randrange(2) for _ in pairs]
        answer, wrong = rng.sample(range(10, 100), 2)
        return {
            "id": f"chain-{self._seed}-{side}-{index}", "prompt": shown(pairs[0], places[0]), "pairs": pairs,
            "places": places, "answer": answer, "wrong": wrong,
        }  # fmt: skip


class Game(asyncrl.Environment):
    """Reward 1 for the number at the end of the right way, else 0; a word that was not shown ends the episode.

    The state is the place in the chain, and whether all words so far were right: `learner.advantage: gigpo` compares
    siblings there."""

    reset_state = "0 True"

    replayable = True

    async def reset(self, task: Any) -> list[dict[str, Any]]:
        self._task, self._at, self._right = task, 0, True
        return [{"role": "user", "content": task["prompt"]}]

    async def step(self, message: Any) -> asyncrl.Turn:
        task, word = self._task, message["content"].strip()
        length = len(task["pairs"])
        if self._at == length:
            success = float(self._right and word == str(task["answer"]))
            return asyncrl.Turn(reward=success, done=True, metrics={"success": success, "length": length})
        pair, place = task["pairs"][self._at], task["places"][self._at]
        if word not in pair:
            return asyncrl.Turn(done=True, metrics={"success": 0.0, "length": length})
        self._right = self._right and word == pair[place]
        self._at += 1
        if self._at < length:
            answer = shown(task["pairs"][self._at], task["places"][self._at])
        else:
            answer = f"answer {task['answer'] if self._right else task['wrong']}"
        return asyncrl.Turn(messages=[{"role": "user", "content": answer}], state=f"{self._at} {self._right}")


def shown(pair: Sequence[str], place: int) -> str:
    """The text of one turn.

    >>> shown(["owl", "bat"], 1)
    'owl or bat, second'
    """
    return f"{pair[0]} or {pair[1]}, {PLACES[place]}"


def oracle(messages: Sequence[Any]) -> str:
    """The word that leads on; the number, once there is one."""
    words = messages[-1]["content"].replace(",", "").split(" ")
    return str(words[1] if words[0] == "answer" else words[2 * PLACES.index(words[3])])


def flawed(messages: Sequence[Any], rng: random.Random) -> str:
    """Takes the first word in three of five cases, and any word in one of fifty."""
    text, drawn = messages[-1]["content"], rng.random()
    if text.startswith("answer ") or drawn >= 0.62:
        return oracle(messages)
    return rng.choice(WORDS) if drawn < 0.02 else text.split(" ")[0]
