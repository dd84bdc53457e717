"""The quickstart's tasks: "What is fox + owl?", where only a store knows what fox and owl are.

To succeed takes four turns in the right order: look up the one key, look up the other, give both values to a
calculator, answer with what came back. Procedural, without end, verifiable; nothing is downloaded.

Train and held-out tasks are disjoint by construction: every unordered pair of words belongs, by a hash, to one side.
"""

from __future__ import annotations

import random
import zlib

from asyncrl.data.base import Task

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


class LookupSource:
    """A task has `prompt`, `store` (word -> int in 10..99, both words among them), `keys`, `sign`, `answer`."""

    train_size: int | None = None

    def __init__(self, seed: int = 0, held_out_size: int = 200) -> None:
        self._seed = seed
        self.held_out_size = held_out_size

    def task(self, index: int) -> Task:
        return self._draw("train", index)

    def held_out(self, index: int) -> Task:
        if not 0 <= index < self.held_out_size:
            raise IndexError(f"held-out task {index}: expected 0 <= index < {self.held_out_size}")
        return self._draw("held_out", index)

    def _draw(self, split: str, index: int) -> Task:
        rng = random.Random(f"lookup/{self._seed}/{split}/{index}")
        words = rng.sample(WORDS, _STORE_SIZE)
        while is_held_out(words[0], words[1]) != (split == "held_out"):
            words = rng.sample(WORDS, _STORE_SIZE)
        first, second = words[:2]
        store = {word: rng.randint(10, 99) for word in sorted(words)}
        sign = rng.choice(SIGNS)
        a, b = store[first], store[second]
        answer = {"+": a + b, "-": a - b, "*": a * b}[sign]
        return {
            "id": f"lookup-{self._seed}-{split}-{index}",
            "prompt": f"What is {first} {sign} {second}?",
            "store": store,
            "keys": [first, second],
            "sign": sign,
            "answer": str(answer),
        }
