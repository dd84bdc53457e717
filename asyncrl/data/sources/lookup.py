"""The quickstart's tasks: "What is fox + owl?", where only a store knows what fox and owl are.

To succeed takes four turns in the right order: look up the one key, look up the other, give both values to a
calculator, answer with what came back. Procedural, without end, verifiable; nothing is downloaded.

Train and held-out tasks are disjoint by construction: every unordered pair of words belongs, by a hash, to one side.
"""

from __future__ import annotations

import random
import zlib

from asyncrl.data.base import Task
from asyncrl.data.order import DrawnTasks

# fmt: off
WORDS = (
    "ant", "bat", "bee", "cat", "cow", "crab", "deer", "dog", "duck", "eel", "elk", "fox",
    "frog", "goat", "hare", "hen", "lion", "mole", "moth", "newt", "owl", "seal", "toad", "wolf",
)
# fmt: on
SIGNS = ("+", "-", "*")
_STORE_SIZE = 6
_HELD_OUT_SHARE = 5  # one pair in five


def is_held_out(first: str, second: str) -> bool:
    """Whether questions about these two words, in either order, are kept out of training."""
    return zlib.crc32(" ".join(sorted((first, second))).encode()) % _HELD_OUT_SHARE == 0


class LookupSource(DrawnTasks):
    """A task has `prompt`, `store` (word -> int in 10..99, both words among them), `keys`, `sign`, `answer`."""

    def __init__(self, seed: int = 0, held_out_size: int = 200) -> None:
        super().__init__(held_out_size)
        self._seed = seed

    def draw(self, side: str, index: int) -> Task:
        rng = random.Random(f"lookup/{self._seed}/{side}/{index}")
        words = rng.sample(WORDS, _STORE_SIZE)
        while is_held_out(words[0], words[1]) != (side == "held_out"):
            words = rng.sample(WORDS, _STORE_SIZE)
        first, second = words[:2]
        store = {word: rng.randint(10, 99) for word in sorted(words)}
        sign = rng.choice(SIGNS)
        a, b = store[first], store[second]
        answer = {"+": a + b, "-": a - b, "*": a * b}[sign]
        return {
            "id": f"lookup-{self._seed}-{side}-{index}",
            "prompt": f"What is {first} {sign} {second}?",
            "store": store,
            "keys": [first, second],
            "sign": sign,
            "answer": str(answer),
        }
